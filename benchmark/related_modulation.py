# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "gymnasium[mujoco]==1.4.0",
#     "matplotlib==3.11.2",
#     "mujoco==4.0.0",
#     "numpy==2.4.6",
#     "requests==2.34.2",
#     "tensorboard==2.21.0",
#     "torch==2.13.0",
#     "tyro==1.0.17",
# ]
# ///
"""Measure every variant and explainer of related/modulated_ppo.py, and remake the table and the figure.

    pip install -r benchmark/requirements.txt
    python benchmark/related_modulation.py --dry-run     # what is missing
    python benchmark/related_modulation.py               # run it, then table and figure
    python benchmark/related_modulation.py --report      # only table and figure

Each finished run adds its rows to benchmark/results/related_modulation.csv at once, so that a stopped call is gone on
with by the same command. docs/related_policy_modulation.md explains what is compared.
"""

import contextlib
import csv
import functools
import io
import math
import os
import platform
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tyro

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmark" / "results" / "related_modulation.csv"
FIGURE = ROOT / "docs" / "figures" / "related_modulation_frozen_lake.png"
EXPLANATIONS = ROOT / "related" / "explanations"
SEEDS, HOPPER_SEEDS = range(1, 11), range(1, 4)
SHARES = (0.25, 0.5, 1.0)  # of the refinement's steps
LAKE = {"env_id": "frozen_lake_8x8", "evaluations": 4}
HOPPER = {"env_id": "Hopper-v4", "pretrain_steps": 51_200, "total_timesteps": 24_576, "evaluations": 4}
HOPPER |= {"num_envs": 8, "num_steps": 256, "num_minibatches": 8, "update_epochs": 8, "learning_rate": 3e-4}
HOPPER |= {"ent_coef": 0.0, "reward_scale": 0.1, "eval_episodes": 10}
QWEN = {
    "frozen_lake_8x8": EXPLANATIONS / "frozen_lake_8x8_qwen.json",
    "Hopper-v4": EXPLANATIONS / "hopper_v4_qwen.json",
}
COLUMNS = ["env_id", "variant", "explainer", "option", "seed", "step", "share", "return_mean", "overridden"]
COLUMNS += ["critical_states", "cpu_seconds", "torch"]


@dataclass
class Args:
    dry_run: bool = False
    """print what is missing and stop"""
    env_id: Literal["", "frozen_lake_8x8", "Hopper-v4"] = ""
    """only the runs of this environment"""
    report: bool = False
    """run nothing; remake the table and the figure"""


def experiments() -> dict[tuple, dict]:
    """Return the settings of each run by (env_id, variant, explainer, option, seed): all of a seed before the next."""
    lake, hopper = [("none", "-", "", {})], []
    for percent in (100, 80, 60):
        synthetic = {"explanations": "synthetic", "accuracy": percent / 100}
        lake += [(variant, f"synthetic {percent} %", "", synthetic) for variant in ("RA", "A", "R")]
        if percent == 100:
            lake.append(("random", "synthetic 100 %", "", synthetic))
            every, to_the_end = {"reward_visits": "every"}, {"override_fraction": math.inf}
            lake += [(v, "synthetic 100 %", "paid at every visit", synthetic | every) for v in ("R", "RA")]
            large = synthetic | {"reward_coef": 0.2}
            lake += [(v, "synthetic 100 %", "coefficient 0.2", large) for v in ("R", "RA")]
            lake += [(v, "synthetic 100 %", "0.2 at every visit", large | every) for v in ("R", "RA")]
            lake += [(v, "synthetic 100 %", "overridden to the end", synthetic | to_the_end) for v in ("A", "RA")]
    if QWEN["frozen_lake_8x8"].exists():
        stored = {"explanations": str(QWEN["frozen_lake_8x8"])}
        lake += [(variant, "Qwen 1.5B", "", stored) for variant in ("RA", "A", "R", "random")]
    if QWEN["Hopper-v4"].exists():
        stored = {"explanations": str(QWEN["Hopper-v4"])}
        hopper = [("none", "-", "", {})] + [
            (variant, "Qwen 1.5B", "", stored) for variant in ("RA", "A", "R", "random")
        ]
    runs = {}
    for common, seeds, arms in ((LAKE, SEEDS, lake), (HOPPER, HOPPER_SEEDS, hopper)):
        for seed in seeds:
            for variant, explainer, option, settings in arms:
                key = (common["env_id"], variant, explainer, option, seed)
                runs[key] = common | {"variant": variant, "seed": seed} | settings
    return runs


def read_results() -> list[dict]:
    if not RESULTS.exists():
        return []
    with open(RESULTS, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def key_of(row: dict) -> tuple:
    return (row["env_id"], row["variant"], row["explainer"], row["option"], int(row["seed"]))


def run(key: tuple, settings: dict, agents: Path) -> list[dict]:
    """Train in this process, in a temporary folder; runs of the same environment and seed share their first agent."""
    started, agent = time.process_time(), agents / f"{key[0]}_{key[-1]}.pt"
    if agent.exists():
        settings = settings | {"agent": str(agent)}
    with contextlib.redirect_stdout(io.StringIO()):
        progress = modulated_ppo.train(modulated_ppo.Args(**settings))
    run_dir = max(Path("runs").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    if not agent.exists():
        os.replace(run_dir / "suboptimal.pt", agent)
    about = dict(zip(COLUMNS, key)) | {"cpu_seconds": round(time.process_time() - started, 1)}
    rows, last = [], progress[-1]["step"]
    for row in progress:
        found = {"step": row["step"], "share": row["step"] / last, "return_mean": row["return_mean"]}
        found |= {"overridden": round(row["overridden"], 4), "critical_states": row["critical_states"]}
        rows.append(about | found | {"torch": torch.__version__})
    return rows


def append(rows: list[dict]):
    """Add a finished run's rows: under a temporary name first, so that the file never holds half a run."""
    RESULTS.parent.mkdir(exist_ok=True)
    temporary = RESULTS.with_name(RESULTS.name + ".tmp")
    with open(temporary, "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(read_results() + rows)
    os.replace(temporary, RESULTS)


# --- Table and figure ------------------------------------------------------------------------------------------------
def interval(values) -> tuple[float, float, float]:
    """Return the mean of the seeds and the ends of its 95 % percentile bootstrap interval (10000 resamples)."""
    values, rng = np.array(values), np.random.default_rng(0)
    means = rng.choice(values, (10_000, len(values))).mean(1)
    return values.mean(), *np.percentile(means, [2.5, 97.5])


def table(rows: list[dict]) -> str:
    """Return, in Markdown, the returns at SHARES of the refinement for each environment, variant and explainer.

    The last column is the mean over seeds of the return at the end minus that of `none` with the same first agent.
    """
    groups = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        group, share = groups[key_of(row)[:4]], float(row["share"])
        group[share][int(row["seed"])] = float(row["return_mean"])
        group["critical"][int(row["seed"])] = int(row["critical_states"])
    lines = [
        "| environment | explainer | variant | seeds | critical states | start | 25 % | 50 % | 100 % | minus none |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|---|")
    for env_id, variant, explainer, option in dict.fromkeys(key[:4] for key in experiments()):
        group, none = groups[env_id, variant, explainer, option], groups[env_id, "none", "-", ""][1.0]
        if not group:
            continue
        digits = 2 if env_id.startswith("frozen") else 0
        cells = [env_id, explainer, f"{variant}, {option}" if option else variant, str(len(group[1.0]))]
        cells.append(f"{np.mean(list(group['critical'].values())):.0f}")
        cells.append(f"{np.mean(list(group[0.0].values())):.{digits}f}")
        differences = [value - none[seed] for seed, value in group[1.0].items() if seed in none]
        for values in [*(list(group[share].values()) for share in SHARES), differences]:
            mean, low, high = interval(values)
            cells.append(f"{mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: list[dict]):
    """Draw success over the refinement's steps on the lake: mean and 95 % interval, one panel for each explainer."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("no figure without matplotlib: pip install -r benchmark/requirements.txt")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    curves = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["env_id"] == "frozen_lake_8x8" and not row["option"]:
            curves[row["explainer"], row["variant"]][int(row["step"])].append(float(row["return_mean"]))
    explainers = list(dict.fromkeys(explainer for explainer, _ in curves if explainer != "-"))
    colours = {"none": "0.4", "A": "tab:blue", "R": "tab:orange", "RA": "tab:green", "random": "tab:red"}
    figure, panels = pyplot.subplots(
        1, len(explainers), figsize=(3.4 * len(explainers), 3.2), sharey=True, squeeze=False, layout="constrained"
    )
    for panel, explainer in zip(panels[0], explainers):
        for variant, colour in colours.items():
            curve = curves.get(("-" if variant == "none" else explainer, variant))
            if curve:
                steps = sorted(curve)
                mean, low, high = np.transpose([interval(curve[step]) for step in steps])
                panel.plot(steps, mean, color=colour, label=variant)
                panel.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
        panel.set(title=explainer, xlabel="steps of the refinement", ylim=(-0.02, 1.02))
    panels[0][0].set_ylabel("success of the agent alone")
    panels[0][0].legend()
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE, dpi=120)


def main(args: Args):
    runs, done = experiments(), {key_of(row) for row in read_results()}
    runs = {key: settings for key, settings in runs.items() if args.env_id in ("", key[0])}
    missing = {key: settings for key, settings in runs.items() if key not in done}
    print(f"{len(runs)} runs, {len(missing)} missing", flush=True)
    if args.dry_run:
        for key in missing:
            print("  ".join(str(part) for part in key if part != ""))
        return
    if missing and not args.report:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # for the folders of the runs
            for number, (key, settings) in enumerate(missing.items(), 1):
                rows = run(key, settings, Path(folder))
                append(rows)
                shown = f"{number}/{len(missing)} {' '.join(map(str, key))}: {rows[-1]['return_mean']:.3g}"
                print(f"{shown}, {rows[-1]['cpu_seconds']} s", flush=True)
    rows = read_results()
    if not rows:
        raise SystemExit(f"{RESULTS.relative_to(ROOT)} holds no run yet")
    cpu = sum(float(row["cpu_seconds"]) for row in rows if float(row["share"]) == 1)
    print(
        f"\n{table(rows)}\n\n{cpu / 60:.1f} minutes of CPU time in all, torch {rows[0]['torch']}, {platform.machine()}"
    )
    draw(rows)
    print(f"{FIGURE.relative_to(ROOT)} drawn")


if __name__ == "__main__":
    args = tyro.cli(Args)
    if not (args.dry_run or args.report):
        sys.path.append(str(ROOT / "related"))
        import modulated_ppo
        import torch

        modulated_ppo.transitions = functools.cache(modulated_ppo.transitions)  # the lake is walked through once
    try:
        main(args)
    except KeyboardInterrupt:
        raise SystemExit("related_modulation.py: interrupted; the finished runs are kept, the same command goes on")
