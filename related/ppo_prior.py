# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "gymnasium[mujoco]==1.4.0",
#     "numpy==2.4.6",
#     "torch==2.13.0",
#     "tyro==1.0.17",
# ]
# ///
"""PPO-Prior: PPO with beta * KL(policy || prior), the prior being k answers of a frozen language model.

After the GFlan-Prior of arXiv 2410.07927 (Efficient Reinforcement Learning with Large Language Model Priors), whose
policy is Flan-T5. Here a small network stands in its place, so this is a reproduction of the KL term alone. The model's
answers are stored in a file, so nobody is asked in training. `# PRIOR` marks what turns PPO into PPO-Prior.

    python related/ppo_prior.py                  # 8x8 lake: candidates alone 0.000, return 1.000 (mean of all 0.785)
    python related/ppo_prior.py --prior none     # plain PPO: return 1.000 (mean of all 0.715)

Seed 1, under 25 seconds each on a busy core of a server, torch 2.13.0. In other seeds either may end at 0:
docs/related_llm_priors.md.
"""

import json
import re
import time
import zlib
from collections.abc import Callable
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
    """seed of the network, the actions, the batches and the choice of the proposals"""
    prior: Literal["file", "none"] = "file"
    """none is plain PPO: no KL term"""
    prior_file: str = ""
    """stored answers of make_prior.py; empty: `priors/<env_id>__qwen2.5-coder-1.5b.jsonl` beside this script"""
    num_proposals: int = 5
    """k: how many of the answers stored for a state are its candidates; repeats count"""
    kl_coef: float = 0.1
    """beta: weight of KL(policy || prior); 0 is plain PPO"""
    prior_smoothing: float = 0.01
    """added to the count of every action, so that the KL is finite where an action was never proposed"""

    total_timesteps: int = 20_480
    """environment steps"""
    num_envs: int = 8
    """environments stepped in turn"""
    num_steps: int = 64
    """steps of each environment between trainings"""
    learning_rate: float = 1e-3
    """step size of Adam"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation"""
    update_epochs: int = 4
    """passes over the steps of a training"""
    num_minibatches: int = 4
    """parts of a pass"""
    clip_coef: float = 0.2
    """limit of the policy's ratio"""
    ent_coef: float = 0.01
    """weight of the entropy bonus"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """limit of the gradient's norm"""
    eval_frequency: int = 2_048
    """environment steps between evaluations"""
    eval_episodes: int = 20
    """episodes in an evaluation, with actions drawn from the policy"""


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


# --- Network and KL --------------------------------------------------------------------------------------------------
def make_network(num_outputs: int, obs_dim: int = 256, hidden: int = 64) -> nn.Sequential:
    layers = [nn.Linear(obs_dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden, num_outputs))


def smoothed(counts: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Return the prior's probabilities: (counts + smoothing), normalised over the last dimension."""
    return (counts + smoothing) / (counts + smoothing).sum(-1, keepdim=True)


def kl_to_prior(logits: torch.Tensor, prior: torch.Tensor) -> torch.Tensor:
    """Return the (...,) KL(softmax(logits) || prior) over the last dimension, in nats."""
    log_policy = logits.log_softmax(-1)
    return (log_policy.exp() * (log_policy - prior.log())).sum(-1)


# --- Training --------------------------------------------------------------------------------------------------------
def train(args: Args) -> tuple[list[tuple[int, float]], nn.Module]:
    """Train, print, and return (environment steps, mean return) of each evaluation, and the actor."""
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    envs, eval_env = [text_env(args.env_id) for _ in range(args.num_envs)], text_env(args.env_id)
    num_actions = int(eval_env.action_space.n)
    candidates = make_candidates(args, args.prior_file)  # PRIOR
    kl_coef = args.kl_coef if args.prior == "file" else 0.0  # PRIOR
    prior_return = evaluate(eval_env, candidate_policy(candidates, args.seed), episodes=100)
    print(f"return of the candidates alone: {prior_return:.3f}", flush=True)
    actor, critic, texts = make_network(num_actions), make_network(1), Texts()
    with torch.no_grad():
        actor[-1].weight *= 0.01  # as is usual in PPO: the first policy is almost uniform
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=args.learning_rate, eps=1e-5, fused=True)
    eval_generator = torch.Generator().manual_seed(args.seed)

    def policy(text: str, names: list[str]) -> int:
        number = texts(text)  # first, since it may add a row
        with torch.inference_mode():
            probabilities = actor(texts.features[number]).softmax(-1)
        return int(torch.multinomial(probabilities, 1, generator=eval_generator))

    shape = (args.num_steps, args.num_envs)
    numbers, next_numbers, actions = (torch.zeros(shape, dtype=torch.long) for _ in range(3))
    log_probs, rewards, terminations, dones = (torch.zeros(shape) for _ in range(4))
    counts = torch.zeros(*shape, num_actions)
    resets = [env.reset(seed=args.seed + i) for i, env in enumerate(envs)]
    current, names = [text for text, _ in resets], [info["actions"] for _, info in resets]
    evaluations, started = [], time.time()

    for step in range(0, args.total_timesteps, args.num_steps * args.num_envs):
        for t in range(args.num_steps):
            numbers[t] = torch.tensor([texts(text) for text in current])
            if kl_coef:
                counts[t] = torch.from_numpy(np.stack([candidates(*pair) for pair in zip(current, names)]))  # PRIOR
            with torch.inference_mode():
                log_policy = actor(texts.features[numbers[t]]).log_softmax(-1)
                actions[t] = torch.multinomial(log_policy.exp(), 1, generator=generator).squeeze(1)
                log_probs[t] = log_policy.gather(1, actions[t, :, None]).squeeze(1)
            for i, env in enumerate(envs):
                text, reward, terminated, truncated, info = env.step(int(actions[t, i]))
                rewards[t, i], terminations[t, i], dones[t, i] = reward, terminated, terminated or truncated
                next_numbers[t, i] = texts(text)  # the true next state, also where a time limit ends the episode
                if terminated or truncated:
                    text, info = env.reset()
                current[i], names[i] = text, info["actions"]

        with torch.no_grad():
            values = critic(texts.features[numbers]).squeeze(-1)
            next_values = critic(texts.features[next_numbers]).squeeze(-1)
        advantages, advantage = torch.zeros(shape), torch.zeros(args.num_envs)
        for t in reversed(range(args.num_steps)):
            delta = rewards[t] + args.gamma * (1 - terminations[t]) * next_values[t] - values[t]
            advantage = delta + args.gamma * args.gae_lambda * (1 - dones[t]) * advantage
            advantages[t] = advantage
        returns = (advantages + values).flatten()

        size = args.num_steps * args.num_envs
        for _ in range(args.update_epochs):
            for b in torch.randperm(size, generator=generator).chunk(args.num_minibatches):
                obs = texts.features[numbers.flatten()[b]]
                logits = actor(obs)
                log_policy = logits.log_softmax(-1)
                ratio = (log_policy.gather(1, actions.flatten()[b, None]).squeeze(1) - log_probs.flatten()[b]).exp()
                b_advantages = advantages.flatten()[b]
                b_advantages = (b_advantages - b_advantages.mean()) / (b_advantages.std() + 1e-8)
                clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                policy_loss = -torch.min(b_advantages * ratio, b_advantages * clipped).mean()
                entropy = -(log_policy.exp() * log_policy).sum(-1).mean()
                value_loss = 0.5 * (critic(obs).squeeze(1) - returns[b]).square().mean()
                loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
                if kl_coef:
                    prior = smoothed(counts.view(size, -1)[b], args.prior_smoothing)  # PRIOR
                    loss = loss + kl_coef * kl_to_prior(logits, prior).mean()  # PRIOR
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
                optimizer.step()

        steps_done = step + size
        if steps_done % args.eval_frequency == 0 or steps_done >= args.total_timesteps:
            evaluations.append((steps_done, evaluate(eval_env, policy, args.eval_episodes)))
            seconds = time.time() - started
            print(f"step {steps_done}: return {evaluations[-1][1]:.3f}, {seconds:.0f} s", flush=True)

    mean = np.mean([value for _, value in evaluations])
    print(f"return {evaluations[-1][1]:.3f} at the end, {mean:.3f} on average over the evaluations")
    return evaluations, actor


if __name__ == "__main__":
    train(tyro.cli(Args))
