"""generate_policy.py against a scripted HTTP server on loopback, hostile candidates, and real environments."""

import ast
import email.utils
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import generate_policy as gp

SCRIPT = Path(gp.__file__)
KEY = "sk-secret-0123456789abcdef"

SWING_UP = '''import numpy as np

GAIN = 8.0  # on the angle, near the top


def policy(obs: np.ndarray, step: int) -> np.ndarray:
    """Pump energy below, balance near the top — in bytes that are not all ASCII."""
    x, y, speed = obs
    theta = np.arctan2(y, x)
    energy = speed**2 / 2 + 15 * (x - 1)
    pump = 2.0 * np.sign(-speed * energy)
    return np.array([-GAIN * theta - 2.0 * speed if x > 0.9 else pump])
'''
ZERO = "import numpy as np\n\n\ndef policy(obs, step):\n    return np.zeros(1)\n"
RANDOM = "import numpy as np\n\n\ndef policy(obs, step):\n    return np.random.uniform(-2, 2, 1)\n"
NO_SUCH_NAME = "def policy(obs, step):\n    return [torque]\n"


# --- A server that says what it is told -------------------------------------------------------------------------------


def answer(status, body, **headers):
    """Behaviour: send this status and body."""
    data = (body if isinstance(body, str) else json.dumps(body)).encode()

    def behave(handler):
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(data)

    return behave


def completion(content, finish="stop", **message):
    message = {"role": "assistant", "content": content, **message}
    return answer(200, {"choices": [{"index": 0, "message": message, "finish_reason": finish}]})


def fenced(code):
    return completion(f"Here it is:\n\n```python\n{code}```\n\nIt pumps energy.")


def silent(handler):
    handler.server.released.wait(20)


def dripping(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    while not handler.server.released.wait(0.1):
        handler.wfile.write(b" ")


def dropped(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')


def hung_up(handler):
    handler.connection.close()


def huge(handler):
    handler.send_response(200)
    handler.end_headers()
    for _ in range(50):
        handler.wfile.write(b" " * 1_000_000)


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, dict(self.headers), payload))
        behave = self.server.replies[min(len(self.server.requests), len(self.server.replies)) - 1]
        try:
            behave(self)
        except OSError:  # the client gave up, as it should
            pass

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None
    server.requests, server.replies, server.released = [], [], threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.released.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def waits(monkeypatch):
    """The waits of the client, which are not made."""
    waits = []
    monkeypatch.setattr(gp.time, "sleep", waits.append)
    return waits


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def ask(server, *replies, timeout=5.0):
    server.replies = replies
    return gp.read_answer(gp.post(gp.chat_url(server.url), {"model": "m", "messages": []}, timeout))


# --- Client -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply, words",
    [
        (answer(200, "<!DOCTYPE html><html><body>Welcome</body></html>"), "HTML"),
        (answer(200, "hello"), "no JSON"),
        (answer(200, ""), "no JSON"),
        (answer(200, "[1, 2]"), "no choices"),
        (answer(200, "[" * 100_000), "no JSON"),
        (answer(200, {"error": {"message": "model overloaded", "code": 503}}), "model overloaded"),
        (answer(200, {"error": "out of quota"}), "out of quota"),
        (answer(200, {}), "no choices"),
        (answer(200, {"choices": None}), "no choices"),
        (answer(200, {"choices": []}), "no choices"),
        (answer(200, {"choices": [None]}), "no choices"),
        (answer(200, {"choices": [{"text": "old style"}]}), "no choices with a message"),
        (completion(""), "empty"),
        (completion(None), "empty"),
        (completion("  \n"), "empty"),
        (completion([]), "empty"),
        (completion(7), "empty"),
        (completion([{"type": "reasoning", "text": "hm"}, None, {"type": "text"}]), "empty"),
        (completion(None, reasoning_content="I think"), "reasoning but no answer"),
        (completion("", reasoning="I think"), "reasoning but no answer"),
        (completion(None, refusal="I must not\nwalk"), "refused: I must not walk"),
        (completion("```python\ndef policy(obs", finish="length"), "--max-tokens"),
        (completion(None, finish="length", reasoning_content="long"), "--max-tokens"),
    ],
)
def test_every_useless_answer_has_its_message(server, reply, words):
    with pytest.raises(gp.Failure, match=words) as failure:
        ask(server, reply)
    assert failure.value.kind == "reply" and "\n" not in failure.value.detail
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "reply",
    [
        fenced(ZERO),
        completion(
            [
                {"type": "reasoning", "text": "```py\nbad"},
                *({"type": "text", "text": t} for t in ("```\n", ZERO, "```")),
            ]
        ),
        completion(f"```py\n{ZERO}```", reasoning_content="```python\ndef policy(obs, step): pass\n```"),
        completion(f"<think>Perhaps\n```python\ndef policy(obs, step): pass\n```\n</think>\n```python\n{ZERO}```"),
        completion(f"no opening tag\n```python\nhalf a block</think>```python\nx = 1\n```\n~~~\n{ZERO}~~~"),
        completion(ZERO),
    ],
)
def test_the_code_is_found_in_every_form_of_answer(server, reply):
    assert gp.extract(ask(server, reply)) == ZERO


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_client_errors_are_not_retried(server, waits, status):
    with pytest.raises(gp.EndpointError, match=f"127.0.0.1:{server.server_port} answered {status}: no, thanks"):
        ask(server, answer(status, {"error": {"message": "no,\nthanks"}}))
    assert len(server.requests) == 1 and waits == []


def test_hints(server, monkeypatch):
    with pytest.raises(gp.EndpointError, match="set OPENAI_API_KEY"):
        ask(server, answer(401, ""))
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with pytest.raises(gp.EndpointError, match="check OPENAI_API_KEY"):
        ask(server, answer(403, "<html>Forbidden</html>"))
    with pytest.raises(gp.EndpointError, match="check --base-url and --model"):
        ask(server, answer(404, {"detail": "Not Found"}))
    with pytest.raises(gp.EndpointError, match="redirects to https://elsewhere/v1"):
        ask(server, answer(302, "", Location="https://elsewhere/v1"))


def test_retries_wait_and_are_bounded(server, waits):
    assert ask(server, answer(500, "oops"), answer(503, "<html>"), completion("hi")) == "hi"
    assert waits == [0.5, 1.0]
    waits.clear(), server.requests.clear()
    with pytest.raises(gp.EndpointError, match=r"answered 502: bad gateway \(4 tries\)"):
        ask(server, answer(502, "bad gateway"))
    assert len(server.requests) == 4 and waits == [0.5, 1.0, 2.0]


def test_retry_after_is_honoured(server, waits):
    date = email.utils.formatdate(time.time() + 30, usegmt=True)
    soon, later = answer(429, "", Retry_After="7"), answer(429, "", Retry_After=date)
    odd = answer(503, "", Retry_After="soon")
    assert ask(server, soon, later, odd, completion("hi")) == "hi"
    assert waits[0] == 7 and 25 < waits[1] <= 30 and waits[2] == 2.0
    server.requests.clear()
    with pytest.raises(gp.EndpointError, match="asks to wait 3600 s"):
        ask(server, answer(429, {"error": {"message": "slow down"}}, Retry_After="3600"))
    assert len(server.requests) == 1


def test_dropped_connections_are_retried(server, waits):
    assert ask(server, dropped, hung_up, completion("hi")) == "hi"
    server.requests.clear()
    with pytest.raises(gp.EndpointError, match=r"cannot reach 127.0.0.1:\d+: .*\(4 tries\)"):
        ask(server, dropped)
    assert len(server.requests) == 4


@pytest.mark.parametrize("reply", [silent, dripping])
def test_slow_servers_end_at_the_timeout(server, monkeypatch, reply):
    monkeypatch.setattr(gp, "CONNECT_SECONDS", 0.5)
    start = time.monotonic()
    with pytest.raises(gp.Failure, match="larger --timeout"):
        ask(server, reply, timeout=0.5)
    assert time.monotonic() - start < 5


def test_a_huge_body_is_cut_off(server):
    with pytest.raises(gp.Failure, match="longer than 4,000,000 bytes"):
        ask(server, huge)


def test_a_dead_port(server, waits):
    server.server_close()
    with pytest.raises(gp.EndpointError, match=r"cannot reach 127.0.0.1:\d+: .*refused"):
        ask(server, fenced(ZERO))


@pytest.mark.parametrize(
    "base", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/", "http://h:1/v1/chat/completions"]
)
def test_base_url_forms(base):
    assert gp.chat_url(base) == "http://h:1/v1/chat/completions"


def test_base_url_of_other_providers_and_errors():
    assert gp.chat_url("https://h/openai") == "https://h/openai/v1/chat/completions"
    assert gp.chat_url("https://h/v1beta/openai/") == "https://h/v1beta/openai/chat/completions"
    for bad in ("127.0.0.1:8123", "ftp://h/v1", "http://", "http://h:port", "http://[h", ""):
        with pytest.raises(SystemExit, match="--base-url must look like"):
            gp.chat_url(bad)
    for secret in ("http://user:pass@h/v1", "http://h/v1?key=abc"):
        with pytest.raises(SystemExit, match="OPENAI_API_KEY") as error:
            gp.chat_url(secret)
        assert "pass" not in str(error.value).replace("password", "") and "abc" not in str(error.value)


# --- Extraction and lint ----------------------------------------------------------------------------------------------


def test_extraction_takes_the_block_that_defines_policy_byte_for_byte():
    crlf = ZERO.replace("\n", "\r\n")
    usage = "```python\nprint(policy([0], 0))\n```"
    assert gp.extract(f"A.\r\n```python\r\n{crlf}```\r\nB.") == crlf
    assert gp.extract(f"```bash\npip install numpy\n```\n````Python3 title=x\n{SWING_UP}````\n{usage}") == SWING_UP
    assert gp.extract(f"```\n{ZERO}```\nBetter:\n```\n{SWING_UP}```") == SWING_UP, "the last one is the final one"
    assert gp.extract(f"```\n{ZERO}```\nBetter:\n```\ndef policy(obs, step:\n```") == ZERO


@pytest.mark.parametrize(
    "text, kind, words",
    [
        (f"```python\n{ZERO}", "reply", "not closed"),
        (f"```python \nx = 1\n```\nthen\n```python\n{ZERO}", "reply", "not closed"),
        (f"<think>so\n```python\n{ZERO}```", "reply", "inside the model's reasoning"),
        ("```python\ndef policy(obs, step):\n    return (1\n```", "syntax", "line 2"),
        ("```python\nimport numpy\n```", "syntax", "no code block defines policy"),
        ("I cannot do that.", "syntax", "line 1"),
        ("```python\nclass A:\n    def policy(self): pass\n```", "syntax", "no code block"),
        ("```python\n'\ud800'\n```", "syntax", "UnicodeEncodeError"),
        ("```python\nx = 1\0\n```", "syntax", "null bytes"),
        ("```python\nx = " + "-" * 15000 + "1\n```", "syntax", "cannot be parsed"),
    ],
)
def test_extraction_failures(text, kind, words):
    with pytest.raises(gp.Failure, match=words) as failure:
        gp.extract(text)
    assert failure.value.kind == kind


HEAD = "import numpy as np\nimport math\n"


def body(*lines):
    return HEAD + "def policy(obs, step):\n" + "".join(f"    {line}\n" for line in lines) + "    return np.zeros(1)\n"


@pytest.mark.parametrize(
    "code",
    [
        "import os\n" + ZERO,
        "import numpy.random\n" + ZERO,
        "import numpy as np, sys\n" + ZERO,
        "from os import environ\n" + ZERO,
        "from numpy import load\n" + ZERO,
        "from numpy import *\n" + ZERO,
        "from . import numpy\n" + ZERO,
        "import numpy as __builtins__\n" + ZERO,
        body("np.load('x.npy', allow_pickle=True)"),
        body("f = np", "f.load('x.npy')"),
        body("np.lib.npyio.os.system('true')"),
        body("obs.tofile('x')"),
        body("obs.dump('x')"),
        body("np.fromfile('x')"),
        body("np.memmap('x')"),
        body("np.savetxt('x', obs)"),
        body("np.loadtxt('http://h/x')"),
        body("np.ctypeslib.ctypes"),
        body("obs.ctypes.data"),
        body("np.random.seed(0)"),
        body("np.empty(3)"),
        body("().__class__.__bases__[0].__subclasses__()"),
        body("obs.__class__"),
        body("obs._x"),
        body("'{0.__class__}'.format(obs)"),
        body("f'{obs}'"),
        body("open('x')"),
        body("eval('1')"),
        body("exec('1')"),
        body("getattr(obs, 'x')"),
        body("globals()"),
        body("vars()"),
        body("type(obs)"),
        body("print(obs)"),
        body("input()"),
        body("__import__('os')"),
        body("breakpoint()"),
        body("alias = open"),
        body("global n"),
        body("policy.n = 1"),
        body("try:", "    pass", "except Exception:", "    pass"),
        body("with obs:", "    pass"),
        body("import os"),
        body("yield obs"),
        body("del obs"),
        body("raise ValueError"),
        "class A:\n    pass\n" + ZERO,
        "async def policy(obs, step):\n    pass\n",
        "MEMORY = []\n" + body("MEMORY.append(1)"),
        "MEMORY = [0]\n" + body("MEMORY[0] += 1"),
        "MEMORY = [[0]]\n" + body("MEMORY[0][0], a = 1, 2"),
        HEAD + "def policy(obs, step, memory=[]):\n    return obs\n",
        HEAD + "def policy(obs, step=np.zeros(1)):\n    return obs\n",
        HEAD + "def policy(obs):\n    return obs\n",
        HEAD + "def policy(obs, step, *, more):\n    return obs\n",
        HEAD + "def policy(*args):\n    return args\n",
        ZERO + "policy(1, 2)\n",
        ZERO + "while True:\n    pass\n",
        ZERO + "if __name__ == '__main__':\n    pass\n",
        HEAD + "policy = lambda obs, step: obs\n",
        ZERO + "# " + "x" * 20_000,
        f"DATA = '{'a' * 10_000_000}'\n" + ZERO,
        'ENV_ID = "Hopper-v4"\n' + ZERO,
        'ENV_ID = "Pen" + "dulum-v1"\n' + ZERO,
        'ENV_ID = "Pendulum-v1"\nENV_ID += ""\n' + ZERO,
    ],
)
def test_lint_refuses(code):
    with pytest.raises(gp.Failure) as failure:
        gp.lint(code, "Pendulum-v1")
    assert failure.value.kind == "lint"


def test_lint_accepts_ordinary_policies():
    code = '''"""Doc."""
import math

import numpy as np
from numpy import clip, pi

ENV_ID = "Pendulum-v1"
KP, KD = np.array([1.0, 2.0]), (0.1, 0.2)
TABLE: dict = {"stance": [0.1, -0.2], "swing": [0.3, 0.4]}


def _phase(step: int, frequency: float = 1.5) -> float:
    return 2 * pi * frequency * step * 0.008 % (2 * math.pi)


def policy(obs: np.ndarray, step: int) -> np.ndarray:
    x, *_, speed = obs.copy()
    targets = []
    for name, values in TABLE.items():
        targets.append(sum(values) if name == "swing" and math.sin(_phase(step)) > 0 else -0.5)
    action = np.zeros(2, dtype=np.float32)
    action[:] = KP * (np.array(targets) - x) - [k * speed for k in KD]
    action[0] += (lambda a: max(a, 0.0))(x)
    return clip(action, -1, 1).astype(np.float64)
'''
    assert gp.lint(code, "Pendulum-v1") == "Pendulum-v1"
    assert gp.lint(SWING_UP) is None


POLICIES = sorted((SCRIPT.parent / "llm_policies").glob("*.py"))


@pytest.mark.parametrize("path", POLICIES, ids=lambda p: p.name)
def test_ready_made_policies_pass_lint_and_trial(path):
    code = path.read_text(encoding="utf-8")
    bench = gp.Bench(gp.lint(code))
    assert path.stem.startswith(gp.default_output(bench.env_id).stem)
    gp.trial(code, bench, bench.trial_queries())


# --- The child process ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench():
    return gp.Bench("Pendulum-v1")


@pytest.fixture(scope="module")
def queries(bench):
    return bench.trial_queries()


def child_processes(folder):
    """Numbers of the living processes that were started in a folder below this one."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "cwd").startswith(f"{folder}/"):
                found.append(process.name)
        except OSError:  # it ended meanwhile, or is none of ours
            pass
    return found


@pytest.fixture
def arena(tmp_path, monkeypatch):
    """A folder for all, where temporary folders go too; at the end it must be empty and no child left."""
    tmp_path.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(gp, "TRIAL_SECONDS", 3)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    yield tmp_path
    deadline = time.monotonic() + 3
    while child_processes(tmp_path) and time.monotonic() < deadline:  # a kill takes a moment
        time.sleep(0.05)
    assert child_processes(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


HOSTILE = {
    "infinite loop": ("def policy(obs, step):\n    while True: pass", {"timeout"}),
    "infinite loop at import": ("while True: pass", {"timeout"}),
    "sleep": ("import time\ndef policy(obs, step):\n    time.sleep(60)", {"timeout"}),
    "busy in C": ("def policy(obs, step):\n    return 10 ** 10 ** 10", {"timeout", "memory"}),
    "ignores signals": (
        "import _signal\nfor s in (1, 2, 15, 24): _signal.signal(s, _signal.SIG_IGN)\nwhile True: pass",
        {"timeout"},
    ),
    "fork loop": ("import os\ndef policy(obs, step):\n    while True: os.fork()", {"exception"}),
    "fork and leave the group": (
        "import os, time\ndef policy(obs, step):\n    if os.fork() == 0:\n        os.setsid(); time.sleep(60)",
        {"exception"},
    ),
    "threads": (
        "import threading, time\ndef policy(obs, step):\n    threading.Thread(target=time.sleep, args=(60,)).start()",
        {"exception"},
    ),
    "memory hog": (
        "def policy(obs, step):\n    x = []\n    while True: x.append(bytearray(10 ** 7))",
        {"memory", "timeout"},
    ),
    "one big array": ("import numpy as np\ndef policy(obs, step):\n    return np.ones(10 ** 10)", {"memory"}),
    "a memory hog in small pieces": (
        "def policy(obs, step):\n    x = []\n    while True: x = [x]",
        {"memory", "timeout"},
    ),
    "recursion": ("def policy(obs, step):\n    return policy(obs, step)", {"exception"}),
    "write": ("def policy(obs, step):\n    open(STOLEN, 'w').write('x')", {"exception"}),
    "write relative": ("def policy(obs, step):\n    open('x', 'w').write('x')", {"exception"}),
    "write through numpy": ("import numpy as np\ndef policy(obs, step):\n    np.save(STOLEN, obs)", {"exception"}),
    "write through a shell": (
        "import os\ndef policy(obs, step):\n    raise OSError(os.system('echo x > ' + STOLEN))",
        {"exception"},
    ),
    "read a file": ("def policy(obs, step):\n    open('/etc/passwd')", {"exception"}),
    "load a pickle": (
        "import numpy as np\ndef policy(obs, step):\n    return np.load(STOLEN, allow_pickle=True)",
        {"exception"},
    ),
    "network": ("import socket\ndef policy(obs, step):\n    socket.socket()", {"exception"}),
    "class tricks": (
        "def policy(obs, step):\n    return [c for c in ().__class__.__base__.__subclasses__() if 'x' in str(c)][0]",
        {"exception", "wrong_shape"},
    ),
    "exit": ("import os\ndef policy(obs, step):\n    os._exit(0)", {"exception"}),
    "sys.exit": ("def policy(obs, step):\n    raise SystemExit(0)", {"exception"}),
    "killed": ("import os\ndef policy(obs, step):\n    os.kill(os.getpid(), 9)", {"exception"}),
    "signals": ("import os\ndef policy(obs, step):\n    os.kill(os.getpid(), 19)", {"timeout"}),
    "segmentation fault": ("import ctypes\ndef policy(obs, step):\n    ctypes.string_at(0)", {"exception"}),
    "prints": (
        "import os\ndef policy(obs, step):\n    print('x' * 9999); os.write(1, b'y' * 99); return [float('nan')]",
        {"non_finite"},
    ),
    "floods the answer": (
        "import os\ndef policy(obs, step):\n    while True: os.write(4, b'x' * 60000)",
        {"exception"},
    ),
    "forges an answer": (
        'import os\ndef policy(obs, step):\n    os.write(4, b\'{"kind": [], "actions": 1}\\n\')',
        {"exception"},
    ),
    "10 MB literal": (
        "DATA = [" + "0," * 5_000_000 + "]\ndef policy(obs, step):\n    return obs",
        {"memory", "timeout"},
    ),
}

FOR_THE_CHILD_ALONE = {"infinite loop", "busy in C", "recursion", "one big array", "a memory hog in small pieces"}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_code_that_passed_the_lint_is_stopped(name, arena, bench, queries):
    code, kinds = HOSTILE[name]
    code = code.replace("STOLEN", repr(str(arena / "stolen")))
    if name in FOR_THE_CHILD_ALONE:
        gp.lint(code)
    else:
        with pytest.raises(gp.Failure):
            gp.lint(code)
    start = time.monotonic()
    with pytest.raises(gp.Failure) as failure:
        gp.trial(code, bench, queries)
    assert failure.value.kind in kinds, failure.value.detail
    assert time.monotonic() - start < gp.TRIAL_SECONDS + 3


def test_the_whole_group_is_killed_where_forks_are_possible(arena, bench, queries, monkeypatch):
    monkeypatch.setattr(gp, "LIMITS", {**gp.LIMITS, "RLIMIT_NPROC": 1000})
    code = "import os, time\ndef policy(obs, step):\n    for _ in range(5): os.fork()\n    time.sleep(60)"
    seen = []
    watcher = threading.Timer(2, lambda: seen.append(len(child_processes(arena))))
    watcher.start()
    with pytest.raises(gp.Failure) as failure:
        gp.trial(code, bench, queries)
    watcher.join()
    assert failure.value.kind == "timeout" and seen == [32]


def test_the_child_has_no_key(arena, bench, queries):
    code = "import os\ndef policy(obs, step):\n    raise ValueError(sorted(os.environ), os.getcwd())"
    with pytest.raises(gp.Failure) as failure:
        gp.trial(code, bench, queries)
    assert "OPENAI" not in failure.value.detail and "HOME" not in failure.value.detail
    assert "PATH" in failure.value.detail and str(arena) in failure.value.detail
    parent = "import os\ndef policy(obs, step):\n    raise ValueError(open(f'/proc/{os.getppid()}/environ').read())"
    with pytest.raises(gp.Failure, match="Too many open files|Permission"):
        gp.trial(parent, bench, queries)


@pytest.mark.parametrize(
    "code, kind, words",
    [
        ("def policy(obs, step):\n    return obs", "wrong_shape", r"float32 \(3,\) \(at step 0\)"),
        ("def policy(obs, step):\n    return None", "wrong_shape", "object"),
        ("def policy(obs, step):\n    return 1.0", "wrong_shape", r"\(\)"),
        ("def policy(obs, step):\n    return ['1']", "wrong_shape", "<U1"),
        ("def policy(obs, step):\n    return [[1], [1, 2]]", "exception", "ValueError"),
        ("def policy(obs, step):\n    return [1j]", "wrong_shape", "complex"),
        ("import math\ndef policy(obs, step):\n    return [math.inf]", "non_finite", "inf"),
        ("def policy(obs, step):\n    return [obs[0] ** 0.5 if step else 0.0]", "non_finite", "nan"),
        ("def policy(obs, step):\n    x = obs\n    return [y]", "exception", "line 3: NameError: .*'y'.*step 0"),
        (
            "def policy(obs, step):\n    return [1.0 / 0 if step > 150 else 0]",
            "exception",
            "ZeroDivisionError.*at step 151",
        ),
        ("def nothing(): pass", "exception", "policy"),
        ("import math as ENV_ID\ndef policy(obs, step):\n    return [0]", "exception", "ENV_ID became"),
        ("def policy(obs, step):\n    obs[0] = 0\n    return [0]", "impure", "its argument"),
        ("n = [0]\ndef policy(obs, step):\n    n[0] += 1\n    return [n[0] * 1e-3]", "impure", "another order"),
        ("def policy(obs, step, n=[0]):\n    n.append(0)\n    return [len(n) > 99]", "wrong_shape", "bool"),
        ("def policy(obs, step, n=[]):\n    n.append(0)\n    return [float(len(n) > 99)]", "impure", "another order"),
        ("def policy(obs, step):\n    return [id(object()) % 10007]", "impure", "answers differ"),
        ("import time\nt = time.time()\ndef policy(obs, step):\n    return [t % 1]", "impure", "answers differ"),
        ("def policy(obs, step):\n    return [hash('a') % 1000003]", "impure", "in a new process"),
        ("def policy(obs, step):\n    return [sum(range(200000)) * 0.0]", "too_slow", "ms of CPU time per call"),
    ],
)
def test_failures_are_typed(code, kind, words, arena, bench, queries):
    with pytest.raises(gp.Failure, match=words) as failure:
        gp.trial(code, bench, queries)
    assert failure.value.kind == kind


def test_a_good_policy_passes_and_a_late_failure_is_found(arena, bench, queries):
    gp.trial(SWING_UP, bench, queries)
    e = gp.measure(SWING_UP, bench, range(3))
    assert e.lengths.tolist() == [200] * 3 and e.terminated == 0 and 0 < e.clipped < 1
    late = gp.Candidate("late", "def policy(obs, step):\n    return [0.0 if step != 77 or obs[0] > 2 else 1e999]\n")
    before = bench.steps
    gp.examine(late, bench, [q for q in queries if q[1] != 77], 10)
    assert (late.kind, late.episodes) == ("non_finite", None) and "step 77" in late.detail
    assert bench.steps - before == 10 * 77, "the steps of an unfinished screening count too"


# --- Rollouts and the prompt ------------------------------------------------------------------------------------------


def test_rollout_is_what_a_plain_loop_measures(bench):
    policy = {}
    exec(SWING_UP, policy)
    env, returns = gym.make("Pendulum-v1"), []
    for seed in range(3):
        (obs, _), done, total, step = env.reset(seed=seed), False, 0.0, 0
        while not done:
            action = np.clip(policy["policy"](obs, step), -2, 2).astype(np.float32)
            obs, reward, terminated, truncated, _ = env.step(action)
            total, step, done = total + reward, step + 1, terminated or truncated
        returns.append(total)
    before = bench.steps
    e = gp.measure(SWING_UP, bench, range(3))
    np.testing.assert_allclose(e.returns, returns, rtol=1e-12)
    assert bench.steps - before == 600
    assert e.score == pytest.approx(np.mean(returns) - 0.2 * np.std(returns))
    assert e.terms["reward"] == pytest.approx(np.mean(returns) / 200)


def test_trial_queries_of_an_environment_that_reuses_its_array(queries):
    class Reusing(gym.ObservationWrapper):
        buffer = np.zeros(3, np.float32)

        def observation(self, observation):
            self.buffer[:] = observation
            return self.buffer

    bench = gp.Bench("Pendulum-v1")
    bench.env = Reusing(bench.env)
    assert bench.trial_queries() == queries and bench.steps == 200
    assert len({tuple(obs) for obs, _ in queries}) > 220 and {step for _, step in queries} == set(range(200)) | {200}
    assert all(bench.obs_space.contains(np.array(obs, np.float32)) for obs, _ in queries)


def test_terminations_and_reward_terms_are_reported():
    ant = gp.Bench("Ant-v4")
    e = gp.rollout(ant, lambda q: np.tile(np.array([0, 1, 0, -1, 0, 1, 0, -1.0]), (len(q), 1)), range(2))
    assert set(e.terms) >= {"reward", "reward_forward", "reward_ctrl", "reward_survive"}
    assert e.terms["reward_ctrl"] == pytest.approx(-2.0) and e.terms["reward_survive"] == 1.0
    hopper = gp.Bench("Hopper-v4")
    e = gp.rollout(hopper, lambda q: np.ones((len(q), 3)), range(4))
    assert e.terminated == 4 and e.lengths.max() < 1000 and hopper.steps == e.lengths.sum()
    assert e.last_obs[0] < 0.7 or abs(e.last_obs[1]) > 0.2, "the height or the angle ended the episode"


@pytest.mark.parametrize(
    "env_id, obs_dim, act_dim, words",
    [
        ("Hopper-v4", 11, 3, ["for Hopper-v5. Hopper-v4 differs: the healthy reward", "0.008 s", "$[0.7, +\\infty]$"]),
        ("Walker2d-v4", 17, 6, ["less friction", "0.008 s", "left thigh rotor"]),
        ("Ant-v4", 27, 8, ["only the 27 entries", "0.05 s", "front right hip"]),
        ("HalfCheetah-v4", 17, 6, ["differs: in nothing that matters", "never terminates", "front tip"]),
        ("Pendulum-v1", 3, 1, ["x = cos(theta)", "low [-1, -1, -8], high [1, 1, 8]", "low [-2], high [2]"]),
    ],
)
def test_prompt_is_made_from_the_environment(env_id, obs_dim, act_dim, words):
    prompt = gp.build_prompt(gp.Bench(env_id), "")
    assert all(word in prompt for word in [*words, "Reward", f"shape ({obs_dim},)", f"shape ({act_dim},)", "# Answer"])
    for heading, rows in (("Action", act_dim), ("Observation", obs_dim)):
        table = prompt.split(f"### {heading} Space")[1].split("\n### ")[0]
        numbered = [int(n) for n in re.findall(r"^\| (\d+) \|", table, re.M)]
        assert numbered == list(range(rows))
    assert "exclude_current" not in prompt and "Version History" not in prompt and "figure}" not in prompt
    if env_id != "Pendulum-v1":
        assert gp.build_prompt(gp.Bench(env_id.replace("v4", "v5")), "").count("differs") == 0
    assert "Run backwards!" in gp.build_prompt(gp.Bench(env_id), "Run backwards!")


def test_what_is_said_of_v4_is_true():
    sizes = {"Ant": (27, 105), "Humanoid": (376, 348), "HumanoidStandup": (376, 348), "Reacher": (11, 10)}
    sizes["InvertedDoublePendulum"] = (11, 9)
    for name in gp.V4_DIFFERS:
        found = tuple(gym.make(f"{name}-v{v}").observation_space.shape[0] for v in (4, 5))
        assert found == sizes.get(name, (found[1], found[1])), name
        if name in sizes:
            assert str(found[0]) in gp.V4_DIFFERS[name]
    walker = gym.make("Walker2d-v4").unwrapped.model
    assert [walker.geom(foot).friction[0] for foot in ("foot_geom", "foot_left_geom")] == [0.9, 1.9]


# --- The whole program ------------------------------------------------------------------------------------------------

TINY = """import gymnasium as gym
import numpy as np


class Tiny(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Box(np.array([-1, 0, 0], np.float32), np.ones(3, np.float32))

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.x = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return self.x, {}

    def step(self, action):
        assert self.action_space.contains(action), action
        cost = float(np.abs(action[0] - self.x[0]) + np.abs(action[1:] - [0.5, 1]).sum())
        return self.x, -cost, False, False, {"reward_cost": -cost, "name": "tiny", "good": cost < 1}


gym.register("Tiny-v0", Tiny, max_episode_steps=5)
"""
BEST_TINY = "def policy(obs, step):\n    return [obs[0], 0.5, 7]\n"


def run(cwd, *args, key=None, **env):
    """The script in a new process."""
    env = {**os.environ, **env, **({"OPENAI_API_KEY": key} if key else {})}
    command = [sys.executable, str(SCRIPT), *map(str, args)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, encoding="utf-8", timeout=120)


def assert_one_line(result, *words):
    assert result.returncode == 1, result.stdout + result.stderr
    line = result.stderr.strip().splitlines()[-1]
    assert all(word in line for word in words), result.stderr
    assert "Traceback" not in result.stderr and len(result.stderr.strip().splitlines()) == 1, result.stderr


def test_from_an_endpoint_to_a_file(tmp_path, server):
    """Two rounds on Pendulum: four bad answers, two that work; every trace that the run must leave."""
    server.replies = [
        fenced(NO_SUCH_NAME),
        fenced(RANDOM),
        fenced(ZERO),
        completion(f"```python\n{SWING_UP}```", reasoning_content="hm"),
        completion("```python\n", finish="length"),
        answer(200, {"choices": []}),
    ]
    output = tmp_path / "made" / "pendulum.py"
    args = ["--env-id", "Pendulum-v1", "--base-url", server.url + "/", "--model", 'a"""\\b', "--num-candidates", 3]
    result = run(tmp_path, *args, "--rounds", 2, "--temperature", 0.5, "--output", output, key=KEY)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "exception" in result.stdout and "lint" in result.stdout and result.stderr == ""

    path, headers, first = server.requests[0]
    assert path == "/v1/chat/completions" and headers["Authorization"] == f"Bearer {KEY}"
    assert set(first) == {"model", "temperature", "messages"} and first["temperature"] == 0.5
    prompts = [r[2]["messages"][0]["content"] for r in server.requests]
    assert len(prompts) == 6 and len(set(prompts[:3])) == 1 and len(set(prompts[3:])) == 1
    second = prompts[3].removeprefix(prompts[0].rstrip("\n"))
    assert all(words in second for words in (ZERO.strip(), "NameError", ".uniform", "Mean per step: reward -"))

    text = output.read_text(encoding="utf-8")
    assert text.endswith("\n\n" + SWING_UP), "the code is kept byte for byte"
    header = ast.get_docstring(ast.parse(text))
    prompt = (tmp_path / "made" / "pendulum.prompt.txt").read_bytes()
    assert prompt.decode() == prompts[3] and hashlib.sha256(prompt).hexdigest()[:16] in header
    assert "Written by: a''''b at 127.0.0.1  Prompt: pendulum.prompt.txt (sha256 " in header
    assert str(server.server_port) not in text
    steps = 200 + 2 * 20 * 200 + 2 * 10 * 200 + 20 * 200  # trial, baselines, two screenings, final score
    assert (
        "Candidate 2.1 (round.number) of 6 in 2 rounds" in header
        and f"Environment steps spent on all: {steps}\n" in text
    )

    bench = gp.Bench("Pendulum-v1")
    final, (zero, random) = gp.measure(SWING_UP, bench, range(20)), gp.baselines(bench)
    assert f"Return: {final} over 20 episodes, seeds 0..19  (zero action: {zero}, uniform random: {random})" in header
    assert final.returns.mean() > zero.returns.mean() + 500
    namespace = {}
    exec(text, namespace)
    assert namespace["ENV_ID"] == "Pendulum-v1" and namespace["policy"](np.array([-1.0, 0.0, 1.0]), 0) == [2.0]

    (folder,) = (tmp_path / "runs" / "generate").iterdir()
    assert folder.name.startswith("Pendulum-v1__")
    kinds = [json.loads(line)["kind"] for line in (folder / "candidates.jsonl").read_text().splitlines()]
    assert kinds == ["exception", "lint", "ok", "ok", "reply", "reply"]
    assert len(list(folder.glob("reply_*"))) == 6 and len(list(folder.glob("candidate_*"))) == 4
    assert (folder / "prompt_2.txt").read_bytes() == prompt
    assert_no_key(tmp_path, result)

    made = output.read_bytes()
    server.requests.clear()
    assert_one_line(run(tmp_path, *args, "--output", output), "pendulum.py exists", "--overwrite")
    assert output.read_bytes() == made and server.requests == []


def assert_no_key(folder, result):
    assert KEY not in result.stdout + result.stderr
    for file in folder.rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes(), file


def test_a_custom_environment(tmp_path, server):
    (tmp_path / "tiny.py").write_text(TINY)
    args = ["--env-id", "tiny:Tiny-v0", "--base-url", server.url, "--num-candidates", 1, "--output", "tiny_v0.py"]
    assert_one_line(run(tmp_path, *args, PYTHONPATH=str(tmp_path)), "Tiny-v0 has no documentation", "--task")
    args += ["--task", "Follow the first observation."]
    server.replies = [fenced(BEST_TINY)]
    result = run(tmp_path, *args, PYTHONPATH=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "Authorization" not in server.requests[0][1] and set(server.requests[0][2]) == {"model", "messages"}
    prompt = server.requests[0][2]["messages"][0]["content"]
    assert all(w in prompt for w in ("Follow the first", "low [-1, 0, 0], high [1, 1, 1]", "low [-1, -1], high"))
    text = (tmp_path / "tiny_v0.py").read_text()
    assert 'ENV_ID = "Tiny-v0"' in text and "Return: 0.0 +- 0.0" in text and "100%" in result.stdout
    screened = run(tmp_path, "--env-id", "tiny:Tiny-v0", "--screen", "tiny_v0.py", PYTHONPATH=str(tmp_path))
    assert (
        screened.returncode == 0 and "Return: 0.0 +- 0.0 over 20 episodes, seeds 0..19  (zero action" in screened.stdout
    )
    server.replies = [fenced('ENV_ID = "Tiny-v0"\n' + BEST_TINY)]
    assert run(tmp_path, *args, "--overwrite", PYTHONPATH=str(tmp_path)).returncode == 0
    again = (tmp_path / "tiny_v0.py").read_text()
    assert again.endswith('"""\nENV_ID = "Tiny-v0"\n' + BEST_TINY) and again.count("ENV_ID") == 1
    assert sorted(p.name for p in tmp_path.glob("*tiny_v0*")) == ["tiny_v0.prompt.txt", "tiny_v0.py"]


def in_process(server, **args):
    args = {"env_id": "Pendulum-v1", "num_candidates": 2, "base_url": server.url, "output": "p.py", **args}
    gp.main(gp.Args(**args))


def test_a_policy_that_is_no_better_than_nothing_is_refused(tmp_path, server):
    server.replies = [fenced(ZERO)]
    with pytest.raises(SystemExit, match="does not beat the zero action"):
        in_process(server, num_candidates=1)
    assert not (tmp_path / "p.py").exists()
    in_process(server, num_candidates=1, accept_worse=True)
    assert (tmp_path / "p.py").exists()


def test_when_nothing_passes(tmp_path, server, monkeypatch, capsys):
    server.replies = [answer(200, {"error": {"message": f"bad {KEY}"}}), fenced(RANDOM), fenced(NO_SUCH_NAME)]
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with pytest.raises(SystemExit, match=r"no candidate passed the checks \(2 exception, 1 reply, 1 lint\)"):
        in_process(server, rounds=2)
    assert not (tmp_path / "p.py").exists()
    second = server.requests[-1][2]["messages"][0]["content"]
    assert RANDOM.strip() in second and "It failed: lint" in second, "the one that got furthest is shown for repair"
    assert KEY not in capsys.readouterr().out
    assert all(KEY not in f.read_text() for f in tmp_path.rglob("*") if f.is_file())


def test_an_endpoint_that_fails_later_does_not_lose_the_good_ones(tmp_path, server, capsys):
    server.replies = [fenced(SWING_UP), answer(401, "expired")]
    in_process(server)
    assert (tmp_path / "p.py").read_text(encoding="utf-8").endswith(SWING_UP)
    assert "going on with the candidates so far" in capsys.readouterr().err


def test_wrong_key_dead_port_and_404_each_end_in_one_line(tmp_path, server):
    args = ["--env-id", "Pendulum-v1", "--base-url", server.url, "--output", "p.py"]
    server.replies = [answer(401, {"error": {"message": f"Incorrect API key provided: {KEY}"}})]
    result = run(tmp_path, *args, key=KEY)
    assert_one_line(result, "401", "Incorrect API key provided: <key>", "check OPENAI_API_KEY")
    assert_no_key(tmp_path, result)
    server.replies = [answer(404, "<html>nginx</html>")]
    assert_one_line(run(tmp_path, *args), "404", "check --base-url and --model")
    server.shutdown(), server.server_close()
    assert_one_line(run(tmp_path, *args), "cannot reach 127.0.0.1", "refused", "check --base-url")
    assert not (tmp_path / "p.py").exists()


def test_screen(tmp_path):
    for name, code in {"good.py": SWING_UP, "zero.py": ZERO, "loop.py": HOSTILE["recursion"][0]}.items():
        (tmp_path / name).write_text(f'ENV_ID = "Pendulum-v1"\n{code}', encoding="utf-8")
    (tmp_path / "other.py").write_text(f'ENV_ID = "NoSuch-v0"\n{ZERO}')
    (tmp_path / "none.py").write_text(ZERO)
    (tmp_path / "bytes.py").write_bytes(b"\xff")
    result = run(tmp_path, "--screen", "good.py")
    assert result.returncode == 0 and re.search(r"^good.py +ok +-\d+\.\d +-\d+\.\d \+- \d+", result.stdout, re.M)
    assert "zero action: -1196.9 +- 325.3" in result.stdout
    names = ["good.py", "zero.py", "loop.py", "other.py", "none.py", "bytes.py", "missing.py"]
    result = run(tmp_path, "--screen", *names)
    assert_one_line(result, "zero.py, loop.py, other.py, none.py, bytes.py, missing.py")
    kinds = dict(re.findall(r"^(\w+\.py) +(\w+)", result.stdout, re.M))
    assert kinds == dict(zip(names, ["ok", "ok", "exception", "file", "lint", "file", "file"]))
    assert run(tmp_path, "--screen", "zero.py", "--accept-worse").returncode == 0


@pytest.mark.parametrize(
    "args, words",
    [
        (["--env-id", "NoSuch-v0"], "NoSuch"),
        (["--env-id", "CartPole-v1"], "Box of actions"),
        (["--env-id", "nosuchmodule:X-v0"], "nosuchmodule"),
        (["--num-candidates", "0"], "--num-candidates must be at least 1"),
        (["--episodes", "5"], "--episodes must be at least 10"),
        (["--timeout", "0"], "--timeout"),
        (["--temperature", "nan"], "--temperature"),
        (["--base-url", "localhost"], "--base-url"),
    ],
)
def test_bad_arguments(args, words, tmp_path):
    with pytest.raises(SystemExit, match=words):
        gp.main(gp.tyro.cli(gp.Args, args=["--output", "p.py", *args]))
    assert list(tmp_path.iterdir()) == []


def test_help_and_print_prompt_are_quiet(tmp_path):
    result = run(tmp_path, "--help")
    assert result.returncode == 0 and result.stderr == "" and "NOT a sandbox" in re.sub(r"\s+", " ", result.stdout)
    result = run(tmp_path, "--env-id", "HalfCheetah-v4", "--print-prompt")
    assert result.returncode == 0 and result.stderr == "" and "bthigh" in result.stdout
    assert list(tmp_path.iterdir()) == []
    assert gp.default_output("HalfCheetah-v4").relative_to(SCRIPT.parent) == Path("llm_policies/half_cheetah_v4.py")
