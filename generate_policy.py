# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "gymnasium[mujoco]==1.4.0",
#     "mujoco==4.0.0",
#     "numpy==2.4.6",
#     "requests==2.34.2",
#     "tyro==1.0.17",
# ]
# ///
"""Ask a language model for a policy file, check it, screen it, and write it only if it beats the zero action.

    python generate_policy.py --env-id Hopper-v4 --print-prompt          # read the prompt, call nobody
    python generate_policy.py --env-id Hopper-v4 --base-url http://127.0.0.1:8123/v1 --model qwen --rounds 2
    OPENAI_API_KEY=... python generate_policy.py --env-id Ant-v4 --base-url https://api.openai.com --model gpt-4o
    python generate_policy.py --screen llm_policies/*.py                 # the same checks on existing files

Each answer passes extraction, a lint, a trial in a child process and screening on several resets; with `--rounds` the
next prompt shows the model how its best code did. The best is measured on other seeds and written to `llm_policies/`.
"""

import ast
import builtins
import email.utils
import hashlib
import inspect
import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from urllib.parse import urlsplit

import gymnasium as gym
import mujoco
import numpy as np
import requests
import tyro
from urllib3.exceptions import NewConnectionError


@dataclass
class Args:
    """Ask a language model for a policy, check it, screen it, write it. The API key comes from OPENAI_API_KEY only.

    The checks are a lint and a child process with limits: they catch mistakes and clumsy attacks. They are NOT a
    sandbox. Do not point this at a model or a file that you expect to attack you, except in a throw-away machine.
    """

    env_id: str = "Hopper-v4"
    """Gymnasium environment with Box observations and actions; `module:Name-v0` imports `module` first"""
    task: str = ""
    """what the policy should achieve, in words; needed if the environment has no documentation of its own"""
    base_url: str = "http://127.0.0.1:8123/v1"
    """OpenAI-compatible endpoint; `/v1` and a final slash may be left out"""
    model: str = "default"
    """model name that the endpoint knows; a local server takes any"""
    num_candidates: int = 8
    """answers asked for in each round"""
    rounds: int = 1
    """rounds; from the second on the prompt shows the best code so far with its returns, and the others' errors"""
    temperature: float | None = None
    """sampling temperature; sent only if given, since some models refuse it"""
    max_tokens: int | None = None
    """limit on the tokens of an answer; sent only if given, since some models refuse it"""
    timeout: float = 300.0
    """seconds to wait for a whole answer; raise it for a slow local model"""
    episodes: int = 10
    """resets on which each candidate is screened, at least 10; the best is measured on 20 others"""
    accept_worse: bool = False
    """write the best policy (and let `--screen` pass) even if it does not beat the zero action"""
    output: str = ""
    """file to write; empty: `llm_policies/<environment>.py` beside this script, which camel_td3.py looks for"""
    overwrite: bool = False
    """replace the file if it exists"""
    print_prompt: bool = False
    """print the first prompt and stop, without a call"""
    screen: tuple[str, ...] = ()
    """existing policy files to check and screen, without a call; each file's ENV_ID names its environment"""


FINAL_SEEDS = range(20)  # the score in the header and in the tables
FIRST_SELECTION_SEED = 1000  # disjoint from FINAL_SEEDS: a score on the seeds that selected a policy flatters it
MAX_CODE = 20_000  # characters
MAX_BODY = 4_000_000  # bytes of one HTTP answer
CONNECT_SECONDS = 10
RETRIES = 3
MAX_WAIT = 60  # seconds that Retry-After may ask for
TRIAL_SECONDS = 10  # waiting for the child, its start included; the same again in each later stage
CALL_SECONDS = 1e-3  # CPU time that one policy call may take on average
LIMITS = {"RLIMIT_AS": 1 << 29, "RLIMIT_FSIZE": 0, "RLIMIT_NPROC": 0, "RLIMIT_NOFILE": 0}


class Failure(Exception):
    """Why a candidate was refused. kind: one of KINDS, shown in the table."""

    def __init__(self, kind: str, detail: str):
        self.kind, self.detail = kind, one_line(detail)
        super().__init__(self.detail)


# In the order in which a candidate meets them: a later kind got further.
KINDS = ["reply", "syntax", "lint", "exception", "timeout", "memory", "wrong_shape", "non_finite", "impure", "too_slow"]


class EndpointError(Exception):
    """The endpoint cannot be used: asking again will not help."""


def api_key() -> str:
    return os.environ.get("OPENAI_API_KEY", "").strip()


def redact(text: str) -> str:
    """Remove the key, should a server echo it. Shorter keys are placeholders such as `none` for local servers."""
    key = api_key()
    return text.replace(key, "<key>") if len(key) >= 4 else text


def one_line(text, limit: int = 300) -> str:
    """Text of unknown origin, fit for a terminal: one printable line, without the key."""
    line = " ".join("".join(c if c.isprintable() else " " for c in redact(str(text))).split())
    return line if len(line) <= limit else line[:limit] + "..."


# --- The environment --------------------------------------------------------------------------------------------------


class Bench:
    """An environment that is known to suit, and the count of all steps made in it."""

    def __init__(self, env_id: str):
        self.made_with, self.steps = env_id, 0
        self.env = self.make()
        self.env_id, self.obs_space = self.env.spec.id, self.env.observation_space
        for what, space in (("observation", self.obs_space), ("action", self.env.action_space)):
            if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
                raise SystemExit(f"{env_id}: needs a one-dimensional Box of {what}s, has {space}")
        self.low, self.high = self.env.action_space.low, self.env.action_space.high
        if not (np.isfinite(self.low).all() and np.isfinite(self.high).all()):
            raise SystemExit(f"{env_id}: the action bounds must be finite, got {self.env.action_space}")
        self.max_steps = self.env.spec.max_episode_steps or 1000  # an environment without a time limit is stopped there

    def make(self) -> gym.Env:
        gym.logger.min_level = gym.logger.ERROR  # "v4 is out of date" is known
        mujoco.set_mju_user_warning(lambda message: None)  # each environment made would repeat HalfCheetah's
        try:
            return gym.make(self.made_with, disable_env_checker=True)
        except Exception as error:  # whatever an environment's own module raises
            raise SystemExit(f"cannot make the environment {self.made_with}: {one_line(error)}")

    def trial_queries(self) -> list[tuple[list, int]]:
        """(observation, step) of resets, of a random rollout and of extreme states. The rollout's steps are counted."""

        def query(obs: np.ndarray, step: int) -> tuple[list, int]:
            return np.asarray(obs, self.obs_space.dtype).tolist(), step  # at once: an environment may reuse its array

        rng, step = np.random.default_rng(0), 0
        queries = [query(self.env.reset(seed=seed)[0], 0) for seed in range(5)]
        for _ in range(200):
            obs, _, terminated, truncated, _ = self.env.step(rng.uniform(self.low, self.high).astype(self.low.dtype))
            step, self.steps = step + 1, self.steps + 1
            queries.append(query(obs, step))
            if terminated or truncated:
                step = 0
                queries.append(query(self.env.reset()[0], 0))
        for size in (0.1, 1, 10, 100):
            for signs in (1, -1, *rng.uniform(-1, 1, (5, *self.obs_space.shape))):
                extreme = np.clip(size * signs * np.ones(self.obs_space.shape), self.obs_space.low, self.obs_space.high)
                queries.append(query(extreme, self.max_steps - 1))
        return queries


@dataclass
class Episodes:
    """What happened in the episodes of one policy."""

    returns: np.ndarray
    lengths: np.ndarray
    terminated: int  # episodes that ended before the time limit
    clipped: float  # share of the actions that were outside the bounds
    terms: dict[str, float]  # mean per step of the reward and of the numbers in `info`, its terms among them
    last_obs: np.ndarray  # of the shortest episode

    @property
    def score(self) -> float:
        return self.returns.mean() - 0.2 * self.returns.std()

    def __str__(self):
        return f"{self.returns.mean():.1f} +- {self.returns.std():.1f}"


def rollout(bench: Bench, act, seeds) -> Episodes:
    """One episode for each seed, all in step. act: [(observation, step), ...] -> (number of them, act_dim) array."""
    envs = [bench.make() for _ in seeds]
    obs = [env.reset(seed=seed)[0] for env, seed in zip(envs, seeds)]
    returns, lengths, terms = np.zeros(len(envs)), np.zeros(len(envs), int), defaultdict(float)
    running, terminations, clipped, step = list(range(len(envs))), 0, 0, 0
    while running and step < bench.max_steps:
        raw = act([(obs[i].tolist(), step) for i in running])
        actions = np.clip(raw, bench.low, bench.high)
        clipped += (raw != actions).any(axis=1).sum()
        for i, action in zip(list(running), actions.astype(bench.low.dtype)):
            obs[i], reward, terminated, truncated, info = envs[i].step(action)
            returns[i] += reward
            lengths[i] += 1
            for name, value in {"reward": reward, **info}.items():
                if isinstance(value, (int, float, np.number)):
                    terms[name] += float(value)
            if terminated or truncated:
                terminations += bool(terminated)
                running.remove(i)
            bench.steps += 1
        step += 1
    total = lengths.sum()
    terms = {name: value / total for name, value in terms.items()}
    return Episodes(returns, lengths, terminations, clipped / total, terms, obs[lengths.argmin()])


# --- The prompt -------------------------------------------------------------------------------------------------------

# Gymnasium documents only v5 of its MuJoCo environments. What a v4 does otherwise, by its source:
ALIVE = "the healthy reward is paid at every step, the last one included"
PADDED = (
    "it has 376 entries: the parts after entry 44 also hold the constant zeros of the world body and the free joint"
)
V4_DIFFERS = {
    "Ant": f"the observation has only the 27 entries of the table (no cfrc_ext), there is no contact_cost, and {ALIVE}",
    "HalfCheetah": "in nothing that matters here",
    "Hopper": ALIVE,
    "Humanoid": f"{PADDED}; there is no contact_cost, and {ALIVE}",
    "HumanoidStandup": PADDED,
    "InvertedDoublePendulum": f"the observation has 11 entries, the last 2 always 0, and {ALIVE}",
    "InvertedPendulum": ALIVE,
    "Reacher": "the observation has an 11th entry, always 0, and the distance in the reward is the one before the step",
    "Swimmer": "in nothing that matters here",
    "Walker2d": f"the right foot has less friction (0.9) than the left one (1.9), and {ALIVE}",
}


def documentation(bench: Bench) -> str:
    """The environment's docstring without what no policy needs; a v4's is v5's, with the differences said."""
    doc, note = bench.env.unwrapped.__doc__ or "", ""
    name = bench.env_id.removesuffix("-v4")
    if "Observation Space" not in doc and name in V4_DIFFERS:
        doc = gym.envs.registration.load_env_creator(gym.spec(f"{name}-v5").entry_point).__doc__
        note = f"This text was written for {name}-v5. {bench.env_id} differs: {V4_DIFFERS[name]}.\n\n"
    doc = re.split(r"\n## (?:Arguments|Version History)", inspect.cleandoc(doc))[0]
    doc = re.sub(r"```\{figure\}.*?```|^!\[.*?\]\(.*?\)$|^\| excluded.*?$", "", doc, flags=re.S | re.M)
    doc = re.sub(r" \([^()]*exclude_current_positions[^()]*\)", "", doc)  # the numbers under other arguments
    paragraphs = [p for p in re.split(r"\n\s*\n", doc) if p.strip() and "exclude_current_positions" not in p]
    text = "\n\n".join(p.strip("\n") for p in paragraphs)
    text = re.sub(r"(?<=\S) {2,}", " ", re.sub(r"-{3,}", "---", text))  # a padded table costs tokens
    return note + text if text.strip() else ""


def numbers(values) -> str:
    return "[" + ", ".join(f"{v:.4g}" for v in values) + "]"


def build_prompt(bench: Bench, task: str) -> str:
    """The prompt of the first round, from the environment itself."""
    doc = documentation(bench)
    if not doc and not task:
        raise SystemExit(f"{bench.env_id} has no documentation: say with --task what the policy should achieve")
    if doc:
        doc = "# Documentation of the environment\n\n" + re.sub(r"^#", "##", doc, flags=re.M) + "\n\n"
    obs_dim, act_dim = bench.obs_space.shape[0], len(bench.low)
    dt = getattr(bench.env.unwrapped, "dt", None)
    clock = f"One step is dt = {dt:.4g} s of simulated time." if isinstance(dt, (int, float)) else ""
    bounded = np.isfinite(bench.obs_space.low).any() or np.isfinite(bench.obs_space.high).any()
    bounds = f", low {numbers(bench.obs_space.low)}, high {numbers(bench.obs_space.high)}" if bounded else ", unbounded"
    return f"""You write controllers for simulated robots. \
Write a Python function that controls the Gymnasium environment {bench.env_id}.

# Task

{task or "Make the sum of the rewards over an episode as large as you can."}

{doc}# Numbers of {bench.env_id}

- Observation: shape ({obs_dim},), {bench.obs_space.dtype}{bounds}.
- Action: shape ({act_dim},), low {numbers(bench.low)}, high {numbers(bench.high)}. Values outside are clipped.
- An episode has at most {bench.max_steps} steps. {clock}

# Contract

```python
import numpy as np


def policy(obs: np.ndarray, step: int) -> np.ndarray:
    \"\"\"obs: ({obs_dim},) float. step: environment steps since reset. Returns ({act_dim},) float.\"\"\"
    # your control law goes here
    return np.array([{", ".join(f"action_{i}" for i in range(act_dim))}])
```

- `policy` is a pure function of `obs` and `step`: the same arguments always give the same answer. It keeps nothing
  between calls: no `global`, no random numbers, no change of `obs` or of anything outside the function.
- `step` is the only clock; gaits may use it, for example `math.sin(2 * math.pi * frequency * step * dt)`.
- Import nothing but `numpy` and `math`: not gymnasium, there is no environment to talk to. No classes, `try`, `with`,
  `print`, f-strings, files, or code that runs at import, except constants. No names that start with two underscores.
- Assign every variable before it is used. \
A call must take less than 1 ms and return an array of shape ({act_dim},), finite.
- Name the entries of `obs` that you use. Good policies are short: target angles with proportional-derivative control
  (`kp * (target - angle) - kd * velocity`), feedback on posture and speed, a few rules, named gains.

# Answer

Exactly one ```python block with the whole file: imports, constants, helpers, `policy`. No example of its use.
"""


def feedback(best: "Candidate", others: list["Candidate"], bench: Bench, zero: Episodes) -> str:
    """What the prompt of a later round adds: the best code, how it did, and what was wrong with the others."""
    lines = [f"\n# Your best policy so far\n\n```python\n{best.code.strip()}\n```\n"]
    if best.episodes:
        e = best.episodes
        least, mean, most = (f"{f(e.returns):.1f}" for f in (np.min, np.mean, np.max))
        lines.append(f"Return over {len(e.returns)} episodes: least {least}, mean {mean}, most {most}.")
        lines.append(
            f"It must beat doing nothing (action 0), which returns {zero.returns.mean():.1f} over other resets."
        )
        least, mean, most = e.lengths.min(), f"{e.lengths.mean():.0f}", bench.max_steps
        lines.append(f"Steps per episode: least {least}, mean {mean}, limit {most}.")
        lines.append(f"Ended early by termination: {e.terminated} of {len(e.returns)} episodes.")
        lines.append(f"Last observation of the shortest episode: {numbers(e.last_obs)}.")
        lines.append("Mean per step: " + ", ".join(f"{name} {value:.4g}" for name, value in e.terms.items()) + ".")
        lines.append(f"Actions outside the bounds: {e.clipped:.0%}.")
    else:
        lines.append(f"It failed: {best.kind}: {best.detail}")
    errors = sorted({f"- {c.kind}: {c.detail}" for c in others if c is not best and c.kind != "ok"})
    lines += ["\nOther answers failed:\n", *errors] if errors else []
    lines.append("\nFind out why it is no better, and write an improved version under the same contract.\n")
    return "\n".join(lines)


# --- The client -------------------------------------------------------------------------------------------------------


def chat_url(base_url: str) -> str:
    """`host`, `host/`, `host/v1`, `host/v1/` -> `host/v1/chat/completions`."""
    base = base_url.strip().rstrip("/").removesuffix("/chat/completions")
    try:
        parts = urlsplit(base)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError
    except ValueError:
        raise SystemExit(f"--base-url must look like http://host:port/v1, got {one_line(base_url)!r}")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise SystemExit("--base-url must hold no user, password or query: the key comes from OPENAI_API_KEY")
    return base + ("" if re.search(r"/v\d", parts.path) else "/v1") + "/chat/completions"


def send(url: str, payload: dict, timeout: float) -> tuple[int, dict, str]:
    """One POST. The thread is for servers that send a byte now and then: no timeout of a socket ends those."""

    def authorize(request):  # as `auth`, so that requests does not take a password from ~/.netrc instead
        if api_key():
            request.headers["Authorization"] = f"Bearer {api_key()}"
        return request

    def work():
        options = {"stream": True, "allow_redirects": False, "timeout": (CONNECT_SECONDS, timeout)}
        try:
            with requests.post(url, json=payload, auth=authorize, **options) as response:
                body = b""
                for chunk in response.iter_content(65536):
                    body += chunk
                    if len(body) > MAX_BODY:
                        raise Failure("reply", f"the answer is longer than {MAX_BODY:,} bytes")
                result.append((response.status_code, response.headers, redact(body.decode("utf-8", "replace"))))
        except Exception as error:
            result.append(error)

    result = []
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout + CONNECT_SECONDS)
    if not result or isinstance(result[0], requests.ReadTimeout):
        raise Failure("reply", f"no full answer within {timeout:g} s; a slow model needs a larger --timeout")
    if isinstance(result[0], Exception):
        raise result[0]
    return result[0]


def error_text(body: str) -> str:
    """The message in an error body, whatever its form."""
    try:
        error = json.loads(body)
        while isinstance(error, dict):
            error = next(error[key] for key in ("error", "message", "detail") if error.get(key))
        return one_line(error)
    except (ValueError, RecursionError, StopIteration):
        return one_line(body)


def retry_after(value: str, default: float) -> float:
    """Seconds to wait by a Retry-After header, which holds seconds or a date."""
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return default


def post(url: str, payload: dict, timeout: float) -> str:
    """The body of an answer with status 200; retries what may pass, and EndpointError for what does not."""
    key_hint = " (check OPENAI_API_KEY)" if api_key() else " (set OPENAI_API_KEY)"
    hints = {401: key_hint, 403: key_hint, 404: " (check --base-url and --model)"}
    for attempt in range(RETRIES + 1):
        wait = 0.5 * 2**attempt
        try:
            status, headers, body = send(url, payload, timeout)
        except (requests.ConnectionError, requests.exceptions.ChunkedEncodingError) as error:
            reason = getattr(error.args[0] if error.args else error, "reason", error)  # urllib3's own words
            problem = f"cannot reach {urlsplit(url).netloc}: {one_line(str(reason).split(': ', 1)[-1])}"
            if isinstance(reason, NewConnectionError):  # nobody listens there, or no such host
                raise EndpointError(f"{problem} (check --base-url)")
        except requests.RequestException as error:
            raise EndpointError(f"request to {urlsplit(url).netloc} failed: {one_line(error)}")
        else:
            if status == 200:
                return body
            problem = f"{urlsplit(url).netloc} answered {status}: {error_text(body) or 'no message'}"
            if 300 <= status < 400:
                problem += f"; it redirects to {one_line(headers.get('Location', 'nowhere'))}, use that as --base-url"
            if status != 429 and status < 500:
                raise EndpointError(problem + hints.get(status, ""))
            wait = retry_after(headers.get("Retry-After", ""), wait)
            if not wait <= MAX_WAIT:
                raise EndpointError(f"{problem}; it asks to wait {wait:.0f} s, more than {MAX_WAIT}")
        if attempt < RETRIES:
            print(f"{problem}; next try in {wait:.3g} s", flush=True)
            time.sleep(wait)
    raise EndpointError(f"{problem} ({RETRIES + 1} tries)")


def read_answer(body: str) -> str:
    """The text of a chat completion; Failure("reply") for everything else that arrives with status 200."""
    shown = one_line(body, 100)
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        what = "HTML" if body.lstrip().startswith("<") else "no JSON"
        raise Failure("reply", f"the server answered with {what} instead of a completion: {shown}")
    if isinstance(data, dict) and data.get("error"):
        raise Failure("reply", f"the server answered with an error: {error_text(body)}")
    try:
        choice = data["choices"][0]
        message, finish = choice["message"], choice.get("finish_reason")
        content = message.get("content")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise Failure("reply", f"the answer has no choices with a message: {shown}")
    if isinstance(content, list):  # parts, of which only text is the answer
        parts = [part for part in content if isinstance(part, dict) and part.get("type") in ("text", "output_text")]
        content = "".join(part["text"] for part in parts if isinstance(part.get("text"), str))
    if finish == "length":
        raise Failure("reply", "the answer was cut at the token limit: set a larger --max-tokens")
    if isinstance(content, str) and content.strip():
        return redact(content)
    if message.get("refusal"):
        raise Failure("reply", f"the model refused: {message['refusal']}")
    if message.get("reasoning_content") or message.get("reasoning"):
        raise Failure("reply", "the model sent reasoning but no answer: set a larger --max-tokens")
    raise Failure("reply", f"the answer is empty (finish_reason {finish})")


# --- Extraction and lint ----------------------------------------------------------------------------------------------

FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[^`\n]*\n(.*?)^[ \t]*\1[`~]*[ \t\r]*$", re.M | re.S)
OPEN_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})", re.M)


def parse(code: str) -> ast.Module:
    if len(code) > MAX_CODE:
        raise Failure("lint", f"{len(code):,} characters, more than {MAX_CODE:,}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a SyntaxWarning is the model's, not the user's
            return ast.parse(code)
    except SyntaxError as error:
        raise Failure("syntax", f"line {error.lineno}: {error.msg}")
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes, lone surrogates, deep nesting
        raise Failure("syntax", f"cannot be parsed: {type(error).__name__}: {error}")


def extract(answer: str) -> str:
    """The last code block that parses and defines `policy`, byte for byte; the whole text if it has no blocks."""
    answer = re.split(r"</(?:think|thinking|reasoning)>", answer)[-1]
    if re.match(r"\s*<(?:think|thinking|reasoning)>", answer):
        raise Failure("reply", "the answer was cut inside the model's reasoning: set a larger --max-tokens")
    blocks, failure = [match[2] for match in FENCE.finditer(answer)], None
    if OPEN_FENCE.search(FENCE.sub("", answer)):
        failure = Failure("reply", "the answer was cut: its last code block is not closed")
    elif not blocks:
        blocks = [answer]
    for block in reversed(blocks):
        try:
            if any(isinstance(node, ast.FunctionDef) and node.name == "policy" for node in parse(block).body):
                return block
        except Failure as error:
            failure = failure or error
    raise failure or Failure("syntax", "no code block defines policy(obs, step)")


NODES = tuple(
    getattr(ast, name)
    for name in """Module FunctionDef arguments arg Return Assign AnnAssign AugAssign Expr Pass If For While Break
    Continue Assert Import ImportFrom alias Name Constant Attribute Subscript Slice Starred Call keyword BoolOp BinOp
    UnaryOp Compare IfExp NamedExpr Lambda List Tuple Set Dict ListComp SetComp DictComp GeneratorExp comprehension
    expr_context boolop operator unaryop cmpop""".split()
)
BUILTINS = set(
    """abs all any bool dict divmod enumerate filter float int isinstance len list map max min pow range reversed round
    set slice sorted str sum tuple zip""".split()
)
# Attributes, wherever they appear: an alias of numpy then offers no more than numpy does. `empty` is left out, since it
# reads what lies in memory.
ATTRIBUTES = {name for name in dir(math) if not name.startswith("_")} | set(
    """ndarray float16 float32 float64 int8 int16 int32 int64 uint8 bool_ floating integer number newaxis array
    asarray zeros ones full zeros_like ones_like full_like eye identity diag arange linspace concatenate stack
    hstack vstack column_stack append repeat tile reshape ravel flatten roll flip split array_split atleast_1d
    squeeze expand_dims transpose take where select piecewise clip abs absolute fabs sign sqrt cbrt square power
    exp exp2 expm1 log log2 log10 log1p sin cos tan arcsin arccos arctan arctan2 sinh cosh tanh arcsinh arccosh
    arctanh hypot deg2rad rad2deg degrees radians unwrap sinc floor ceil rint round trunc mod fmod remainder
    floor_divide divide true_divide add subtract multiply negative reciprocal maximum minimum fmax fmin heaviside
    copysign sum prod mean std var min max amin amax ptp median cumsum cumprod diff average argmax argmin argsort
    sort searchsorted any all count_nonzero nonzero isfinite isnan isinf nan_to_num isclose allclose array_equal
    logical_and logical_or logical_not logical_xor dot matmul inner outer cross einsum trace linalg norm solve inv
    det pinv interp polyval convolve gradient trapezoid T astype copy dtype fill flat item ndim shape size tolist
    extend insert pop index count items keys values get""".split()
)
MUTATORS = {"append", "extend", "insert", "pop", "fill", "sort"}


def lint_node(node: ast.AST, constants: set[str]) -> str | None:
    """What is wrong with one node, if anything."""
    if not isinstance(node, NODES):
        return f"{type(node).__name__} is not allowed"
    if isinstance(node, ast.Import) and any(alias.name not in ("numpy", "math") for alias in node.names):
        return f"only numpy and math may be imported, not {node.names[0].name}"
    if isinstance(node, ast.ImportFrom):
        if node.module not in ("numpy", "math") or node.level or any(a.name not in ATTRIBUTES for a in node.names):
            return f"from {node.module} import {node.names[0].name} is not allowed"
    names = [getattr(node, key, None) for key in ("id", "arg", "name", "asname")]
    if any(isinstance(name, str) and name.startswith("__") for name in names):
        return "names that start with two underscores are not allowed"
    if isinstance(node, ast.Name) and hasattr(builtins, node.id) and node.id not in BUILTINS:
        return f"{node.id} is not allowed"
    if isinstance(node, ast.Attribute) and node.attr not in ATTRIBUTES:
        return f".{node.attr} is not on the list of allowed attributes"
    if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
        return f".{node.attr} may not be assigned"
    if isinstance(node, ast.arguments):
        for default in node.defaults + node.kw_defaults:
            if not isinstance(default, (ast.Constant, ast.UnaryOp, ast.Name, type(None))):
                return "a default value must be a constant"
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) or getattr(node, "attr", "") in MUTATORS:
        while isinstance(node, (ast.Subscript, ast.Attribute)):
            node = node.value
        if isinstance(node, ast.Name) and node.id in constants:
            return f"{node.id} may not be changed, since it lives outside the function"
    return None


def lint(code: str, env_id: str = "") -> str | None:
    """Refuse code outside the allow-list; return its ENV_ID, if it sets one. This is a lint and not a sandbox."""
    tree, found, policies, constants = parse(code), None, [], set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            policies += [node.args] if node.name == "policy" else []
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
            constants |= names
            if "ENV_ID" in names:
                found = node.value.value if isinstance(node.value, ast.Constant) else "no constant"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            pass  # a docstring
        elif not isinstance(node, (ast.Import, ast.ImportFrom)):
            raise Failure("lint", f"line {node.lineno}: outside functions there may be only imports and constants")
    for node in ast.walk(tree):
        problem = lint_node(node, constants)
        if problem:
            raise Failure("lint", f"line {getattr(node, 'lineno', '?')}: {problem}")
    if not policies:
        raise Failure("lint", "no function policy(obs, step)")
    a = policies[-1]
    if len(a.posonlyargs + a.args) != 2 or a.vararg or a.kwarg or a.kwonlyargs:
        raise Failure("lint", "policy must take exactly obs and step")
    if env_id and found not in (None, env_id):
        raise Failure("lint", f"ENV_ID is {found!r}, but the environment is {env_id!r}")
    return found


# --- The child process ------------------------------------------------------------------------------------------------


def child_main():
    """The program of the child: take the code, then answer batches of (observation, step) until the input ends.

    Only this text is sent to the child (`python -I -c`), which never imports the environment.
    """
    import json
    import os
    import resource
    import time
    import traceback
    import warnings

    import numpy as np
    import numpy.ma  # numpy loads it late, when no file can be opened any more

    warnings.simplefilter("ignore")
    orders = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    for fd in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), fd)
    job = json.loads(orders.readline())
    if os.getuid() == 0:
        try:  # a root user may exceed RLIMIT_NPROC and raise every limit again
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        except OSError:  # a container that knows no other user
            pass
    for name, value in job["limits"].items():
        try:
            resource.setrlimit(getattr(resource, name), (value, value + (name == "RLIMIT_CPU")))
        except (OSError, ValueError):  # macOS refuses some
            pass
    step, result = None, {}
    try:
        namespace = {"__name__": "policy"}
        exec(compile(job["code"], "<policy>", "exec"), namespace)
        policy = namespace["policy"]
        if namespace.get("ENV_ID", job["env_id"]) != job["env_id"]:
            raise NameError(f"ENV_ID became {namespace['ENV_ID']!r}")
        for line in orders:
            batch, actions, start = json.loads(line), [], time.process_time()
            for values, step in batch["queries"]:
                obs = np.array(values, job["dtype"])
                before = obs.tobytes()
                action = np.asarray(policy(obs, step))
                if action.dtype.kind not in "fiu" or action.shape != (job["act_dim"],):
                    found = f"{action.dtype} {action.shape}"
                    result = {"kind": "wrong_shape", "detail": f"not {job['act_dim']} numbers but {found}"}
                elif obs.tobytes() != before:
                    result = {"kind": "impure", "detail": "policy changes its argument obs"}
                elif not np.isfinite(action).all():
                    result = {"kind": "non_finite", "detail": f"action {action.tolist()}"}
                elif time.process_time() - start > batch["cpu_seconds"]:
                    mean = (time.process_time() - start) / (len(actions) + 1)
                    result = {"kind": "too_slow", "detail": f"{1e3 * mean:.3g} ms of CPU time per call"}
                if result:
                    break
                actions.append(action.tolist())
            if result:
                break
            print(json.dumps({"actions": actions}), file=answers, flush=True)
    except MemoryError:
        result = {"kind": "memory", "detail": f"more than {job['limits']['RLIMIT_AS'] >> 20} MiB"}
    except BaseException as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__, -50) if f.filename == "<policy>"]
        where = f"line {lines[-1]}: " if lines else ""
        result = {"kind": "exception", "detail": f"{where}{type(error).__name__}: {str(error)[:200]}"}
    if result and step is not None:
        result["detail"] += f" (at step {step})"
    print(json.dumps(result), file=answers, flush=True)


# Read now: this file may be edited during a long run. The path is for a numpy that isolated mode would not find.
CHILD_PROGRAM = f"""import sys; sys.path.append({str(Path(np.__file__).parents[1])!r})
{inspect.getsource(child_main)}
child_main()"""


class Child:
    """A process that holds one policy. It has `seconds` of waiting in all; then its whole group is killed."""

    def __init__(self, code: str, bench: Bench, seconds: float):
        self.act_dim, self.seconds = len(bench.low), seconds
        self.limits = {**LIMITS, "RLIMIT_CPU": math.ceil(seconds)}
        self.folder = tempfile.TemporaryDirectory(prefix="policy_")
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-c", CHILD_PROGRAM],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            cwd=self.folder.name, start_new_session=True,
            env={"PATH": os.defpath, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        job = {"code": code, "env_id": bench.env_id, "dtype": str(bench.obs_space.dtype), "act_dim": self.act_dim}
        self.unsent = json.dumps({**job, "limits": self.limits}).encode() + b"\n"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        if self.process.returncode is None:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)  # before wait(): until then the number is ours
            except (ProcessLookupError, PermissionError):
                pass
            self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        self.folder.cleanup()

    def death(self) -> Failure:
        self.close()
        if self.process.returncode == -signal.SIGXCPU:
            return Failure("timeout", f"more than {self.limits['RLIMIT_CPU']} s of CPU time")
        return Failure("exception", f"the process died (status {self.process.returncode})")

    def exchange(self, order: dict) -> bytes:
        """Send one line, receive one line. Neither direction can block for longer than the time that is left."""
        inp, out = self.process.stdin.fileno(), self.process.stdout.fileno()
        self.unsent += json.dumps(order).encode() + b"\n"
        answer, start = b"", time.monotonic()
        while not answer.endswith(b"\n"):
            left = max(0.0, self.seconds - (time.monotonic() - start))
            readable, writable, _ = select.select([out], [inp] if self.unsent else [], [], left)
            if not (readable or writable):
                raise Failure("timeout", f"no answer within {self.limits['RLIMIT_CPU']} s, process group killed")
            if writable:
                try:
                    self.unsent = self.unsent[os.write(inp, self.unsent[: select.PIPE_BUF]) :]  # fits without blocking
                except BrokenPipeError:
                    self.unsent = b""
            if readable:
                chunk = os.read(out, 65536)
                answer += chunk
                if not chunk or len(answer) > MAX_BODY:
                    raise self.death()
        self.seconds -= time.monotonic() - start
        return answer

    def act(self, queries: list[tuple[list, int]], cpu_seconds: float = math.inf) -> np.ndarray:
        """The actions for the queries, (number of queries, act_dim). What the child says is not trusted."""
        try:
            result = json.loads(self.exchange({"queries": queries, "cpu_seconds": cpu_seconds}))
            if "kind" in result:
                raise Failure(KINDS[KINDS.index(result["kind"])], result["detail"])
            actions = np.array(result["actions"], float)
            if actions.shape == (len(queries), self.act_dim) and np.isfinite(actions).all():
                return actions
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
        raise Failure("exception", "the process answered with something else than actions")


# --- Trial and screening ----------------------------------------------------------------------------------------------


@dataclass
class Candidate:
    name: str
    code: str = ""
    prompt: str = ""
    kind: str = "ok"
    detail: str = ""
    episodes: Episodes | None = None

    @property
    def rank(self) -> tuple[float, float]:
        """How far it got: by its score, or by the kind of its failure."""
        if self.episodes:
            return math.inf, self.episodes.score
        return KINDS.index(self.kind), 0.0


def trial(code: str, bench: Bench, queries: list):
    """Answer all queries within the limits; in another order, a new process must give the same answers."""
    with Child(code, bench, TRIAL_SECONDS) as child:
        actions = child.act(queries, CALL_SECONDS * len(queries))
    order = np.random.default_rng(1).permutation(len(queries))
    with Child(code, bench, TRIAL_SECONDS) as child:
        shuffled = child.act([queries[i] for i in order])
    differ = ~np.isclose(actions[order], shuffled, rtol=1e-9, atol=1e-9).all(axis=1)
    if differ.any():
        raise Failure("impure", f"{differ.sum()} of {len(order)} answers differ in another order, in a new process")


def measure(code: str, bench: Bench, seeds) -> Episodes:
    """The policy's episodes; its code runs in the child, the environment here."""
    with Child(code, bench, TRIAL_SECONDS + 2 * CALL_SECONDS * bench.max_steps * len(seeds)) as child:
        return rollout(bench, child.act, seeds)


def baselines(bench: Bench) -> tuple[Episodes, Episodes]:
    """The zero action and uniformly random actions, on the seeds of the final score."""
    rng, act_dim = np.random.default_rng(0), len(bench.low)
    zero = rollout(bench, lambda queries: np.zeros((len(queries), act_dim)), FINAL_SEEDS)
    random = rollout(bench, lambda queries: rng.uniform(bench.low, bench.high, (len(queries), act_dim)), FINAL_SEEDS)
    return zero, random


def examine(candidate: Candidate, bench: Bench, queries: list, episodes: int):
    """Lint, trial, screening; the outcome goes into the candidate."""
    try:
        lint(candidate.code, bench.env_id)
        trial(candidate.code, bench, queries)
        seeds = range(FIRST_SELECTION_SEED, FIRST_SELECTION_SEED + episodes)
        candidate.episodes = measure(candidate.code, bench, seeds)
    except Failure as failure:
        candidate.kind, candidate.detail = failure.kind, failure.detail


def print_row(candidate: Candidate | None, width: int):
    """One row of the table of candidates; without a candidate, its head."""
    cells = ["candidate", "check", "score", "return", "steps", "clipped", ""]
    if candidate:
        e = candidate.episodes
        cells = [candidate.name, candidate.kind, "", "", "", "", candidate.detail]
        cells[2:6] = [f"{e.score:.1f}", str(e), f"{e.lengths.mean():.0f}", f"{e.clipped:.0%}"] if e else cells[2:6]
    widths = [-width, -11, 9, 19, 6, 8, 0]
    print("  ".join(f"{c:{'<' if w <= 0 else '>'}{abs(w)}}" for c, w in zip(cells, widths)).rstrip(), flush=True)


def summary(final: Episodes, zero: Episodes, random: Episodes) -> str:
    seeds = f"{len(FINAL_SEEDS)} episodes, seeds {FINAL_SEEDS[0]}..{FINAL_SEEDS[-1]}"
    return f"Return: {final} over {seeds}  (zero action: {zero}, uniform random: {random})"


def screen(args: Args):
    """`--screen`: the checks on existing files. Exit status 1 if one fails, or does not beat the zero action."""
    width, failed, benches = max(map(len, args.screen)), [], {}
    print_row(None, width)
    for name in args.screen:
        candidate = Candidate(name)
        try:
            candidate.code = Path(name).read_bytes().decode("utf-8")
            env_id = lint(candidate.code)
            if not env_id or ":" in str(env_id):
                raise Failure("lint", "ENV_ID must be set to the id of an environment")
            if env_id not in benches:
                bench = Bench(args.env_id if args.env_id.split(":")[-1] == env_id else env_id)
                benches[env_id] = bench, bench.trial_queries(), baselines(bench)
            bench, queries, (zero, random) = benches[env_id]
            examine(candidate, bench, queries, args.episodes)
            final = measure(candidate.code, bench, FINAL_SEEDS) if candidate.episodes else None
        except (Failure, OSError, UnicodeDecodeError, SystemExit) as error:
            candidate.kind, candidate.detail, final = getattr(error, "kind", "file"), one_line(error), None
        print_row(candidate, width)
        if final:
            print(f"{'':{width}}  {summary(final, zero, random)}")
        if not final or (final.score <= zero.score and not args.accept_worse):
            failed.append(name)
    if failed:
        raise SystemExit(f"failed, or no better than the zero action: {', '.join(failed)}")


# --- Output -----------------------------------------------------------------------------------------------------------


def default_output(env_id: str) -> Path:
    """`HalfCheetah-v4` -> `llm_policies/half_cheetah_v4.py`, beside this script: where camel_td3.py looks."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", env_id)
    return Path(__file__).parent / "llm_policies" / (re.sub(r"\W+", "_", name).lower() + ".py")


def compose(candidate: Candidate, bench: Bench, args: Args, prompt_file: Path, asked: int, result: str) -> str:
    """The file: provenance, ENV_ID, and the model's code byte for byte."""
    author = re.sub(r'[\\"]', "'", one_line(f"{args.model} at {urlsplit(chat_url(args.base_url)).hostname}"))
    digest = hashlib.sha256(candidate.prompt.encode()).hexdigest()[:16]
    header = f"""{bench.env_id}: a policy written by a language model and screened by generate_policy.py.

Written by: {author}  Prompt: {prompt_file.name} (sha256 {digest})  Date: {date.today()}
{result}
Candidate {candidate.name} (round.number) of {asked} in {args.rounds} rounds, its code unchanged.
Environment steps spent on all: {bench.steps}
"""
    env_line = "" if lint(candidate.code, bench.env_id) else f'ENV_ID = "{bench.env_id}"\n\n'
    return f'"""{header}"""\n{env_line}{candidate.code}'


def write(path: Path, text: str, overwrite: bool):
    """Whole or not at all, and never over an existing file unless told to."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(text.encode("utf-8"))
        if path.exists() and not overwrite:
            raise SystemExit(f"{path} exists: give --overwrite or another --output")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def generate(args: Args):
    bench = Bench(args.env_id)
    prompt = first_prompt = build_prompt(bench, args.task)
    if args.print_prompt:
        print(prompt)
        return
    url, path = chat_url(args.base_url), Path(args.output) if args.output else default_output(bench.env_id)
    prompt_file = path.with_suffix(".prompt.txt")
    for file in (path, prompt_file):
        if file.exists() and not args.overwrite:
            raise SystemExit(f"{file} exists: give --overwrite or another --output")
    if not (api_key().isascii() and api_key().isprintable()):
        raise SystemExit("OPENAI_API_KEY holds characters that no HTTP header can carry")
    path.parent.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^\w.-]", "_", bench.env_id)
    folder = Path("runs/generate") / f"{name}__{datetime.now():%Y%m%d-%H%M%S-%f}"
    folder.mkdir(parents=True)
    payload = {"model": args.model, "temperature": args.temperature, "max_tokens": args.max_tokens}
    payload = {key: value for key, value in payload.items() if value is not None}

    queries, (zero, random) = bench.trial_queries(), baselines(bench)
    print(f"record: {folder}\nzero action: {zero}, uniform random: {random}")
    print_row(None, 9)
    candidates = []
    for index in range(args.rounds * args.num_candidates):
        number, k = divmod(index, args.num_candidates)
        best = max(candidates, key=lambda c: c.rank, default=None)
        if k == 0:
            if best and best.code:
                prompt = first_prompt + feedback(best, candidates, bench, zero)
            (folder / f"prompt_{number + 1}.txt").write_bytes(prompt.encode("utf-8"))
        candidate = Candidate(f"{number + 1}.{k + 1}", prompt=prompt)
        try:
            body = post(url, {**payload, "messages": [{"role": "user", "content": prompt}]}, args.timeout)
            (folder / f"reply_{candidate.name}.txt").write_text(body, encoding="utf-8")
            candidate.code = extract(read_answer(body))
            (folder / f"candidate_{candidate.name}.py").write_bytes(candidate.code.encode("utf-8"))
            examine(candidate, bench, queries, args.episodes)
        except Failure as failure:
            candidate.kind, candidate.detail = failure.kind, failure.detail
        except EndpointError as error:
            if not (best and best.episodes):
                raise
            print(f"{error}; going on with the candidates so far", file=sys.stderr)
            break
        candidates.append(candidate)
        print_row(candidate, 9)
        outcome = {"candidate": candidate.name, "kind": candidate.kind, "detail": candidate.detail}
        outcome["returns"] = candidate.episodes.returns.tolist() if candidate.episodes else None
        with open(folder / "candidates.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(outcome) + "\n")

    best = max(candidates, key=lambda c: c.rank)
    if not best.episodes:
        counts = ", ".join(f"{count} {kind}" for kind, count in Counter(c.kind for c in candidates).most_common())
        raise SystemExit(f"no candidate passed the checks ({counts}); the best: {best.detail}; all are in {folder}")
    try:
        final = measure(best.code, bench, FINAL_SEEDS)
        result = summary(final, zero, random)
        print(f"best: {best.name}  {result}\nenvironment steps spent on all: {bench.steps}")
        if final.score <= zero.score and not args.accept_worse:
            scores = f"mean - 0.2 std: {final.score:.1f} against {zero.score:.1f}"
            raise SystemExit(f"the best candidate does not beat the zero action ({scores}); all are in {folder}")
        text = compose(best, bench, args, prompt_file, len(candidates), result)
        lint(text, bench.env_id)
        trial(text, bench, queries)
    except Failure as failure:
        raise SystemExit(f"candidate {best.name}, the best, failed at last: {failure.kind}: {failure.detail}")
    write(prompt_file, best.prompt, args.overwrite)
    write(path, text, args.overwrite)
    print(f"wrote {path} and {prompt_file.name}")


def main(args: Args):
    for name, least in (("num_candidates", 1), ("rounds", 1), ("episodes", 10), ("max_tokens", 1), ("temperature", 0)):
        value = getattr(args, name)
        if value is not None and not least <= value < math.inf:
            raise SystemExit(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    if not 0 < args.timeout < 1e6:
        raise SystemExit(f"--timeout must be a positive number of seconds, got {args.timeout}")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a terminal that cannot show a character of an answer
    screen(args) if args.screen else generate(args)


if __name__ == "__main__":
    try:
        main(tyro.cli(Args))
    except (EndpointError, OSError, UnicodeError) as error:
        raise SystemExit(one_line(error))
    except KeyboardInterrupt:
        raise SystemExit(130)
