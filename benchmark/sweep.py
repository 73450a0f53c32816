"""Train what is missing of a study, one core and one torch thread a run, and collect the learning curves.

    pip install -r benchmark/requirements.txt
    python benchmark/sweep.py --dry-run                   # lists what the tables in benchmark/results miss
    python benchmark/sweep.py ablation --seeds 102 103
    python benchmark/sweep.py main --seeds 6 7 --address auto    # on a running Ray cluster

A finished run becomes rows of benchmark/results/<study>.csv, one an evaluation. Interrupt it at will and start it
again: runs go on from their last checkpoints. The time for a study is the sum of its runs' `wall_seconds` over the
number of cores. On a cluster all nodes need this repository at the same path, on a shared file system.
"""

import csv
import ctypes
import fcntl
import importlib.metadata
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import tyro

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmark" / "results"
RUNS = ROOT / "benchmark" / "runs"  # logs, checkpoints and models; not committed
CHECKPOINT_FREQUENCY = 5_000  # environment steps: what an interruption loses at most, and the rest of an episode
ATTEMPTS = 3

# An arm is a name and the flags of the script that make it, after those of its study. `--policy-file` is relative to
# the repository; `{env_id}` is the run's environment. The .pt files in benchmark/priors are actors of TD3 after
# 300000 steps with the flags of `long`; Hopper's was trained on another CPU and is not that of the run in the table.
STUDIES = {
    "ablation": dict(
        script="camel_td3.py",
        env_ids=["Hopper-v4"],
        seeds=[101],
        flags="--total-timesteps 60000",
        arms={
            "TD3": "--no-mask",
            "CAMEL": "",  # step masking, adaptive schedule, half-width 0.1, warm-up 10000; each arm below changes one
            "width_0.2": "--mask-width 0.2",
            "fraction_0.4": "--epsilon-fraction 0.4",
            "warm-up_only": "--epsilon-schedule linear --epsilon-fraction 0",
        },
    ),
    "long": dict(
        script="camel_td3.py",
        env_ids=["Hopper-v4"],
        seeds=[1],
        flags="--total-timesteps 300000",
        arms={"TD3": "--no-mask", "CAMEL": ""},
    ),
    "main": dict(
        script="camel_td3.py",
        env_ids=["Hopper-v4", "Walker2d-v4", "Ant-v4"],
        seeds=[1, 2, 3, 4, 5],
        flags="--total-timesteps 100000",
        arms={"TD3": "--no-mask", "CAMEL": ""},
    ),
    "expert_masking": dict(
        script="camel_td3.py",
        env_ids=["Hopper-v4"],
        seeds=[1, 2, 3],
        flags="--total-timesteps 100000",
        arms={"expert_masking": "--policy-file benchmark/priors/{env_id}_td3.pt"},
    ),
    "main_sac": dict(
        script="camel_sac.py",
        env_ids=["Hopper-v4", "Ant-v4"],
        seeds=[1],
        flags="--total-timesteps 100000",
        arms={"SAC": "--no-mask", "CAMEL": ""},
    ),
    "priors": dict(  # plot.py adds TD3 and CAMEL from main: no prior, and the default one
        script="camel_td3.py",
        env_ids=["Hopper-v4"],
        seeds=[1],
        flags="--total-timesteps 100000",
        arms={
            "stand": "--policy-file llm_policies/hopper_v4_stand.py",
            "zero": "--policy-file benchmark/priors/hopper_v4_zero.py",
            "random": "--policy-file benchmark/priors/hopper_v4_random.py",
            "negative": "--policy-file benchmark/priors/hopper_v4_negative.py",
        },
    ),
}

PACKAGES = ["torch", "gymnasium", "mujoco", "numpy"]
CURVE = ["step", "return_mean", "return_std", "training_return", "epsilon"]  # of the script's progress.csv
KEY = ["script", "env_id", "arm", "seed"]
COLUMNS = [*KEY, *CURVE, "prior_return", "wall_seconds"]
COLUMNS += ["total_timesteps", "learning_starts", "flags", "commit", *PACKAGES]


@dataclass
class Args:
    studies: tyro.conf.Positional[tuple[Literal[*STUDIES], ...]] = ()
    """run in this order; none named: those that have a table in benchmark/results"""
    seeds: tuple[int, ...] = ()
    """seeds instead of the study's own"""
    env_id: tuple[str, ...] = ()
    """only these of the study's environments"""
    arm: tuple[str, ...] = ()
    """only these of the study's arms"""
    workers: int = 0
    """runs at a time; 0: one for each core of the machine or cluster"""
    address: str = ""
    """Ray cluster to run on, `auto` for the one that this machine belongs to; default: this machine alone"""
    dry_run: bool = False
    """only list what is missing; needs no Ray"""


class Run(NamedTuple):
    study: str
    script: str
    env_id: str
    arm: str
    seed: int
    flags: str

    @property
    def key(self) -> tuple:
        return self[1:5]

    @property
    def folder(self) -> Path:
        return RUNS / self.study / self.arm / f"{self.env_id}__{self.seed}"

    def __str__(self):
        return f"{self.study} {self.env_id} {self.arm} {self.seed}"


def one_line(thing) -> str:
    return " ".join(str(thing).split())


def write(path: Path, text: str):
    """Write under a temporary name, then rename: a kill at any moment leaves the last whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8", newline="")
    os.replace(temporary, path)


# --- What is missing -------------------------------------------------------------------------------------------------
def planned(study: str, seeds=(), env_ids=(), arms=()) -> list[Run]:
    """Return the runs of a study, all arms and environments of a seed before the next seed."""
    about = STUDIES[study]
    return [
        Run(study, about["script"], env_id, arm, seed, f"{about['flags']} {flags}".strip().format(env_id=env_id))
        for seed in dict.fromkeys(seeds or about["seeds"])
        for env_id in about["env_ids"]
        for arm, flags in about["arms"].items()
        if (not env_ids or env_id in env_ids) and (not arms or arm in arms)
    ]


def collected(study: str) -> dict[tuple, str]:
    """Return the flags of each run in the study's table, by (script, env_id, arm, seed)."""
    path = RESULTS / f"{study}.csv"
    if not path.exists():
        return {}
    with open(path, newline="", encoding="utf-8") as file:
        return {
            (row["script"], row["env_id"], row["arm"], int(row["seed"])): row["flags"] for row in csv.DictReader(file)
        }


def missing(runs: list[Run]) -> list[Run]:
    """Return the runs that are in no table. SystemExit if a table has an arm's name with other flags than now."""
    tables, found = {study: collected(study) for study in {run.study for run in runs}}, []
    for run in runs:
        flags = tables[run.study].get(run.key)
        if flags is None:
            found.append(run)
        elif flags != run.flags:
            raise SystemExit(
                f"benchmark/results/{run.study}.csv: {run} was made with '{flags}', not with '{run.flags}'; "
                "rename the arm, or delete its rows and its folder in benchmark/runs"
            )
    return found


def model(run: Run) -> Path | None:
    return next(run.folder.glob("runs/*/model.pt"), None)


def append(run: Run, rows: list[dict]):
    """Add a finished curve to its study's table, once."""
    path = RESULTS / f"{run.study}.csv"
    if run.key in collected(run.study):
        return
    text = io.StringIO()
    table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    if not path.exists():
        table.writeheader()
    table.writerows(rows)
    write(path, (path.read_text(encoding="utf-8") if path.exists() else "") + text.getvalue())


# --- One run ---------------------------------------------------------------------------------------------------------
def commit(script: str) -> str:
    """Return the commit that is checked out, with `-dirty` if the script or a policy differs from it."""
    git = ["git", "--no-optional-locks", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        paths = [script, "llm_policies", "benchmark/priors"]
        changes = subprocess.run([*git, "status", "--porcelain", "--", *paths], capture_output=True, text=True).stdout
    except OSError:
        head, changes = "", ""
    return (head or "unknown") + ("-dirty" if changes else "")


def train(run: Run) -> list[dict]:
    """Train, go on with, or only collect a run; return the rows of its curve. RuntimeError, one line, if it fails."""
    run.folder.mkdir(parents=True, exist_ok=True)
    log_path, state_path = run.folder / "log.txt", run.folder / "sweep.json"
    with open(log_path, "a", encoding="utf-8") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the training inherits the lock
        except BlockingIOError:
            raise RuntimeError("is being trained by another sweep")
        checkpoint = next(run.folder.glob("runs/*/checkpoint.pt"), None)
        state = {"flags": run.flags, "seconds": 0.0, "commits": []}
        if checkpoint or model(run):
            state = json.loads(state_path.read_text())
            if state["flags"] != run.flags:
                raise RuntimeError(
                    f"{run.folder} was made with '{state['flags']}'; rename the arm or delete the folder"
                )
        if not model(run):
            train_on(run, checkpoint, state, log)

    output = log_path.read_text(encoding="utf-8", errors="replace")
    run_dir = model(run).parent
    (run_dir / "checkpoint.pt").unlink(missing_ok=True)
    config = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    about = dict(zip(KEY, run.key)) | {"flags": run.flags, "commit": "+".join(state["commits"])}
    about |= {name: config[name] for name in ("total_timesteps", "learning_starts")}
    about["prior_return"] = re.findall("return of the bare policy: (.*)", output)[-1] if config["mask"] else "nan"
    about["wall_seconds"] = round(state["seconds"] + model(run).stat().st_mtime - state["started"], 1)
    about |= {package: importlib.metadata.version(package) for package in PACKAGES}
    with open(run_dir / "progress.csv", newline="", encoding="utf-8") as file:
        return [about | {name: row[name] for name in CURVE} for row in csv.DictReader(file)]


def train_on(run: Run, checkpoint: Path | None, state: dict, log):
    """Train to the end, from the checkpoint if there is one. `state` is brought up to date, and kept in sweep.json."""
    if checkpoint:  # what came after it is done again, its time not counted; 0 if the last start wrote none
        state["seconds"] += max(0.0, checkpoint.stat().st_mtime - state["started"])
    else:
        shutil.rmtree(run.folder / "runs", ignore_errors=True)
    state["commits"] = list(dict.fromkeys([*state["commits"], commit(run.script)]))
    state["started"] = time.time()
    write(run.folder / "sweep.json", json.dumps(state))

    words = run.flags.split()
    if "--policy-file" in words:
        at = words.index("--policy-file") + 1
        words[at] = str(ROOT / words[at])
    command = [sys.executable, str(ROOT / run.script), "--env-id", run.env_id, "--seed", str(run.seed), *words]
    command += ["--device", "cpu", "--torch-threads", "1", "--checkpoint-frequency", str(CHECKPOINT_FREQUENCY)]
    command += ["--resume", str(checkpoint.relative_to(run.folder))] if checkpoint else []
    print(shlex.join(command), file=log, flush=True)
    # On Linux the kernel kills the training when the process that started it ends, in whatever way (PR_SET_PDEATHSIG).
    die_with_parent = partial(ctypes.CDLL(None).prctl, 1, signal.SIGKILL) if sys.platform == "linux" else None
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=run.folder, env=environment, stdout=log, stderr=log, preexec_fn=die_with_parent)
    if not model(run):
        last_line = Path(log.name).read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1]
        raise RuntimeError(f"exit status {done.returncode}: {last_line}")


# --- All runs --------------------------------------------------------------------------------------------------------
def sweep(runs: list[Run], start, workers: int) -> list[Run]:
    """Keep `workers` runs going, in order, and collect their curves; return the runs that failed.

    start: `start(run) -> concurrent.futures.Future` of what `train(run)` returns.
    """
    waiting, running, failed, attempts, begun = list(runs), {}, [], Counter(), time.time()
    while waiting or running:
        while waiting and len(running) < workers:
            run = waiting.pop(0)
            running[start(run)] = run
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            run = running.pop(future)
            try:
                rows = future.result()
            except Exception as error:
                attempts[run] += 1
                again = attempts[run] < ATTEMPTS
                waiting, failed = ([run] + waiting, failed) if again else (waiting, failed + [run])
                line = one_line(getattr(error, "cause", None) or error)  # Ray wraps what the run raised
                print(f"{run}: {'failed, trying again' if again else 'FAILED'}: {line}", flush=True)
                continue
            append(run, rows)
            left = f"{len(waiting) + len(running)} runs left after {(time.time() - begun) / 60:.0f} minutes"
            print(f"{run}: return {float(rows[-1]['return_mean']):.1f}, {left}", flush=True)
    return failed


def main(args: Args):
    studies = args.studies or [study for study in STUDIES if collected(study)]
    for values, kind in ((args.env_id, "env_ids"), (args.arm, "arms")):
        known = {value: None for study in studies or STUDIES for value in STUDIES[study][kind]}
        if unknown := [value for value in values if value not in known]:
            raise SystemExit(f"sweep.py: {unknown[0]} is none of {', '.join(known)}")
    if args.workers < 0:
        raise SystemExit(f"--workers {args.workers}: must be 0 or more")
    runs = [run for study in studies for run in planned(study, args.seeds, args.env_id, args.arm)]
    if not runs:
        raise SystemExit("sweep.py: no study that is named, or has a table, has this --env-id and --arm")
    runs = missing(runs)
    if args.dry_run or not runs:
        print("\n".join(map(str, runs)) or "nothing missing")
        return
    try:
        import ray
    except ImportError:
        raise SystemExit("sweep.py: Ray is missing; pip install -r benchmark/requirements.txt")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    local = {} if args.address else dict(num_cpus=args.workers or None, include_dashboard=False)
    try:
        ray.init(address=args.address or "local", log_to_driver=False, logging_level="ERROR", **local)
    except ConnectionError as error:
        raise SystemExit(f"--address {args.address}: {one_line(error)}")
    task = ray.remote(num_cpus=1, max_retries=0)(train)
    workers = args.workers or int(ray.cluster_resources()["CPU"])
    print(f"{len(runs)} runs, {workers} at a time", flush=True)
    failed = sweep(runs, lambda run: task.remote(run).future(), workers)
    if failed:
        raise SystemExit(f"sweep.py: {len(failed)} runs failed; each one's log.txt is under {RUNS}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Args))
    except KeyboardInterrupt:
        raise SystemExit("sweep.py: interrupted; the same command goes on from the last checkpoints")
