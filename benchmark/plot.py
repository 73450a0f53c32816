"""Make the figures and tables of the documentation from the learning curves that sweep.py collected.

    pip install -r benchmark/requirements.txt
    python benchmark/plot.py                              # the figures of benchmark/results/*.csv; a minute
    python benchmark/plot.py --tables                     # prints Markdown and makes no figures
    python benchmark/plot.py --trace runs/RUN/model.pt    # as the first, with a new benchmark/results/box_trace.csv
    python benchmark/plot.py --animate runs/RUN/model.pt  # docs/figures/hopper.gif if it is a Hopper's model

An agent's return is an evaluation's mean. Over seeds: the interquartile mean and its 95 % percentile interval by
stratified bootstrap, with rliable (Agarwal et al. 2021, arXiv 2108.13264). Of up to three seeds the interquartile mean
is the mean, and the interval of so few is rough. Published curves are means: benchmark/published_curves.csv names their
sources.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

if sys.platform == "linux":
    os.environ.setdefault("MUJOCO_GL", "egl")  # needs neither a screen nor a GPU

import gymnasium as gym
import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import tyro
from PIL import Image, ImageDraw, ImageFont
from rliable import library as rly
from scipy.stats import trim_mean
from sweep import PACKAGES, RESULTS, ROOT, STUDIES

sys.path.insert(0, str(ROOT))
from camel_td3 import (
    action_box,
    default_policy_file,
    load_policy,
    load_saved,
    make_env,
    mask_action,
    mask_strength,
    model_policy,
)

FIGURES = ROOT / "docs" / "figures"
PUBLISHED = ROOT / "benchmark" / "published_curves.csv"
BOX_TRACE = RESULTS / "box_trace.csv"
REPETITIONS = 2_000  # of the bootstrap
RESET_SEED = 10_000  # the first of the scripts' evaluations
TRACE_STEPS, TRACE_EPSILONS = 200, (1.0, 0.5, 0.0)
GIF_SECONDS, GIF_FPS, GIF_COLORS = 8, 20, 48

# The palette of Okabe and Ito, which the colour-blind can tell apart.
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
# What a study also shows: another study and, of its arms, these under these names.
ALSO = {
    "main": ("expert_masking", {"expert_masking": "expert_masking"}),
    "priors": ("main", {"TD3": "no prior", "CAMEL": "hop"}),
}
SOURCES = {"td3_paper": ("TD3", "o"), "sac": ("SAC", "s"), "crossq": ("CrossQ", "^")}  # label, marker
plt.rcParams |= {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "savefig.dpi": 200}
plt.rcParams |= {"figure.constrained_layout.use": True, "legend.frameon": False}


@dataclass
class Args:
    tables: bool = False
    """print the tables as Markdown, and do nothing else"""
    trace: str = ""
    """`model.pt` of a run with a mask: follow it at three epsilons and write benchmark/results/box_trace.csv"""
    joint: int = 1
    """dimension of the action that `--trace` writes down"""
    animate: tuple[str, ...] = ()
    """`model.pt` files: draw each agent beside its bare policy, and do nothing else"""


# --- Curves over seeds -----------------------------------------------------------------------------------------------
def load_study(study: str) -> pd.DataFrame | None:
    path = RESULTS / f"{study}.csv"
    if not path.exists():
        print(f"skipped: there is no {path.relative_to(ROOT)}")
        return None
    table = pd.read_csv(path)
    if study in ALSO:
        other, names = ALSO[study]
        if (RESULTS / f"{other}.csv").exists():
            also = pd.read_csv(RESULTS / f"{other}.csv")
            also = also.assign(arm=also["arm"].map(names)).dropna(subset="arm")
            table = pd.concat([table, also[also["env_id"].isin(table["env_id"]) & also["seed"].isin(table["seed"])]])
    return table


def arms(table: pd.DataFrame, study: str) -> list[str]:
    return [arm for arm in ["no prior", "hop", *STUDIES[study]["arms"], "expert_masking"] if arm in set(table["arm"])]


def env_ids(table: pd.DataFrame, study: str) -> list[str]:
    return [env_id for env_id in STUDIES[study]["env_ids"] if env_id in set(table["env_id"])]


def curve(table: pd.DataFrame, env_id: str, arm: str):
    """Return (steps, iqm, low, high, seeds) of an arm's return: four (evaluations,) arrays and a number; or None."""
    rows = table[(table["env_id"] == env_id) & (table["arm"] == arm)]
    if rows.empty:
        return None
    returns = rows.pivot(index="seed", columns="step", values="return_mean")
    scores = {arm: returns.to_numpy()[:, None]}  # (seeds, tasks, evaluations)

    def iqm(scores):  # rliable's aggregate_iqm, for all evaluations at once
        return trim_mean(scores.reshape(-1, scores.shape[-1]), 0.25)

    np.random.seed(0)  # rliable draws from numpy's global generator, whatever its random_state
    points, intervals = rly.get_interval_estimates(scores, iqm, reps=REPETITIONS)
    return returns.columns.to_numpy(), points[arm], *intervals[arm], len(returns)


def prior_return(table: pd.DataFrame, env_id: str, arm: str) -> float:
    """Return the mean return of the arm's bare policy; nan without a mask."""
    return table[(table["env_id"] == env_id) & (table["arm"] == arm)]["prior_return"].mean()


def label(arm: str) -> str:
    return arm.replace("_", " ")


def save_figure(figure, name: str):
    FIGURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURES / name)
    plt.close(figure)
    print(f"docs/figures/{name}")


def draw_curves(ax, table: pd.DataFrame, study: str, env_id: str, priors: bool):
    """Draw each arm's return against steps, with a dashed line for its bare policy if `priors`."""
    for arm, color in zip(arms(table, study), COLORS):
        if (found := curve(table, env_id, arm)) is None:
            continue
        steps, points, low, high, _ = found
        ax.plot(steps, points, color=color, label=label(arm), linewidth=1.8)
        ax.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
        if priors and np.isfinite(alone := prior_return(table, env_id, arm)):
            ax.axhline(alone, color=color, linestyle="--", linewidth=1.2, label=f"{label(arm)}: its policy alone")
    last = table["step"].max()
    ax.set(title=env_id, xlabel="environment steps", xlim=(0, 1.03 * last))
    ax.set_xticks([0, last / 2, last], ["0", f"{last / 2000:g}k", f"{last / 1000:g}k"])


def plot_curves(study: str, sources: list[str]):
    """One panel an environment, with the published results of `sources` up to the last step."""
    if (table := load_study(study)) is None:
        return
    published = pd.read_csv(PUBLISHED)
    panels = env_ids(table, study)
    figure, axes = plt.subplots(1, len(panels), figsize=(8, 3.9), squeeze=False)
    for env_id, ax in zip(panels, axes[0]):
        draw_curves(ax, table, study, env_id, priors=True)
        for source in sources:
            name, marker = SOURCES[source]
            body = published["env"].str.split("-").str[0] == env_id.split("-")[0]
            rows = published[body & (published["algo"] == source) & (published["step"] <= table["step"].max())]
            if len(rows):
                version = "" if rows["env"].iloc[0] == env_id else f" (on {rows['env'].iloc[0].split('-')[1]})"
                style = dict(color="#555555", marker=marker, markersize=5, linewidth=0.8, fillstyle="none")
                ax.plot(rows["step"], rows["mean"], **style, label=f"published {name}{version}", clip_on=False)
    axes[0, 0].set_ylabel("return")
    entries = {}
    for ax in axes[0]:
        entries |= dict(zip(*reversed(ax.get_legend_handles_labels())))
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=3)
    save_figure(figure, f"{study}.png")


def plot_ablation():
    """One panel an environment, one row an arm: the return at the last step."""
    if (table := load_study("ablation")) is None:
        return
    panels, rows = env_ids(table, "ablation"), arms(table, "ablation")
    size = (8, 1.2 + 0.3 * len(rows))
    figure, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False, sharey=True)
    for env_id, ax in zip(panels, axes[0]):
        for y, arm in enumerate(rows):
            if (found := curve(table, env_id, arm)) is None:
                continue
            _, points, low, high, _ = found
            color = COLORS[1] if arm == "CAMEL" else COLORS[0]
            ax.plot([low[-1], high[-1]], [y, y], color=color, linewidth=2.5, alpha=0.5, solid_capstyle="butt")
            ax.plot(points[-1], y, "o", color=color)
            finals = table[(table["env_id"] == env_id) & (table["arm"] == arm) & (table["step"] == table["step"].max())]
            ax.plot(finals["return_mean"], [y] * len(finals), "|", color="#555555", markersize=7, markeredgewidth=0.8)
            if arm == "CAMEL":
                ax.axvline(points[-1], color=color, linewidth=0.8, linestyle=":")
        ax.set(title=env_id, xlabel=f"return after {table['step'].max()} steps")
        ax.grid(axis="y", linewidth=0.3)
        ax.xaxis.set_major_locator(plt.MaxNLocator(5))
    axes[0, 0].set_yticks(range(len(rows)), map(label, rows))
    axes[0, 0].invert_yaxis()
    figure.supxlabel("dot: interquartile mean; bar: its 95 % interval; ticks: seeds; dotted: CAMEL", fontsize=9)
    save_figure(figure, "ablation.png")


def plot_priors():
    """Returns against steps, one colour a prior; left without mask and noise, right the training episodes' own."""
    if (table := load_study("priors")) is None:
        return
    (env_id,) = env_ids(table, "priors")
    training = table.assign(return_mean=table["training_return"])
    figure, axes = plt.subplots(1, 2, figsize=(8, 4.1), sharey=True)
    for ax, shown, title in ((axes[0], table, "the agent alone"), (axes[1], training, "training: mask and noise")):
        draw_curves(ax, shown, "priors", env_id, priors=False)
        ax.set_title(f"{env_id}, {title}")
    axes[0].set_ylabel("return")
    handles, _ = axes[0].get_legend_handles_labels()
    names = []
    for arm in arms(table, "priors"):
        alone = prior_return(table, env_id, arm)
        names.append(f"{label(arm)} (alone: {alone:.0f})" if np.isfinite(alone) else label(arm))
    figure.legend(handles, names, loc="outside lower center", ncols=3, title="prior")
    save_figure(figure, "priors.png")


def print_tables():
    for study in STUDIES:
        if study == "expert_masking" or (table := load_study(study)) is None:
            continue
        panels, runs = env_ids(table, study), table.drop_duplicates(["env_id", "arm", "seed"])
        print(f"\n{study}: return after {table['step'].max()} steps\n")
        print(f"| | {' | '.join(f'{env_id} | its policy alone' for env_id in panels)} |")
        print("|---" * (1 + 2 * len(panels)) + "|")
        for arm in arms(table, study):
            cells = []
            for env_id in panels:
                if (found := curve(table, env_id, arm)) is None:
                    cells += ["", ""]
                    continue
                _, points, low, high, seeds = found
                alone = prior_return(table, env_id, arm)
                interval = f" [{low[-1]:.0f}, {high[-1]:.0f}], {seeds} seeds" if seeds > 1 else ", 1 seed"
                cells.append(f"{points[-1]:.0f}{interval}")
                cells.append(f"{alone:.0f}" if np.isfinite(alone) else "")
            print(f"| {label(arm)} | {' | '.join(cells)} |")
        about = {name: ", ".join(map(str, runs[name].unique())) for name in ("seed", "commit", *PACKAGES)}
        hours = runs["wall_seconds"].sum() / 3600
        print(f"\nSeeds {about.pop('seed')}; commit {about.pop('commit')}; {hours:.1f} core hours;")
        print("; ".join(f"{package} {version}" for package, version in about.items()))


# --- A trained agent beside its policy -------------------------------------------------------------------------------
def load_agent(path: str):
    """Return what a model.pt holds, its environment's id, its prior and its actor as `policy(obs, step) -> action`."""
    saved = load_saved(path)
    env = make_env(saved["env_id"])
    prior_file = Path(saved["args"]["policy_file"] or default_policy_file(saved["env_id"]))
    return saved, env, load_policy(prior_file, env), model_policy(saved["actor"])


def trace(path: str, joint: int):
    """Follow an agent without noise, under its own kind of masking, from the same reset for each epsilon."""
    saved, env, prior, agent = load_agent(path)
    args, masking = saved["args"], saved["args"]["epsilon_masking"]
    low, high = torch.from_numpy(env.action_space.low), torch.from_numpy(env.action_space.high)
    about = {"script": saved["script"], "env_id": saved["env_id"], "seed": args["seed"], "joint": joint}
    about |= {name: args[name] for name in ("mask_width", "epsilon_masking")}
    rows = []
    for epsilon in TRACE_EPSILONS:
        obs, _ = env.reset(seed=RESET_SEED)
        generator = torch.Generator().manual_seed(0)
        for step in range(TRACE_STEPS):
            proposal, action = prior(obs, step), torch.from_numpy(agent(obs, step))
            if step == 0 or masking != "episode":
                strength = mask_strength(epsilon, masking, generator, 1)
            box = action_box(torch.from_numpy(proposal), strength, low, high, args["mask_width"])
            executed = mask_action(action, box, low, high, args["mask_mapping"]).clamp(*box)
            values = dict(policy=proposal, box_low=box[0], box_high=box[1], agent=action, executed=executed)
            values = {name: round(float(value[joint]), 4) for name, value in values.items()}
            rows.append(about | {"epsilon": epsilon, "step": step} | values)
            obs, _, terminated, truncated, _ = env.step(executed.numpy())
            if terminated or truncated:
                break
    RESULTS.mkdir(exist_ok=True)
    pd.DataFrame(rows).to_csv(BOX_TRACE, index=False)
    print(BOX_TRACE.relative_to(ROOT))


def plot_trace():
    if not BOX_TRACE.exists():
        print(f"skipped: there is no {BOX_TRACE.relative_to(ROOT)}")
        return
    table = pd.read_csv(BOX_TRACE)
    epsilons = table["epsilon"].unique()
    figure, axes = plt.subplots(len(epsilons), 1, figsize=(8, 5.4), sharex=True, sharey=True)
    for ax, epsilon in zip(axes, epsilons):
        rows = table[table["epsilon"] == epsilon]
        steps = rows["step"]
        box = dict(step="mid", color=COLORS[5], alpha=0.35, linewidth=0, label="box")
        ax.fill_between(steps, rows["box_low"], rows["box_high"], **box)
        ax.plot(steps, rows["policy"], color=COLORS[1], linewidth=1.2, linestyle="--", label="policy's action")
        ax.plot(steps, rows["executed"], color="#000000", linewidth=1.4, label="executed action")
        ax.set_ylabel(f"epsilon {epsilon:g}")
        if len(rows) < TRACE_STEPS:
            ax.annotate("episode ends", (steps.iloc[-1], 0), xytext=(4, 0), textcoords="offset points", va="center")
    about = table.iloc[0]
    masking = f"mask width {about['mask_width']:g}, {about['epsilon_masking']} masking"
    axes[0].set_title(f"{about['env_id']}, action {about['joint']}, {masking}")
    axes[-1].set(xlabel="environment steps since the reset", xlim=(0, TRACE_STEPS))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    save_figure(figure, "box_trace.png")


def frames(env_id: str, policy, title: str) -> list[Image.Image]:
    """Return an episode's pictures at its own speed, with its return so far; the last one stays if it ends early."""
    env = gym.make(env_id, render_mode="rgb_array", camera_name="track", width=320, height=240)
    obs, _ = env.reset(seed=RESET_SEED)
    font, pictures, total, step, done = ImageFont.load_default(16), [], 0.0, 0, False
    for i in range(GIF_SECONDS * GIF_FPS):
        while not done and step * env.unwrapped.dt < i / GIF_FPS:
            obs, reward, terminated, truncated, _ = env.step(policy(obs, step))
            total, step, done = total + reward, step + 1, terminated or truncated
        picture = Image.fromarray(env.render())
        ending = " (fell)" if done and terminated else ""
        ImageDraw.Draw(picture).text(
            (8, 6), f"{title}: return {total:.0f}{ending}", "white", font, stroke_width=2, stroke_fill="black"
        )
        pictures.append(picture)
    env.close()
    return pictures


def animate(path: str):
    saved, _, prior, agent = load_agent(path)
    pairs = zip(frames(saved["env_id"], prior, "policy"), frames(saved["env_id"], agent, "agent"))
    pictures = []
    for left, right in pairs:
        both = Image.new("RGB", (left.width + right.width, left.height))
        both.paste(left, (0, 0))
        both.paste(right, (left.width, 0))
        pictures.append(both)
    # One palette for all pictures, from the first one's, and no dithering: what does not move then costs nothing.
    palette = pictures[0].quantize(GIF_COLORS)
    pictures = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]
    name = saved["env_id"].split("-")[0].lower() + ".gif"
    FIGURES.mkdir(parents=True, exist_ok=True)
    options = dict(save_all=True, append_images=pictures[1:], duration=1000 // GIF_FPS, loop=0, optimize=True)
    pictures[0].save(FIGURES / name, **options)
    print(f"docs/figures/{name}: {(FIGURES / name).stat().st_size / 1e6:.1f} MB")


def main(args: Args):
    if args.tables:
        print_tables()
    elif args.animate:
        for path in args.animate:
            animate(path)
    else:
        if args.trace:
            trace(args.trace, args.joint)
        plot_curves("main", ["td3_paper", "sac", "crossq"])
        plot_curves("long", ["td3_paper", "sac", "crossq"])
        plot_curves("main_sac", ["sac", "crossq"])
        plot_ablation()
        plot_priors()
        plot_trace()


if __name__ == "__main__":
    main(tyro.cli(Args))
