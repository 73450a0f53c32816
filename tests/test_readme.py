"""Every command and every listing of the README and the docs works. Long runs are cut short."""

import re
import shlex
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language, page):
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


LINES = [line for page in PAGES for block in blocks("sh", page) for line in block.splitlines()]
TRAINING = sorted(
    {part.strip() for line in LINES for part in line.split("&&") if re.match(r" *python camel_\w+.py", part)}
)
SHORT = "--total-timesteps 130 --learning-starts 100 --eval-episodes 1 --eval-frequency 0".split()


def test_there_are_commands():
    assert len(TRAINING) >= 6 and len([line for line in LINES if line.startswith("python3 -m venv")]) == 2


def test_ci_runs_the_test_command_of_the_readme():
    (line,) = [line for line in LINES if line.endswith("python -m pytest -n 2")]
    # What .ci/run hands to the shell, by its own extraction.
    extraction = re.search(r'\$\((.*)\)"', (ROOT / ".ci/run").read_text()).group(1)
    shown = subprocess.run(["sh", "-c", extraction], cwd=ROOT, capture_output=True, text=True)
    assert shown.stdout.strip() == line


@pytest.mark.parametrize("command", TRAINING)
def test_training_command(command, tmp_path):
    """The command itself, on a copy of the repository's files, with fewer steps."""
    for name in ("camel_td3.py", "camel_sac.py"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "llm_policies", tmp_path / "llm_policies")
    for block in blocks("python", ROOT / "README.md"):
        if "gym.register" in block:
            (tmp_path / "my_robot.py").write_text(block, encoding="utf-8")
        elif "ENV_ID" in block:
            (tmp_path / "my_policy.py").write_text(block, encoding="utf-8")
    words = shlex.split(command)[1:]
    for placeholder in ("<run>/model.pt", "<run>/checkpoint.pt"):
        assert placeholder not in words, "a command with a placeholder belongs into the text, not into a listing"
    done = subprocess.run([sys.executable, *words, *SHORT], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert list(tmp_path.glob("runs/*/model.pt"))


def generate_command(mark):
    (line,) = [line for line in LINES if line.startswith("python generate_policy.py") and mark in line]
    return line


def run_in_root(command, **settings):
    words = shlex.split(command)[1:]
    return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=120, **settings)


def test_print_prompt_command():
    done = run_in_root(generate_command("--print-prompt"))
    assert done.returncode == 0 and "policy(obs: np.ndarray, step: int)" in done.stdout


def test_screen_command():
    """On one of the files, for the sake of time."""
    one = "llm_policies/hopper_v4_qwen.py"
    done = run_in_root(generate_command("--screen").replace("llm_policies/*.py", one))
    assert done.returncode == 0 and re.search(r"Return: 99\d\.\d \+- 0\.7 over 20 episodes", done.stdout)


def test_generate_command_without_a_server():
    done = run_in_root(generate_command("--rounds 2").replace(":8123", ":9"))
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "127.0.0.1:9" in done.stderr


def test_worked_example_learns(tmp_path):
    """The README's own environment and policy, at the README's own length: near the best return, unmasked."""
    (command,) = [command for command in TRAINING if "my_robot" in command]
    shutil.copy(ROOT / "camel_td3.py", tmp_path)
    for name, mark in (("my_robot.py", "gym.register"), ("my_policy.py", "ENV_ID")):
        (block,) = [block for block in blocks("python", ROOT / "README.md") if mark in block]
        (tmp_path / name).write_text(block, encoding="utf-8")
    done = subprocess.run([sys.executable, *shlex.split(command)[1:]], cwd=tmp_path, capture_output=True, text=True)
    prior, agent = (float(re.search(rf"{what} (-?[\d.]+)", done.stdout).group(1)) for what in ("policy:", "\nreturn"))
    assert done.returncode == 0 and agent > 1.5 * prior  # returns are negative: at most half as much again is lost
