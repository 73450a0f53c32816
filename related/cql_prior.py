# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "gymnasium[mujoco]==1.4.0",
#     "numpy==2.4.6",
#     "torch==2.13.0",
#     "tyro==1.0.17",
# ]
# ///
"""CQL-Prior: offline Q-learning that chooses only among the k actions that a frozen language model proposed for a state.

After arXiv 2410.07927 (Efficient Reinforcement Learning with Large Language Model Priors) and its published code. The
script first collects its data set, from a noisy expert and a uniform policy; the model's answers are stored in a file,
so nobody is asked. `# PRIOR` marks what turns CQL into CQL-Prior.

    python related/cql_prior.py                                        # 8x8 lake: candidates alone 0.000, return 1.000
    python related/cql_prior.py --env-id kitchen --num-proposals 20    # candidates alone 0.128, return 0.150
    python related/cql_prior.py --env-id kitchen --algorithm bc        # behaviour cloning: return 1.385

Seed 1, under 45 seconds each on a busy core of a server, torch 2.13.0. Other seeds: docs/related_llm_priors.md.
"""

import json
import re
import time
import zlib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from text_kitchen import text_env, transitions, value_iteration
from torch import nn


@dataclass
class Args:
    env_id: str = "frozen_lake_8x8"
    """environment of text_kitchen.py"""
    seed: int = 1
    """seed of the network, the data set, the batches and the choice of the proposals"""
    prior: Literal["file", "none"] = "file"
    """none is plain CQL: every admissible action is a candidate, once"""
    prior_file: str = ""
    """stored answers of make_prior.py; empty: `priors/<env_id>__qwen2.5-coder-1.5b.jsonl` beside this script"""
    eval_prior_file: str = ""
    """other stored answers, for the evaluations alone; empty: those of the training"""
    num_proposals: int = 5
    """k: how many of the answers stored for a state are its candidates; repeats count"""
    algorithm: Literal["cql", "bc"] = "cql"
    """bc is behaviour cloning: cross-entropy on the actions of the data set, no prior"""

    dataset_size: int = 1000
    """transitions in the data set"""
    expert_episodes: float = 0.75
    """share of the data set's episodes that the noisy expert plays; the uniform policy plays the others"""
    expert_accuracy: float = 0.7
    """probability with which the noisy expert takes an optimal action, else a uniform one"""

    gradient_steps: int = 1500
    """updates"""
    learning_rate: float = 1e-3
    """step size of AdamW"""
    gamma: float = 0.95
    """discount factor"""
    tau: float = 0.02
    """step of the target network towards the network, at each update"""
    batch_size: int = 128
    """transitions in an update"""
    cql_coef: float = 20.0
    """weight of the conservative penalty"""
    eval_frequency: int = 500
    """updates between evaluations: one greedy episode each, since the environments are deterministic"""


# --- The prior, the text encoder, evaluation: the same text in the three scripts -------------------------------------
def load_prior(path: Path, num_proposals: int, seed: int) -> Callable[[str, list[str]], np.ndarray]:
    """Return `candidates(text, names) -> (len(names),) array`: how often each admissible action was proposed.

    The proposals of a text are `num_proposals` of its stored answers, drawn without replacement by the seed, and stay
    the same in the whole run. Raises SystemExit for a file that does not fit, and for a text that it does not have.
    """
    try:
        header, *rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        answers = {row["text"]: row["actions"] for row in rows}
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(f"{path}: no file of answers as make_prior.py writes it ({type(error).__name__}: {error})")
    if not 1 <= num_proposals <= header["num_answers"]:
        raise SystemExit(f"--num-proposals must be from 1 to {header['num_answers']}, the answers in {path}")
    cache = {}

    def candidates(text: str, names: list[str]) -> np.ndarray:
        if text not in cache:
            if not answers.get(text):
                raise SystemExit(f"{path}: no answer for the state {text!r}; ask for it with make_prior.py")
            rng = np.random.default_rng([seed, zlib.crc32(text.encode())])
            drawn = rng.permutation(answers[text])[:num_proposals].tolist()
            if unknown := set(drawn) - set(names):
                raise SystemExit(f"{path}: {unknown.pop()!r} is not admissible in the state {text!r}")
            cache[text] = np.array([drawn.count(name) for name in names], np.float32)
        return cache[text]

    return candidates


def make_candidates(args, path: str) -> Callable[[str, list[str]], np.ndarray]:
    """Return `candidates` of `--prior-file`, or of `--prior none`: every admissible action once."""
    if args.prior == "none":
        return lambda text, names: np.ones(len(names), np.float32)
    default = Path(__file__).parent / "priors" / f"{args.env_id}__qwen2.5-coder-1.5b.jsonl"
    return load_prior(Path(path) if path else default, args.num_proposals, args.seed)


def candidate_policy(candidates: Callable, seed: int) -> Callable[[str, list[str]], int]:
    """Return the policy that draws one of the candidates, repeats weighing as often as they occur: the prior alone."""
    rng = np.random.default_rng(seed)

    def policy(text: str, names: list[str]) -> int:
        counts = candidates(text, names)
        return int(rng.choice(len(names), p=counts / counts.sum()))

    return policy


def encode(text: str, size: int) -> torch.Tensor:
    """Return the (size,) hashed counts of a text's words and pairs of neighbouring words. Nothing in it is learned."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    features = torch.zeros(size)
    for token in words + [f"{a} {b}" for a, b in pairwise(words)]:
        features[zlib.crc32(token.encode()) % size] += 1
    return features


class Texts:
    """Numbers texts as they are first met, and keeps their features: (number of texts, size)."""

    def __init__(self, size: int = 256):
        self.numbers, self.features = {}, torch.zeros(0, size)

    def __call__(self, text: str) -> int:
        if text not in self.numbers:
            self.numbers[text] = len(self.numbers)
            self.features = torch.cat([self.features, encode(text, self.features.shape[1])[None]])
        return self.numbers[text]


def evaluate(env: gym.Env, policy: Callable[[str, list[str]], int], episodes: int) -> float:
    """Return the mean undiscounted return of `policy(text, names) -> action` on reset seeds 10000, 10001, ..."""
    total = 0.0
    for i in range(episodes):
        text, info = env.reset(seed=10_000 + i)
        done = False
        while not done:
            text, reward, terminated, truncated, info = env.step(policy(text, info["actions"]))
            total, done = total + reward, terminated or truncated
    return total / episodes


# --- Data set, network, losses ---------------------------------------------------------------------------------------
def collect(args: Args, env: gym.Env) -> tuple[list[tuple], float]:
    """Return `dataset_size` rows (text, names, action, reward, next text, next names, terminated) and the mean return
    of the episodes that they hold whole.
    """
    rng = np.random.default_rng(args.seed)
    optimal = {
        text: np.flatnonzero(np.isclose(q, q.max())) for text, q in value_iteration(transitions(args.env_id)).items()
    }
    rows, returns = [], []
    while len(rows) < args.dataset_size:
        accuracy = args.expert_accuracy if rng.random() < args.expert_episodes else 0.0
        text, info = env.reset(seed=args.seed)
        done, total = False, 0.0
        while not done:
            names = info["actions"]
            action = rng.choice(optimal[text]) if rng.random() < accuracy else rng.integers(len(names))
            next_text, reward, terminated, truncated, info = env.step(action)
            rows.append((text, names, action, reward, next_text, info["actions"], terminated))
            text, done, total = next_text, terminated or truncated, total + reward
        if len(rows) <= args.dataset_size:
            returns.append(total)
    return rows[: args.dataset_size], float(np.mean(returns)) if returns else float("nan")


def make_network(num_outputs: int, obs_dim: int = 256, hidden: int = 64) -> nn.Sequential:
    layers = [nn.Linear(obs_dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden, num_outputs))


def best_candidate(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the (...,) largest of the (..., num_actions) values whose action was proposed."""
    return values.masked_fill(counts == 0, -torch.inf).max(-1).values


def conservative_penalty(values: torch.Tensor, counts: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """Return the mean of log(sum over the distinct candidates of exp Q) - Q(data).

    values, counts: (batch, num_actions). action: (batch,). The action of the data need not be a candidate.
    """
    soft_maximum = torch.logsumexp(values.masked_fill(counts == 0, -torch.inf), 1)
    return (soft_maximum - values.gather(1, action[:, None]).squeeze(1)).mean()


# --- Training --------------------------------------------------------------------------------------------------------
def train(args: Args) -> tuple[list[tuple[int, float]], nn.Module]:
    """Collect, train, print, and return (updates, return) of each evaluation, and the network."""
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    env = text_env(args.env_id)
    num_actions = int(env.action_space.n)
    if args.algorithm == "bc":
        args.prior = "none"
    candidates = make_candidates(args, args.prior_file)  # PRIOR
    eval_candidates = make_candidates(args, args.eval_prior_file or args.prior_file)  # PRIOR
    rows, data_return = collect(args, env)
    print(f"return of the data set's episodes: {data_return:.3f}")
    if args.prior == "file":
        prior_return = evaluate(env, candidate_policy(eval_candidates, args.seed), episodes=100)
        print(f"return of the candidates alone: {prior_return:.3f}", flush=True)

    texts = Texts()
    text = torch.tensor([texts(row[0]) for row in rows])
    next_text = torch.tensor([texts(row[4]) for row in rows])
    action = torch.tensor([int(row[2]) for row in rows])
    reward, terminated = (torch.tensor([float(row[i]) for row in rows]) for i in (3, 6))
    # A terminal state has no answers, and its value is not used.
    counts = np.stack([candidates(row[0], row[1]) for row in rows])  # PRIOR
    next_counts = np.stack([np.ones(num_actions) if row[6] else candidates(row[4], row[5]) for row in rows])  # PRIOR
    counts, next_counts = torch.from_numpy(counts).float(), torch.from_numpy(next_counts).float()

    network = make_network(num_actions)  # Q-values, or with behaviour cloning logits
    target_network = deepcopy(network).requires_grad_(False)
    parameters, target_parameters = list(network.parameters()), list(target_network.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=args.learning_rate, fused=True)

    def greedy(text: str, names: list[str]) -> int:
        number = texts(text)  # first, since it may add a row
        with torch.inference_mode():
            values = network(texts.features[number]).numpy()
        return int(np.where(eval_candidates(text, names) > 0, values, -np.inf).argmax())  # PRIOR

    evaluations, started = [], time.time()
    for step in range(1, args.gradient_steps + 1):
        b = torch.randint(len(rows), (args.batch_size,), generator=generator)
        values = network(texts.features[text[b]])
        if args.algorithm == "bc":
            loss = nn.functional.cross_entropy(values, action[b])
        else:
            with torch.no_grad():
                next_value = best_candidate(target_network(texts.features[next_text[b]]), next_counts[b])  # PRIOR
                target = reward[b] + args.gamma * (1 - terminated[b]) * next_value
            td_loss = 0.5 * (values.gather(1, action[b, None]).squeeze(1) - target).square().sum()
            loss = td_loss + args.cql_coef * conservative_penalty(values, counts[b], action[b])  # PRIOR
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(target_parameters, parameters, args.tau)

        if step % args.eval_frequency == 0 or step == args.gradient_steps:
            evaluations.append((step, evaluate(env, greedy, episodes=1)))
            seconds = time.time() - started
            print(f"update {step}: return {evaluations[-1][1]:.3f}, {seconds:.0f} s", flush=True)

    print(f"return {evaluations[-1][1]:.3f} at the end")
    return evaluations, network


if __name__ == "__main__":
    train(tyro.cli(Args))
