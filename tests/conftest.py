import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_envs  # noqa: F401  registers the environments
import torch

# Two tests run side by side, so one thread each, in the processes that they start as well.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Each test runs in an empty folder, in which `runs/` appears."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def write_policy(tmp_path):
    """write_policy("Match-v0", "return obs") -> path of a policy file with that body."""

    def write(env_id: str, body: str, name: str = "policy.py") -> str:
        text = f"import numpy as np\nENV_ID = {env_id!r}\ndef policy(obs, step):\n    {body}\n"
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return write


@pytest.fixture
def run(tmp_path):
    """run("camel_td3.py", "--help") -> the finished process, without output of gymnasium's own deprecations."""

    def start(script, *flags, cwd=tmp_path, **settings):
        command = [sys.executable, str(ROOT / script), *map(str, flags)]
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT / "tests")}
        return subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, **settings
        )

    return start


@pytest.fixture
def small():
    """Settings of a run that takes seconds and still makes updates."""
    return dict(total_timesteps=200, learning_starts=120, batch_size=32, eval_episodes=1, eval_frequency=100)


@pytest.fixture
def targets(camel, monkeypatch):
    """Each critic update's box, last masked action, and target action as the target critic saw it."""
    seen = []
    action_box, mask_action, forward = camel.action_box, camel.mask_action, camel.TwinCritic.forward
    last = {}

    def spying_box(*arguments):
        last["box"] = action_box(*arguments)
        return last["box"]

    def spying_mask(*arguments):
        last["masked"] = mask_action(*arguments)
        return last["masked"]

    def spying_forward(self, obs, action, critics=2):
        if not next(self.parameters()).requires_grad:
            seen.append((*last["box"], last["masked"], action))
        return forward(self, obs, action, critics)

    monkeypatch.setattr(camel, "action_box", spying_box)
    monkeypatch.setattr(camel, "mask_action", spying_mask)
    monkeypatch.setattr(camel.TwinCritic, "forward", spying_forward)
    return seen


@pytest.fixture
def keep_checkpoint(monkeypatch):
    """keep_checkpoint(script, when): the script's first checkpoint for which `when(contents)` stays, in `kept/`."""

    def keep(camel, when):
        save, kept = camel.save, Path("kept/checkpoint.pt")

        def keeping_save(path, contents):
            save(path, contents)
            if path.name == "checkpoint.pt" and when(contents) and not kept.exists():
                kept.parent.mkdir()
                shutil.copy(path, kept)

        monkeypatch.setattr(camel, "save", keeping_save)

    return keep


def newest_run() -> Path:
    return max(Path("runs").iterdir(), key=lambda path: path.stat().st_mtime_ns)


def trained(camel, **settings) -> dict:
    """Train and return what `model.pt` holds."""
    camel.train(camel.Args(**settings))
    return torch.load(newest_run() / "model.pt")


def same_weights(a: dict, b: dict) -> bool:
    return all(torch.equal(a[part][name], b[part][name]) for part in ("actor", "qf") for name in a[part])
