# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "gymnasium[mujoco]==1.4.0",
#     "numpy==2.4.6",
#     "torch==2.13.0",
#     "tyro==1.0.17",
# ]
# ///
"""DQN-Prior: DQN that chooses only among the k actions that a frozen language model proposed for a state.

After arXiv 2410.07927 (Efficient Reinforcement Learning with Large Language Model Priors) and its published code. The
model's answers are stored in a file, so nobody is asked in training. `# PRIOR` marks what turns DQN into DQN-Prior.

    python related/dqn_prior.py                                        # 8x8 lake: candidates alone 0.000, return 1.000
    python related/dqn_prior.py --prior none --exploration epsilon     # plain DQN: return 0.000
    python related/dqn_prior.py --env-id kitchen --num-proposals 20    # candidates alone 0.128, return 0.696

Seed 1, under 30 seconds each on a busy core of a server, torch 2.13.0. Other seeds: docs/related_llm_priors.md.
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
from text_kitchen import text_env
from torch import nn


@dataclass
class Args:
    env_id: str = "frozen_lake_8x8"
    """environment of text_kitchen.py"""
    seed: int = 1
    """seed of the network, the exploration, the batches and the choice of the proposals"""
    prior: Literal["file", "none"] = "file"
    """none is plain DQN: every admissible action is a candidate, once"""
    prior_file: str = ""
    """stored answers of make_prior.py; empty: `priors/<env_id>__qwen2.5-coder-1.5b.jsonl` beside this script"""
    eval_prior_file: str = ""
    """other stored answers, for the evaluations alone; empty: those of the training"""
    num_proposals: int = 5
    """k: how many of the answers stored for a state are its candidates; repeats count"""

    episodes: int = 150
    """training episodes"""
    learning_rate: float = 1e-3
    """step size of AdamW"""
    gamma: float = 0.95
    """discount factor"""
    tau: float = 0.02
    """step of the target network towards the network, at each update"""
    batch_size: int = 64
    """transitions in an update"""
    buffer_size: int = 4000
    """transitions kept"""
    train_frequency: int = 5
    """episodes between trainings"""
    gradient_steps: int = 40
    """updates in a training"""
    exploration: Literal["posterior", "epsilon"] = "posterior"
    """posterior: draw from the candidates in proportion to exp(inverse_temperature * Q); epsilon: epsilon-greedy"""
    inverse_temperature: float = 30.0
    """of posterior exploration"""
    epsilon_start: float = 1.0
    """epsilon in the first episode, of epsilon-greedy exploration"""
    epsilon_end: float = 0.05
    """epsilon at the end of its decay"""
    epsilon_fraction: float = 0.5
    """fraction of the episodes over which epsilon goes in a straight line from its start to its end"""
    eval_frequency: int = 30
    """episodes between evaluations; with posterior exploration actions are drawn there too, else greedy"""
    eval_episodes: int = 10
    """episodes in an evaluation"""


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


# --- Network and buffer ----------------------------------------------------------------------------------------------
def make_network(num_outputs: int, obs_dim: int = 256, hidden: int = 64) -> nn.Sequential:
    layers = [nn.Linear(obs_dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden, num_outputs))


def best_candidate(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the (...,) largest of the (..., num_actions) values whose action was proposed."""
    return values.masked_fill(counts == 0, -torch.inf).max(-1).values


class ReplayBuffer:
    """The last `capacity` transitions: text, action, reward, next text, terminated, counts of the next candidates."""

    def __init__(self, capacity: int, num_actions: int):
        self.sizes = [1, 1, 1, 1, 1, num_actions]
        self.rows = torch.zeros(capacity, sum(self.sizes))
        self.count = 0

    def __len__(self):
        return min(self.count, len(self.rows))

    def add(self, *values):
        self.rows[self.count % len(self.rows)] = torch.from_numpy(np.hstack(values).astype(np.float32))
        self.count += 1

    def sample(self, batch_size: int, generator: torch.Generator):
        """Return five (batch_size,) columns and the (batch_size, num_actions) counts."""
        indices = torch.randint(len(self), (batch_size,), generator=generator)
        *columns, counts = self.rows[indices].split(self.sizes, 1)
        return *(column.squeeze(1) for column in columns), counts


# --- Training --------------------------------------------------------------------------------------------------------
def train(args: Args) -> tuple[list[tuple[int, float]], nn.Module]:
    """Train, print, and return (episode, mean return) of each evaluation, and the network."""
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    generator, rng = torch.Generator().manual_seed(args.seed), np.random.default_rng(args.seed)
    env, eval_env = text_env(args.env_id), text_env(args.env_id)
    num_actions = int(env.action_space.n)
    candidates = make_candidates(args, args.prior_file)  # PRIOR
    eval_candidates = make_candidates(args, args.eval_prior_file or args.prior_file)  # PRIOR
    q_network = make_network(num_actions)
    target_network = deepcopy(q_network).requires_grad_(False)
    parameters, target_parameters = list(q_network.parameters()), list(target_network.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=args.learning_rate, fused=True)
    buffer, texts = ReplayBuffer(args.buffer_size, num_actions), Texts()
    q_cache = {}  # the network changes only every few episodes

    def q_values(text: str) -> np.ndarray:
        if text not in q_cache:
            number = texts(text)  # first, since it may add a row
            with torch.inference_mode():
                q_cache[text] = q_network(texts.features[number]).numpy()
        return q_cache[text]

    def posterior(text: str, counts: np.ndarray, rng: np.random.Generator) -> int:
        """Draw from the candidates, each in proportion to exp(inverse_temperature * Q); repeats count."""
        log_counts = np.log(np.where(counts > 0, counts, np.float32(1e-30)))
        logits = args.inverse_temperature * q_values(text) + log_counts
        return int((logits + rng.gumbel(size=num_actions)).argmax())  # the Gumbel noise makes argmax a draw

    def greedy(text: str, counts: np.ndarray) -> int:
        return int(np.where(counts > 0, q_values(text), -np.inf).argmax())

    def agent(text: str, names: list[str]) -> int:
        counts = eval_candidates(text, names)
        return posterior(text, counts, eval_rng) if args.exploration == "posterior" else greedy(text, counts)

    eval_rng = np.random.default_rng(args.seed)
    prior_return = evaluate(eval_env, candidate_policy(eval_candidates, args.seed), episodes=100)
    print(f"return of the candidates alone: {prior_return:.3f}", flush=True)
    evaluations, started = [], time.time()

    for episode in range(args.episodes):
        progress = min(1.0, episode / max(1.0, args.epsilon_fraction * args.episodes))
        epsilon = args.epsilon_start + progress * (args.epsilon_end - args.epsilon_start)
        text, info = env.reset(seed=args.seed if episode == 0 else None)
        done = False
        while not done:
            counts = candidates(text, info["actions"])  # PRIOR
            if args.exploration == "posterior":
                action = posterior(text, counts, rng)
            elif rng.random() < epsilon:
                action = int(rng.choice(num_actions, p=counts / counts.sum()))
            else:
                action = greedy(text, counts)
            next_text, reward, terminated, truncated, info = env.step(action)
            # A terminal state has no answers, and its value is not used.
            next_counts = np.ones(num_actions) if terminated else candidates(next_text, info["actions"])  # PRIOR
            buffer.add(texts(text), action, reward, texts(next_text), terminated, next_counts)
            text, done = next_text, terminated or truncated

        if (episode + 1) % args.train_frequency == 0 and len(buffer) >= args.batch_size:
            for _ in range(args.gradient_steps):
                b_text, b_action, b_reward, b_next, b_terminated, b_counts = buffer.sample(args.batch_size, generator)
                with torch.no_grad():
                    next_values = target_network(texts.features[b_next.long()])
                    target = b_reward + args.gamma * (1 - b_terminated) * best_candidate(next_values, b_counts)  # PRIOR
                values = q_network(texts.features[b_text.long()])
                value = values.gather(1, b_action.long()[:, None]).squeeze(1)
                loss = (value - target).square().sum()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                with torch.no_grad():
                    torch._foreach_lerp_(target_parameters, parameters, args.tau)
            q_cache.clear()

        if (episode + 1) % args.eval_frequency == 0 or episode + 1 == args.episodes:
            evaluations.append((episode + 1, evaluate(eval_env, agent, args.eval_episodes)))
            seconds = time.time() - started
            print(f"episode {episode + 1}: return {evaluations[-1][1]:.3f}, {seconds:.0f} s", flush=True)

    mean = np.mean([value for _, value in evaluations])
    print(f"return {evaluations[-1][1]:.3f} at the end, {mean:.3f} on average over the evaluations")
    return evaluations, q_network


if __name__ == "__main__":
    train(tyro.cli(Args))
