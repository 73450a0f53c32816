"""benchmark/sweep.py without Ray: what is missing, in which order, and what becomes of runs that are killed or fail."""

import csv
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor

import camel_sac
import camel_td3
import numpy as np
import pytest
import tyro
from conftest import ROOT

from benchmark import sweep

DEFINED = sweep.STUDIES

FLAGS = "--total-timesteps 600 --learning-starts 200 --eval-frequency 200 --eval-episodes 2 --batch-size 32"
STUDIES = {
    "tiny": dict(
        script="camel_td3.py",
        env_ids=["Match-v0", "Count-v0"],
        seeds=[7, 8],
        flags=FLAGS,
        arms={"plain": "--no-mask", "wide": "--mask-width 0.4"},
    ),
}


@pytest.fixture(autouse=True)
def tiny_studies(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "STUDIES", STUDIES)
    monkeypatch.setattr(sweep, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(sweep, "RUNS", tmp_path / "runs")


@pytest.fixture
def tiny_run(monkeypatch):
    """A run of seconds, with checkpoints every 50 steps."""
    monkeypatch.setattr(sweep, "CHECKPOINT_FREQUENCY", 50)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    return sweep.Run("tiny", "camel_td3.py", "tiny_envs:Match-v0", "plain", 7, f"{FLAGS} --no-mask")


def curve(run, *returns):
    """Rows of a curve that was never trained."""
    about = dict(zip(sweep.KEY, run.key)) | {"flags": run.flags}
    return [about | {"step": 200 * (i + 1), "return_mean": value} for i, value in enumerate(returns)]


def table(study):
    with open(sweep.RESULTS / f"{study}.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def start_with(outcome, order=None):
    """start(run) for `sweep.sweep`, whose future is done at once with what `outcome(run)` returns or raises."""

    def start(run):
        if order is not None:
            order.append(run)
        future = Future()
        try:
            future.set_result(outcome(run))
        except RuntimeError as error:
            future.set_exception(error)
        return future

    return start


# --- What is missing


def test_order_has_all_arms_of_a_seed_before_the_next():
    runs = sweep.planned("tiny")
    assert [(run.seed, run.env_id, run.arm) for run in runs] == [
        (seed, env_id, arm) for seed in (7, 8) for env_id in ("Match-v0", "Count-v0") for arm in ("plain", "wide")
    ]
    assert runs[1].flags == f"{FLAGS} --mask-width 0.4"
    (one,) = sweep.planned("tiny", seeds=[9], env_ids=["Count-v0"], arms=["wide"])
    assert one.key == ("camel_td3.py", "Count-v0", "wide", 9)


def test_missing_is_what_no_table_has():
    runs = sweep.planned("tiny")
    assert sweep.missing(runs) == runs
    sweep.append(runs[2], curve(runs[2], 1.0))
    sweep.append(runs[5], curve(runs[5], 1.0))
    assert sweep.missing(runs) == [run for i, run in enumerate(runs) if i not in (2, 5)]


def test_an_arm_whose_flags_were_changed_is_refused():
    (run, *_) = sweep.planned("tiny")
    sweep.append(run, curve(run, 1.0))
    with pytest.raises(SystemExit, match="tiny.csv: tiny Match-v0 plain 7 was made with .*rename the arm"):
        sweep.missing([run._replace(flags="--no-mask")])


def test_appending_repeats_no_rows_and_no_header():
    first, second = sweep.planned("tiny")[:2]
    for _ in range(2):
        sweep.append(first, curve(first, 1.0, 2.5))
        sweep.append(second, curve(second, 3.0))
    assert [(row["arm"], row["step"], row["return_mean"]) for row in table("tiny")] == [
        ("plain", "200", "1.0"),
        ("plain", "400", "2.5"),
        ("wide", "200", "3.0"),
    ]
    assert list(table("tiny")[0]) == sweep.COLUMNS
    assert [path.name for path in sweep.RESULTS.iterdir()] == ["tiny.csv"]


def test_dry_run(capsys):
    sweep.main(sweep.Args(studies=("tiny",), seeds=(7,), env_id=("Match-v0",), dry_run=True))
    assert capsys.readouterr().out == "tiny Match-v0 plain 7\ntiny Match-v0 wide 7\n"
    for run in sweep.planned("tiny"):
        sweep.append(run, curve(run, 1.0))
    for studies in (("tiny",), ()):  # none named: those that have a table
        sweep.main(sweep.Args(studies=studies, dry_run=True))
        assert capsys.readouterr().out == "nothing missing\n"
    assert not sweep.RUNS.exists()


@pytest.mark.parametrize(
    "flags, line",
    [
        (dict(env_id=("Match-v0", "Other-v0")), "sweep.py: Other-v0 is none of Match-v0, Count-v0"),
        (dict(arm=("thin",)), "sweep.py: thin is none of plain, wide"),
        (dict(workers=-1), "--workers -1: must be 0 or more"),
    ],
)
def test_a_value_that_selects_nothing_is_refused(flags, line):
    with pytest.raises(SystemExit) as stopped:
        sweep.main(sweep.Args(studies=("tiny",), **flags, dry_run=True))
    assert stopped.value.code == line


def test_a_seed_named_twice_is_one_run():
    assert sweep.planned("tiny", seeds=[9, 9]) == sweep.planned("tiny", seeds=[9])


def test_nothing_is_missing_from_the_published_tables_and_a_dry_run_needs_no_ray():
    code = "import runpy, sys; sys.modules['ray'] = None; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    command = [sys.executable, "-c", code, str(ROOT / "benchmark/sweep.py"), "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "nothing missing\n", "")


@pytest.mark.parametrize("study", DEFINED)
def test_defined_studies_can_be_run(study, monkeypatch):
    """Each arm's flags are ones that its script accepts, with values that it accepts; each policy file loads."""
    monkeypatch.setattr(sweep, "STUDIES", DEFINED)
    for run in sweep.planned(study):
        script = {"camel_td3.py": camel_td3, "camel_sac.py": camel_sac}[run.script]
        args = tyro.cli(script.Args, args=["--env-id", run.env_id, "--seed", str(run.seed), *run.flags.split()])
        script.check(args)
        if args.mask:
            env = script.make_env(run.env_id)
            path = ROOT / args.policy_file if args.policy_file else script.default_policy_file(run.env_id)
            prior, (obs, _) = script.load_policy(path, env), env.reset(seed=0)
            assert np.array_equal(prior(obs, 0), prior(obs, 0)) and env.action_space.contains(prior(obs, 0))


def test_priors_without_content():
    env = camel_td3.make_env("Hopper-v4")
    names = (
        "llm_policies/hopper_v4",
        *(f"benchmark/priors/hopper_v4_{name}" for name in ("zero", "random", "negative")),
    )
    hop, zero, random, negative = (camel_td3.load_policy(ROOT / f"{name}.py", env) for name in names)
    observations = np.random.default_rng(0).normal(size=(2000, 11))
    actions = np.array([random(obs, 0) for obs in observations])
    assert np.abs(np.quantile(actions, [0, 0.25, 0.5, 0.75, 1]) - [-1, -0.5, 0, 0.5, 1]).max() < 0.05  # uniform
    assert np.abs(np.corrcoef(actions.T) - np.eye(3)).max() < 0.1  # each dimension for itself
    for obs in observations[:20]:
        assert np.array_equal(zero(obs, 0), np.zeros(3)) and np.array_equal(negative(obs, 0), -hop(obs, 0))


# --- One run


def test_a_killed_run_goes_on_to_the_same_curve(tiny_run, tmp_path):
    """The sweep's process is killed; its training dies with it, is taken up at its checkpoint, and ends as it would."""
    whole = sweep.train(tiny_run._replace(study="whole"))
    assert [row["step"] for row in whole] == ["200", "400", "600"]
    assert len({row["return_mean"] for row in whole}) == 3  # it learns

    code = f"from benchmark import sweep; from pathlib import Path; sweep.RUNS = Path({str(sweep.RUNS)!r})\n"
    code += f"sweep.CHECKPOINT_FREQUENCY = 50; sweep.train(sweep.Run(*{tuple(tiny_run)!r}))"
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | paths)
    deadline = time.time() + 240
    while not list(tiny_run.folder.glob("runs/*/checkpoint.pt")):
        assert process.poll() is None and time.time() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (run_dir,) = tiny_run.folder.glob("runs/*")
    while not sweep.model(tiny_run):  # the lock is free as soon as the training has died
        try:
            rows = sweep.train(tiny_run)
        except RuntimeError as error:
            assert "another sweep" in str(error) and time.time() < deadline
    assert sweep.model(tiny_run).parent == run_dir and not (run_dir / "checkpoint.pt").exists()
    commands = [line for line in (tiny_run.folder / "log.txt").read_text().splitlines() if "camel_td3.py" in line]
    assert len(commands) == 2 and commands[1].endswith(f"--resume runs/{run_dir.name}/checkpoint.pt")
    for row in whole + rows:
        assert row.pop("wall_seconds") > 0 and row.pop("commit")
    assert rows == whole


def test_rows_of_a_finished_run(tiny_run, write_policy):
    policy = write_policy("Match-v0", "return obs")
    run = tiny_run._replace(flags=f"{FLAGS} --policy-file {policy}")
    rows = sweep.train(run)
    assert set(rows[0]) == set(sweep.COLUMNS)
    assert float(rows[0]["prior_return"]) == 10.0 and rows[0]["learning_starts"] == 200
    before = (run.folder / "log.txt").stat().st_size
    assert (
        sweep.train(run) == rows and (run.folder / "log.txt").stat().st_size == before
    )  # collected, not trained again
    with pytest.raises(RuntimeError, match="was made with"):
        sweep.train(run._replace(flags=FLAGS))


def test_a_failing_run_is_reported_by_its_last_line(tiny_run, capsys, monkeypatch):
    monkeypatch.setattr(sweep, "ATTEMPTS", 1)
    good = tiny_run._replace(env_id="Match-v0", seed=3)
    bad = tiny_run._replace(arm="bad", flags=f"{FLAGS} --mask-width 0")
    with ThreadPoolExecutor(1) as pool:
        start = start_with(lambda run: curve(run, 1.0))
        failed = sweep.sweep([bad, good], lambda run: pool.submit(sweep.train, run) if run is bad else start(run), 1)
    assert failed == [bad] and len(table("tiny")) == 1
    assert " bad 7: FAILED: exit status 1: --mask-width 0.0: must be above 0\n" in capsys.readouterr().out


# --- All runs


def test_a_failed_run_is_tried_again_before_the_next(capsys):
    runs, order, faults = sweep.planned("tiny")[:3], [], [RuntimeError("no memory")]

    def outcome(run):
        if run is runs[1] and faults:
            raise faults.pop()
        return curve(run, 1.0)

    assert sweep.sweep(runs, start_with(outcome, order), 1) == []
    assert order == [runs[0], runs[1], runs[1], runs[2]] and len(table("tiny")) == 3
    assert "tiny Match-v0 wide 7: failed, trying again: no memory" in capsys.readouterr().out


def test_workers_limit_the_runs_at_a_time():
    runs, open_futures, most = sweep.planned("tiny"), {}, []

    def start(run):
        future = Future()
        open_futures[future] = run
        most.append(len(open_futures))
        if len(open_futures) == 3 or run is runs[-1]:
            for future in list(open_futures):
                finished = open_futures.pop(future)
                future.set_result(curve(finished, 1.0))
        return future

    assert sweep.sweep(runs, start, 3) == [] and max(most) == 3 and sweep.missing(runs) == []
