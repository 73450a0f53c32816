"""Measure the scripts in related/ that use a language model's answers as a prior, and make their tables and figures.

    python benchmark/related_priors.py --dry-run       # list the missing runs
    python benchmark/related_priors.py                 # make them; about 3 CPU seconds each
    python benchmark/related_priors.py --table         # print the tables of docs/related_llm_priors.md
    python benchmark/related_priors.py --plot          # its figures (pip install matplotlib==3.11.2)

Each run appends its evaluations to benchmark/results/related_priors.csv when it ends, so it can be stopped at any time
and goes on with what is missing. The arms that the claims need most come first, all arms of a seed before the next
seed.
"""

import contextlib
import csv
import functools
import io
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "related"))  # the scripts measured here
import cql_prior
import dqn_prior
import make_prior
import ppo_prior
import text_kitchen

RESULTS = ROOT / "benchmark" / "results" / "related_priors.csv"
FIGURES = ROOT / "docs" / "figures"
PRIORS = ROOT / "related" / "priors"
COLUMNS = ["script", "env_id", "arm", "k", "dataset_size", "seed", "step", "return", "cpu_seconds"]
STRONG, WEAK, SYNTHETIC = "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b", "synthetic-0.6"
KS = [1, 3, 5, 10, 20]
MAIN_K = {"kitchen": 20, "frozen_lake_8x8": 5, "frozen_lake_4x4": 10}
SIZES = [100, 250, 1000, 4000]
OFFICIAL = {"prior": "none", "exploration": "epsilon", "epsilon_start": 0.2, "epsilon_end": 0.2}
DECAY = {"prior": "none", "exploration": "epsilon"}


transitions = functools.cache(text_kitchen.transitions)


@dataclass
class Args:
    dry_run: bool = False
    """list the missing runs, make none"""
    table: bool = False
    """print the tables of what was measured, make no runs"""
    plot: bool = False
    """draw the figures of what was measured, make no runs"""
    seeds: int = 10
    """seeds 1 to this"""
    scripts: tuple[str, ...] = ("prior", "ceiling", "dqn", "cql", "ppo")
    """only runs of these"""


@dataclass(frozen=True)
class Run:
    script: str  # dqn, cql, ppo; prior: the candidates alone; ceiling: the best policy that the candidates allow
    env_id: str
    arm: str
    k: int = 0  # 0: no prior
    dataset_size: int = 0  # of cql
    model: str = STRONG  # whose answers; not of the arms without a prior
    eval_model: str = ""  # whose answers in the evaluation, if others

    def key(self, seed: int) -> tuple:
        return self.script, self.env_id, self.arm, str(self.k), str(self.dataset_size), str(seed)

    def files(self) -> list[Path]:
        models = [self.model, self.eval_model or self.model] if self.k else []
        return [PRIORS / f"{self.env_id}__{model}.jsonl" for model in models]

    def make(self, seed: int) -> list[tuple[int, float]]:
        """Return (step, return) of the evaluations."""
        settings = {"env_id": self.env_id, "seed": seed}
        if self.k:
            settings |= {"num_proposals": self.k, "prior_file": str(self.files()[0])}
            settings |= {"eval_prior_file": str(self.files()[1])} if self.eval_model else {}
        else:
            settings["prior"] = "none"
        if self.script == "prior":
            candidates = dqn_prior.load_prior(self.files()[0], self.k, seed)
            policy = dqn_prior.candidate_policy(candidates, seed)
            return [(0, dqn_prior.evaluate(dqn_prior.text_env(self.env_id), policy, episodes=100))]
        if self.script == "ceiling":
            candidates, allowed = dqn_prior.load_prior(self.files()[0], self.k, seed), {}
            for text, outcomes in transitions(self.env_id).items():
                counts = candidates(text, [outcome[0] for outcome in outcomes])
                allowed[text] = [outcome for outcome, count in zip(outcomes, counts, strict=True) if count]
            q = text_kitchen.value_iteration(allowed, gamma=1.0, sweeps=text_kitchen.HORIZON[self.env_id])
            return [(0, float(q[next(iter(q))].max()))]
        if self.script == "dqn":
            settings |= {
                "DQN": OFFICIAL | {"eval_episodes": 1},
                "DQN, decaying epsilon": DECAY | {"eval_episodes": 1},
            }.get(self.arm, {})
            return dqn_prior.train(dqn_prior.Args(**settings))[0]
        if self.script == "cql":
            settings |= {"dataset_size": self.dataset_size, "algorithm": "bc" if self.arm == "BC" else "cql"}
            settings["eval_frequency"] = 1500
            return cql_prior.train(cql_prior.Args(**settings))[0]
        return ppo_prior.train(ppo_prior.Args(**settings))[0]


def all_runs() -> list[list[Run]]:
    """The runs of a seed in two parts: those that the claims need most, and the rest."""
    first, rest = [], []
    for env_id in text_kitchen.HORIZON:
        for script in ("prior", "ceiling"):
            first += [Run(script, env_id, model, k, model=model) for model in (STRONG, WEAK, SYNTHETIC) for k in KS]
    for env_id, size in (("kitchen", 1000), ("frozen_lake_8x8", 250), ("kitchen", 250)):
        first += [Run("cql", env_id, "BC", 0, size), Run("cql", env_id, "CQL", 0, size)]
        first += [Run("cql", env_id, "CQL-Prior", MAIN_K[env_id], size)]
    first += [Run("cql", "kitchen", "CQL-Prior, synthetic", 5, 1000, model=SYNTHETIC)]
    for env_id in ("kitchen", "frozen_lake_8x8"):
        first += [Run("dqn", env_id, "DQN"), Run("dqn", env_id, "DQN, decaying epsilon")]
        first += [Run("dqn", env_id, "DQN-Prior", MAIN_K[env_id])]
    first += [Run("dqn", "kitchen", "DQN-Prior, synthetic", 5, model=SYNTHETIC)]
    first += [Run("ppo", "frozen_lake_8x8", "PPO"), Run("ppo", "frozen_lake_8x8", "PPO-Prior", 5)]
    first += [Run("ppo", "frozen_lake_8x8", "PPO-Prior", 1)]

    rest += [Run("dqn", "frozen_lake_8x8", "DQN-Prior", k) for k in KS if k != 5]
    rest += [Run("cql", "frozen_lake_8x8", "CQL-Prior", k, 250) for k in KS if k != 5]
    for env_id in ("kitchen", "frozen_lake_4x4"):
        rest += [Run("dqn", env_id, "DQN-Prior, 0.5B", MAIN_K[env_id], model=WEAK)]
        rest += [Run("dqn", env_id, "DQN-Prior, 1.5B then 0.5B", MAIN_K[env_id], eval_model=WEAK)]
    rest += [Run("dqn", "frozen_lake_4x4", "DQN"), Run("dqn", "frozen_lake_4x4", "DQN, decaying epsilon")]
    rest += [Run("dqn", "frozen_lake_4x4", "DQN-Prior", MAIN_K["frozen_lake_4x4"])]
    for env_id, size in (("frozen_lake_8x8", 1000), ("kitchen", 100), ("kitchen", 4000)):
        rest += [Run("cql", env_id, "BC", 0, size), Run("cql", env_id, "CQL", 0, size)]
        rest += [Run("cql", env_id, "CQL-Prior", MAIN_K[env_id], size)]
    return [first, rest]


def load() -> list[dict]:
    if not RESULTS.exists():
        return []
    with open(RESULTS, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def measure(args: Args):
    done = {tuple(row[name] for name in COLUMNS[:6]) for row in load()}
    wanted = [(run, seed) for part in all_runs() for seed in range(1, args.seeds + 1) for run in part]
    wanted = [(run, seed) for run, seed in wanted if run.script in args.scripts]
    missing = [(run, seed) for run, seed in wanted if run.key(seed) not in done]
    print(f"{len(wanted) - len(missing)} of {len(wanted)} runs are done")
    for run, seed in missing:
        name = " ".join(part for part in run.key(seed) if part != "0")
        if absent := [file for file in run.files() if not file.exists()]:
            print(f"{name}: skipped, there is no {absent[0].name}")
            continue
        if args.dry_run:
            print(name)
            continue
        started = time.process_time()
        with contextlib.redirect_stdout(io.StringIO()):
            evaluations = run.make(seed)
        seconds = time.process_time() - started
        print(f"{name}: {evaluations[-1][1]:.3f}, {seconds:.1f} CPU seconds", flush=True)
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        if not RESULTS.exists():
            table.writerow(COLUMNS)
        for step, value in evaluations:
            table.writerow([*run.key(seed), step, f"{value:.6g}", f"{seconds:.2f}"])
        with open(RESULTS, "a", encoding="utf-8") as file:  # in one write, so that a run is there or not
            file.write(text.getvalue())


# --- Tables and figures ----------------------------------------------------------------------------------------------
def interval(values: list[float]) -> tuple[float, float, float]:
    """Return the mean and its 95 % bootstrap interval (2000 resamples of the seeds)."""
    values = np.array(values)
    resamples = np.random.default_rng(0).choice(values, (2000, len(values))).mean(1)
    return values.mean(), *np.percentile(resamples, [2.5, 97.5])


def final_and_mean(rows: list[dict], run: Run) -> tuple[list[float], list[float]]:
    """Return one value a seed: the last evaluation, and the mean of all (the area under the learning curve)."""
    seeds = {}
    for row in rows:
        if tuple(row[name] for name in COLUMNS[:5]) == run.key(0)[:5]:
            seeds.setdefault(row["seed"], []).append((int(row["step"]), float(row["return"])))
    curves = [[value for _, value in sorted(curve)] for curve in seeds.values()]
    return [curve[-1] for curve in curves], [float(np.mean(curve)) for curve in curves]


def cell(values: list[float]) -> str:
    mean, low, high = interval(values)
    return f"{mean:.2f} [{low:.2f}, {high:.2f}]"


def print_answers():
    """Print, for each file of answers, the mean share of optimal ones and the share that named an action."""
    print("\n| environment | answers of | optimal | named |\n|---|---|---|---|")
    for path in sorted(PRIORS.glob("*.jsonl")):
        header, *states = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        table, optimal, named = transitions(header["env_id"]), [], []
        q = text_kitchen.value_iteration(table)
        for state in states:
            names, values = [outcome[0] for outcome in table[state["text"]]], q[state["text"]]
            best = {name for name, value in zip(names, values, strict=True) if np.isclose(value, values.max())}
            optimal.append(np.mean([action in best for action in state["actions"]]))
            for answer in state.get("answers", []):
                named.append(make_prior.map_answer(answer, names, "drop", random.Random(0)) is not None)
        share = f"{np.mean(named):.2f}" if named else ""
        print(f"| `{header['env_id']}` | {header['model']} | {np.mean(optimal):.2f} | {share} |")


def print_tables():
    rows = load()
    for script, title in (("prior", "Candidates alone"), ("ceiling", "Best policy in the candidates")):
        columns = " | ".join(f"k = {k}" for k in KS)
        print(f"\n{title}\n\n| environment | answers of | seeds | {columns} |\n|---|---|---|{'---|' * len(KS)}")
        for env_id in text_kitchen.HORIZON:
            for model in (STRONG, WEAK, SYNTHETIC):
                samples = [final_and_mean(rows, Run(script, env_id, model, k))[0] for k in KS]
                if all(samples):
                    print(f"| `{env_id}` | {model} | {len(samples[0])} | {' | '.join(map(cell, samples))} |")
    for script, title in (("dqn", "DQN"), ("cql", "CQL"), ("ppo", "PPO")):
        print(f"\n{title}\n\n| environment | arm | k | data | seeds | last evaluation | mean of all evaluations |")
        print("|---|---|---|---|---|---|---|")
        for run in sorted(
            (run for part in all_runs() for run in part if run.script == script), key=lambda run: run.env_id
        ):
            last, mean = final_and_mean(rows, run)
            if last:
                of_run = [run.env_id, run.arm, run.k or "", run.dataset_size or "", len(last)]
                of_run += [cell(last), cell(mean) if script in ("dqn", "ppo") else ""]
                print("| " + " | ".join(map(str, of_run)) + " |")


def plot():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    # The palette of Okabe and Ito, which the colour-blind can tell apart.
    colors = plt.cycler(color=["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"])
    plt.rcParams["axes.prop_cycle"] = colors
    rows = load()

    def band(axis, xs, samples, label):
        points = [(x, *interval(values)) for x, values in zip(xs, samples, strict=True) if values]
        if points:
            x, mean, low, high = np.array(points).T
            axis.plot(x, mean, marker="o", label=label)
            axis.fill_between(x, low, high, alpha=0.2)

    def learning_curve(axis, run, label):
        steps = {}
        for row in rows:
            if tuple(row[name] for name in COLUMNS[:5]) == run.key(0)[:5]:
                steps.setdefault(int(row["step"]), []).append(float(row["return"]))
        band(axis, sorted(steps), [steps[step] for step in sorted(steps)], label)

    def save(figure, axes, name, *x_labels):
        for axis, x_label in zip(axes, x_labels * len(axes), strict=False):
            axis.set_xlabel(x_label)
            axis.grid(alpha=0.3)
        axes[0].set_ylabel("return")
        axes[-1].legend(fontsize=8)
        figure.tight_layout()
        figure.savefig(FIGURES / f"related_priors_{name}.png", dpi=110)

    FIGURES.mkdir(exist_ok=True)
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2))
    for axis, env_id in zip(axes, ("kitchen", "frozen_lake_8x8"), strict=True):
        axis.set_title(env_id)
        for arm, k in (("DQN", 0), ("DQN, decaying epsilon", 0), ("DQN-Prior", MAIN_K[env_id])):
            learning_curve(axis, Run("dqn", env_id, arm, k), arm)
    save(figure, axes, "dqn", "episode")

    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2))
    for arm, k in (("BC", 0), ("CQL", 0), ("CQL-Prior", 20)):
        samples = [final_and_mean(rows, Run("cql", "kitchen", arm, k, size))[0] for size in SIZES]
        band(axes[0], SIZES, samples, arm)
    axes[0].set_xscale("log")
    axes[0].set_title("kitchen")
    axes[0].legend(fontsize=8)
    curves = {"DQN-Prior": ("dqn", "DQN-Prior", 0), "candidates alone": ("prior", STRONG, 0)}
    curves["best policy in the candidates"] = ("ceiling", STRONG, 0)
    curves = {
        label: [final_and_mean(rows, Run(script, "frozen_lake_8x8", arm, k, size))[0] for k in KS]
        for label, (script, arm, size) in curves.items()
    }
    for label, samples in curves.items():
        band(axes[1], KS, samples, label)
    axes[1].set_title("frozen_lake_8x8")
    save(figure, axes, "cql_and_k", "transitions in the data set", "candidates k")

    figure, axis = plt.subplots(figsize=(5, 3.2))
    axis.set_title("frozen_lake_8x8")
    learning_curve(axis, Run("ppo", "frozen_lake_8x8", "PPO"), "PPO")
    for arm in ("PPO-Prior", "PPO-Prior, synthetic"):
        for k in (1, 5):
            learning_curve(axis, Run("ppo", "frozen_lake_8x8", arm, k), f"{arm}, k = {k}")
    save(figure, [axis], "ppo", "environment step")


if __name__ == "__main__":
    args = tyro.cli(Args)
    if args.table:
        print_answers()
        print_tables()
    elif args.plot:
        plot()
    else:
        measure(args)
