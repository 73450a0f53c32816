# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "gymnasium[mujoco]==1.4.0",
#     "mujoco==4.0.0",
#     "numpy==2.4.6",
#     "requests==2.34.2",
#     "tensorboard==2.21.0",
#     "torch==2.13.0",
#     "tyro==1.0.17",
# ]
# ///
"""PPO whose further training is modulated by a language model's explanation of a sub-optimal agent's trajectories.

After arXiv 2505.20671 (LLM-Guided Reinforcement Learning: Addressing Training Bottlenecks through Policy Modulation). An
explainer reads episodes of an agent that is stuck, names critical states, suggests better actions there and assigns
implicit rewards. Training then goes on with the suggested actions (A), the rewards (R) or both (RA): only the data of
PPO change. `# MODULATION` marks the places. Evaluation is of the agent alone. What is ours and not the paper's is listed
in docs/related_policy_modulation.md.

    python related/modulated_ppo.py --variant none     # plain PPO stays stuck: success 0.00; 9 s
    python related/modulated_ppo.py --variant RA       # the advice frees it: success 0.95; 9 s
    python related/modulated_ppo.py --dump-trajectories lake.jsonl     # episodes in words, for explain_trajectories.py
    python related/modulated_ppo.py --explanations related/explanations/frozen_lake_8x8_qwen.json

Seed 1, CPU seconds of a 2026 server processor, torch 2.13.0. The second uses a made-up explainer that is always right;
`--accuracy 0.6` makes it err. One agent proves little: docs/related_policy_modulation.md has ten.
"""

import ast
import csv
import json
import math
import os
import sys
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from text_kitchen import HORIZON, transitions, value_iteration
from torch import nn
from torch.distributions import Categorical, Independent, Normal
from torch.utils.tensorboard import SummaryWriter

sys.path.append(str(Path(__file__).resolve().parents[1]))  # there lies generate_policy.py: its lint, its child process
import generate_policy as gp

ALGORITHM = "modulated_ppo"
ENV_IDS = ("frozen_lake_8x8", "frozen_lake_4x4", "Hopper-v4")


@dataclass
class Args:
    env_id: Literal[ENV_IDS] = "frozen_lake_8x8"
    """environment; the lakes are those of text_kitchen.py"""
    seed: int = 1
    """seed of the networks, of both trainings, and of the synthetic and the random explanations"""
    torch_threads: int = 1
    """CPU threads of torch"""

    agent: str = ""
    """`suboptimal.pt` of an earlier run, to refine; empty: pre-train an agent"""
    pretrain_steps: int = 20_480
    """environment steps of the pre-training, which leave the agent sub-optimal"""
    explain_episodes: int = 20
    """episodes of the sub-optimal agent that are explained or dumped"""
    dump_trajectories: str = ""
    """write these episodes in words to this file and stop: the input of explain_trajectories.py"""

    variant: Literal["none", "A", "R", "RA", "random"] = "RA"
    """none: plain PPO; A: suggested actions; R: implicit rewards; RA: both; random: both, at random states"""
    explanations: str = "synthetic"
    """file of explain_trajectories.py; or `synthetic`, a made-up explainer that knows the optimum and errs as told"""
    accuracy: float = 1.0
    """share of the synthetic explainer's actions that are optimal"""
    override_fraction: float = 0.5
    """the probability of an override falls linearly from 1 to 0 over this fraction of the refinement; inf: it stays 1"""
    reward_coef: float = 0.05
    """a critical state pays this times the explainer's reward"""
    reward_visits: Literal["first", "every"] = "first"
    """pay at the first visit of a critical state in an episode, or at every visit (which can be farmed)"""
    match_radius: float = 0.5
    """Hopper-v4: root mean square distance, in standard deviations, within which a state given as numbers matches"""

    total_timesteps: int = 20_480
    """environment steps of the refinement, over all environments"""
    num_envs: int = 16
    """environments that run side by side"""
    num_steps: int = 64
    """steps in each environment between two updates"""
    num_minibatches: int = 4
    """minibatches in an epoch"""
    update_epochs: int = 4
    """epochs over the data between two updates"""
    learning_rate: float = 5e-4
    """step size of Adam"""
    hidden: int = 64
    """units in each of the two hidden layers of the actor and of the critic"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of the generalised advantage estimate"""
    clip_coef: float = 0.2
    """the probability ratio is clipped to 1 plus or minus this"""
    ent_coef: float = 0.02
    """weight of the entropy in the loss"""
    vf_coef: float = 0.5
    """weight of the critic's loss"""
    max_grad_norm: float = 0.5
    """largest norm of the gradient"""
    reward_scale: float = 1.0
    """factor on the environment's reward in training, to keep the critic's targets small"""

    evaluations: int = 20
    """evaluations of the refinement, evenly spaced"""
    eval_episodes: int = 100
    """episodes in an evaluation; reset seeds are the same in every run"""


# --- Environments and their words ------------------------------------------------------------------------------------
HOPPER_OBS = ("height", "torso angle", "thigh angle", "leg angle", "foot angle", "forward speed", "vertical speed")
HOPPER_OBS += ("torso turn rate", "thigh turn rate", "leg turn rate", "foot turn rate")


class TableEnv(gym.Env):
    """The texts, rewards and ends of `text_env(env_id)`, looked up instead of computed, which is several times faster."""

    def __init__(self, table: dict, horizon: int):
        self.table, self.horizon, self.start = table, horizon, next(iter(table))
        self.action_space = gym.spaces.Discrete(len(table[self.start]))

    def reset(self, seed=None, options=None):
        self.text, self.steps = self.start, 0
        return self.text, {}

    def step(self, action):
        _, reward, terminated, self.text = self.table[self.text][action]
        self.steps += 1
        return self.text, reward, terminated, self.steps >= self.horizon, {}


class Task:
    """An environment, its states and actions in words, and its states as inputs of the networks.

    table: what text_kitchen's `transitions` says of a lake. A lake's observation is a text, an action an index.
    """

    def __init__(self, env_id: str):
        self.env_id, self.discrete = env_id, env_id in HORIZON
        self.table = transitions(env_id) if self.discrete else {}
        self.numbers = {text: number for number, text in enumerate(self.table)}
        env = self.make_env()
        self.action_space = env.action_space
        self.obs_dim = len(self.table) if self.discrete else env.observation_space.shape[0]
        self.one_hot = torch.eye(self.obs_dim)

    def make_env(self) -> gym.Env:
        if self.discrete:
            return TableEnv(self.table, HORIZON[self.env_id])
        warnings.filterwarnings("ignore", message=".*is out of date.*")  # the published results are on v4
        return gym.wrappers.TransformObservation(gym.make(self.env_id), np.array, None)

    def encode(self, observations: list) -> torch.Tensor:
        """Return the (number of observations, obs_dim) inputs."""
        if not self.discrete:
            return torch.from_numpy(np.stack(observations).astype(np.float32))
        # A terminal text has no input of its own, since its value is never used.
        return self.one_hot[[self.numbers.get(text, 0) for text in observations]]

    def executable(self, action: np.ndarray):
        """Return the action as the environment takes it: an index, or numbers inside the bounds."""
        return int(action) if self.discrete else action.clip(self.action_space.low, self.action_space.high)

    def action_names(self, text: str) -> list[str]:
        return [name for name, *_ in self.table[text]]

    def words(self, obs, action) -> dict:
        """Return a state and an executed action as a reader of trajectories sees them."""
        if self.discrete:
            return {"state": obs, "action": self.action_names(obs)[action]}
        state = ", ".join(f"{name} obs[{i}] = {obs[i]:.2f}" for i, name in enumerate(HOPPER_OBS))
        return {"state": state, "action": [round(float(torque), 2) for torque in action]}


# --- The agent -------------------------------------------------------------------------------------------------------
def layer(inputs: int, outputs: int, gain: float) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, gain)
    nn.init.zeros_(linear.bias)
    return linear


class Agent(nn.Module):
    """An actor and a critic of two hidden layers each: a categorical policy for a lake, a Gaussian one for Hopper-v4."""

    def __init__(self, task: Task, hidden: int):
        super().__init__()
        outputs = int(task.action_space.n) if task.discrete else task.action_space.shape[0]

        def network(outputs: int, gain: float) -> nn.Sequential:
            body = [layer(task.obs_dim, hidden, 2**0.5), nn.Tanh(), layer(hidden, hidden, 2**0.5), nn.Tanh()]
            return nn.Sequential(*body, layer(hidden, outputs, gain))

        self.actor, self.critic = network(outputs, 0.01), network(1, 1.0)
        self.log_std = None if task.discrete else nn.Parameter(torch.zeros(outputs))
        # Running moments of Hopper's observations; one-hot inputs are left as they are.
        self.register_buffer("obs_count", torch.tensor(1e-4))
        self.register_buffer("obs_mean", torch.zeros(task.obs_dim))
        self.register_buffer("obs_var", torch.ones(task.obs_dim))

    def count_observations(self, obs: torch.Tensor):
        """Take (batch, obs_dim) observations into the running mean and variance."""
        total, delta = self.obs_count + len(obs), obs.mean(0) - self.obs_mean
        squares = self.obs_var * self.obs_count + obs.var(0, correction=0) * len(obs)
        self.obs_var.copy_((squares + delta.square() * self.obs_count * len(obs) / total) / total)
        self.obs_mean.add_(delta * len(obs) / total)
        self.obs_count.copy_(total)

    def normalise(self, obs: torch.Tensor) -> torch.Tensor:
        if self.log_std is None:
            return obs
        return ((obs - self.obs_mean) / (self.obs_var + 1e-8).sqrt()).clamp(-10, 10)

    def value(self, obs: torch.Tensor) -> torch.Tensor:
        """obs: (..., obs_dim). Return the (...) values."""
        return self.critic(self.normalise(obs)).squeeze(-1)

    def policy(self, obs: torch.Tensor):
        """obs: (..., obs_dim). Return the distribution of the (...) indices or of the (..., act_dim) actions."""
        output = self.actor(self.normalise(obs))
        if self.log_std is None:
            return Categorical(logits=output, validate_args=False)
        return Independent(Normal(output, self.log_std.exp(), validate_args=False), 1, validate_args=False)


def roll_out(agent: Agent, task: Task, episodes: int, first_seed: int, sample: bool) -> list[dict]:
    """Return episodes of the agent alone, played side by side from reset seeds first_seed, first_seed + 1, ...

    Each has `return`, `end` and `steps`, a list of (observation, action, reward). sample=False takes a Gaussian's mean.
    The draws are those of a generator seeded here, so that training's own random numbers are not touched.
    """
    envs = [task.make_env() for _ in range(episodes)]
    obs = [env.reset(seed=first_seed + i)[0] for i, env in enumerate(envs)]
    played = [{"return": 0.0, "end": "", "steps": []} for _ in envs]
    running = list(range(episodes))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(first_seed)
        while running:
            policy = agent.policy(task.encode([obs[i] for i in running]))
            actions = (policy.sample() if sample else policy.mean).numpy()
            for i, action in zip(list(running), actions):
                action = task.executable(action)
                next_obs, reward, terminated, truncated, _ = envs[i].step(action)
                played[i]["steps"].append((obs[i], action, float(reward)))
                played[i]["return"] += float(reward)
                obs[i] = next_obs
                if terminated or truncated:
                    played[i]["end"] = "terminated" if terminated else "time limit"
                    running.remove(i)
    return played


def evaluate(agent: Agent, task: Task, episodes: int) -> np.ndarray:
    """Return the undiscounted returns of the agent alone, without table or implicit reward, on seeds 10000, 10001, ...

    On a lake actions are drawn: nothing there is random, so that the most probable ones would succeed always or never.
    """
    return np.array([episode["return"] for episode in roll_out(agent, task, episodes, 10_000, sample=task.discrete)])


# --- Explanations: what they are, how a file is checked ---------------------------------------------------------------
KEYS = ("state", "why", "action", "reward")


def predicate_code(expressions: list[str]) -> str:
    """Return a policy file whose action is 1 for each expression of `obs` that holds, and 0 for each that does not."""
    entries = "".join(
        f"        float(bool(\n            {expression.strip()}\n        )),\n" for expression in expressions
    )
    return f"import math\n\nimport numpy as np\n\n\ndef policy(obs, step):\n    return np.array([\n{entries}    ])\n"


def predicate_bench(bench: gp.Bench, count: int) -> SimpleNamespace:
    """Return what generate_policy's child process has to know of a policy with `count` actions."""
    return SimpleNamespace(env_id=bench.env_id, obs_space=bench.obs_space, low=np.zeros(count))


def check_predicates(expressions: list[str], env_id: str):
    """Lint the expressions and try them in a child process, as generate_policy.py does. Raise its Failure."""
    for expression in expressions:
        try:
            tree = ast.parse(expression.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise gp.Failure("syntax", f"not a Python expression: {expression}")
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        if "obs" not in names or "step" in names:
            raise gp.Failure("lint", f"not about obs alone: {expression}")
    code, bench = predicate_code(expressions), gp.Bench(env_id)
    gp.lint(code, env_id)
    gp.trial(code, predicate_bench(bench, len(expressions)), bench.trial_queries())


def is_numbers(value, length: int, limit: float) -> bool:
    """Whether the value is a list of that many finite numbers, none beyond the limit."""
    if not isinstance(value, list) or len(value) != length or not all(type(v) in (int, float) for v in value):
        return False
    return all(math.isfinite(v) and abs(v) <= limit for v in value)


def check_critical(entry, task: Task):
    """Raise ValueError, in one line, if the entry is not {state, why, action, reward} as this environment needs them.

    state: a text of the lake; for Hopper-v4 a Python expression of `obs`, or the numbers of an observation.
    action: the name of an action; for Hopper-v4 three numbers from -1 to 1. reward: a number from -1 to 1.
    """

    def problem(what: str, value) -> ValueError:
        return ValueError(f"{what}, found {gp.one_line(value, 80)}")

    if not isinstance(entry, dict) or set(entry) != set(KEYS):
        raise problem(f"a critical state must have exactly {', '.join(KEYS)}", entry)
    state, action = entry["state"], entry["action"]
    if not (isinstance(entry["why"], str) and is_numbers([entry["reward"]], 1, 1.0)):
        raise problem("why must be a text and reward a number from -1 to 1", [entry["why"], entry["reward"]])
    if task.discrete:
        if not isinstance(state, str) or state not in task.table:
            raise problem(f"state must be a text of {task.env_id}", state)
        if action not in task.action_names(state):
            raise problem(f"action must be one of {', '.join(task.action_names(state))}", action)
    elif not (isinstance(state, str) or is_numbers(state, task.obs_dim, math.inf)):
        raise problem(f"state must be an expression of obs, or {task.obs_dim} numbers", state)
    elif not is_numbers(action, task.action_space.shape[0], 1.0):
        raise problem(f"action must be {task.action_space.shape[0]} numbers from -1 to 1", action)


def read_explanations(path: Path, task: Task) -> list[dict]:
    """Return the critical states of a file of explain_trajectories.py. SystemExit, in one line, if it is not sound."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["env_id"] != task.env_id:
            raise ValueError(f"made for {gp.one_line(data['env_id'], 40)}, but the environment is {task.env_id}")
        entries = [entry for answer in data["answers"] for entry in answer["critical"]]
        for number, entry in enumerate(entries, 1):
            try:
                check_critical(entry, task)
            except ValueError as error:
                raise ValueError(f"critical state {number}: {error}")
        rules = [entry["state"] for entry in entries if isinstance(entry["state"], str)]
        if rules and not task.discrete:
            check_predicates(rules, task.env_id)
    except OSError as error:
        raise SystemExit(f"--explanations {path}: {error.strerror}; write it with explain_trajectories.py")
    except (ValueError, RecursionError, gp.Failure) as error:
        raise SystemExit(f"--explanations {path}: {gp.one_line(error)}")
    except (KeyError, TypeError):
        raise SystemExit(f"--explanations {path}: must hold env_id, and answers with their critical states")
    if not entries:
        raise SystemExit(f"--explanations {path}: there is no critical state in it")
    return entries


def synthetic_explanations(task: Task, episodes: list[dict], accuracy: float, gamma: float, rng) -> list[dict]:
    """Return what an explainer might say that knows the optimum. It is NOT a language model's answer.

    Critical are the last 3 different states of each episode in which the action was not optimal. Of all suggestions the
    share `accuracy` is optimal, and the others are drawn from the actions that are not. The implicit reward is 1.
    """
    if not task.discrete:
        raise SystemExit(f"--explanations synthetic: the optimum of {task.env_id} is not known; give a file")
    values = value_iteration(task.table, gamma)
    optimal = {text: np.flatnonzero(q > q.max() - 1e-9) for text, q in values.items()}
    states = {}
    for episode in episodes:
        mistakes = dict.fromkeys(text for text, action, _ in reversed(episode["steps"]) if action not in optimal[text])
        states |= dict.fromkeys(list(mistakes)[:3])
    wrong = set(rng.permutation(len(states))[: round((1 - accuracy) * len(states))].tolist())
    entries = []
    for number, text in enumerate(states):
        others = np.setdiff1d(range(len(task.table[text])), optimal[text])  # not empty: one of them was a mistake
        action = task.action_names(text)[rng.choice(others if number in wrong else optimal[text])]
        entries.append({"state": text, "why": "synthetic", "action": action, "reward": 1.0})
    return entries


def random_explanations(task: Task, episodes: list[dict], rewards: np.ndarray, rng) -> list[dict]:
    """Return as many entries as there are rewards: states drawn from the visited ones, actions from all."""
    visited = [obs for episode in episodes for obs, *_ in episode["steps"]]
    visited = list(dict.fromkeys(visited)) if task.discrete else [obs.tolist() for obs in visited]
    entries = []
    for i, reward in zip(rng.permutation(len(visited)), rewards):
        if task.discrete:
            action = str(rng.choice(task.action_names(visited[i])))
        else:
            action = rng.uniform(task.action_space.low, task.action_space.high).tolist()
        entries.append({"state": visited[i], "why": "random", "action": action, "reward": float(reward)})
    return entries


class Table:
    """The critical states by number: `actions` (entries, ...), `rewards` (entries,), and `match`.

    Several explanations of one text count as one: the action that most of them suggest, the first of equals, and the mean
    of the rewards that go with it.
    """

    def __init__(self, entries: list[dict], task: Task, episodes: list[dict], radius: float):
        self.task, self.radius, self.child = task, radius, None
        if task.discrete:
            self.numbers, actions, rewards = {}, [], []
            for text in dict.fromkeys(entry["state"] for entry in entries):
                same = [entry for entry in entries if entry["state"] == text]
                name = Counter(entry["action"] for entry in same).most_common(1)[0][0]
                self.numbers[text] = len(actions)
                actions.append(task.action_names(text).index(name))
                rewards.append(np.mean([entry["reward"] for entry in same if entry["action"] == name]))
            self.actions, self.rewards = np.array(actions), np.array(rewards)
            return
        self.actions = np.array([entry["action"] for entry in entries], np.float32)
        self.rewards = np.array([entry["reward"] for entry in entries])
        is_rule = np.array([isinstance(entry["state"], str) for entry in entries])
        self.rules, self.centred = np.flatnonzero(is_rule), np.flatnonzero(~is_rule)
        self.centres = np.array([entries[i]["state"] for i in self.centred])
        self.deviation = np.std([obs for episode in episodes for obs, *_ in episode["steps"]], axis=0) + 1e-8
        if len(self.rules):
            code = predicate_code([entries[i]["state"] for i in self.rules])
            bench = predicate_bench(gp.Bench(task.env_id), len(self.rules))
            self.child = gp.Child(code, bench, seconds=24 * 3600)  # the model's code runs there, never here

    def match(self, observations: list) -> np.ndarray:
        """Return for each observation the number of the entry that it matches, or -1.

        Hopper-v4: the first expression that holds; if none does, the nearest of the states given as numbers.
        """
        if self.task.discrete:
            return np.array([self.numbers.get(text, -1) for text in observations])
        found = np.full(len(observations), -1)
        if len(self.centred):
            distance = (np.stack(observations)[:, None] - self.centres) / self.deviation
            distance = np.sqrt(np.square(distance).mean(2))
            near = distance.min(1) < self.radius
            found[near] = self.centred[distance.argmin(1)[near]]
        if len(self.rules):
            try:
                holds = self.child.act([(obs.tolist(), 0) for obs in observations]) > 0.5
            except gp.Failure as failure:
                raise SystemExit(f"--explanations: an expression failed in training: {failure.kind}: {failure}")
            found[holds.any(1)] = self.rules[holds.argmax(1)[holds.any(1)]]
        return found

    def reward(self, number: int, action) -> float:
        """Return the entry's reward rho for its own action, and less for others.

        A lake: -rho for any other action. Hopper-v4: falling to 0 at a mean distance of half the action range.
        """
        if self.task.discrete:
            return self.rewards[number] * (1.0 if action == self.actions[number] else -1.0)
        half_range = (self.task.action_space.high - self.task.action_space.low) / 2
        distance = np.abs(self.task.executable(action) - self.actions[number]) / half_range
        return self.rewards[number] * (1.0 - distance.mean())

    def close(self):
        if self.child:
            self.child.close()


# --- Training --------------------------------------------------------------------------------------------------------
def learn(agent: Agent, task: Task, args: Args, steps: int, table: Table | None = None, each_update=None):
    """Run PPO for at least `steps` environment steps over all environments; with a table, modulated by args.variant.

    each_update(updates, steps, scalars, returns): called after each update, with the numbers so far, what is logged,
    and the returns of the training episodes that ended since the last one.
    """
    torch.manual_seed(args.seed)
    override_rng = np.random.default_rng(args.seed)  # its own generator: an override shifts no other draw
    overrides, pays = (
        table and args.variant in variants for variants in (("A", "RA", "random"), ("R", "RA", "random"))
    )
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    envs = [task.make_env() for _ in range(args.num_envs)]
    observations = [env.reset(seed=1000 * args.seed + i)[0] for i, env in enumerate(envs)]
    episode_return, paid = [0.0] * args.num_envs, [set() for _ in envs]
    shape = (args.num_steps, args.num_envs)
    obs = torch.zeros(*shape, task.obs_dim)
    actions = torch.zeros(*shape, *task.action_space.shape, dtype=torch.int64 if task.discrete else torch.float32)
    rewards, dones = np.zeros(shape, np.float32), np.zeros(shape, np.float32)

    updates = math.ceil(steps / (args.num_steps * args.num_envs))
    for update in range(updates):
        override_probability = max(0.0, 1.0 - update / updates / args.override_fraction)
        returns, overridden, implicit = [], 0, 0.0
        for t in range(args.num_steps):
            obs[t] = task.encode(observations)
            with torch.no_grad():
                actions[t] = agent.policy(obs[t]).sample()
            if table:  # MODULATION: which states are critical, and whether their action is overridden
                critical = table.match(observations)
            if overrides:
                at = (critical >= 0) & (override_rng.random(args.num_envs) < override_probability)
                actions[t, torch.from_numpy(at)] = torch.from_numpy(table.actions[critical[at]])
                overridden += int(at.sum())
            for i, (env, action) in enumerate(zip(envs, actions[t].numpy())):  # what is stored is what is executed
                observations[i], reward, terminated, truncated, _ = env.step(task.executable(action))
                episode_return[i] += float(reward)
                rewards[t, i], dones[t, i] = args.reward_scale * reward, terminated or truncated
                if pays and critical[i] >= 0 and (args.reward_visits == "every" or critical[i] not in paid[i]):
                    paid[i].add(critical[i])  # MODULATION: the implicit reward, once for each state and episode
                    rewards[t, i] += args.reward_coef * table.reward(critical[i], action)
                    implicit += args.reward_coef * table.reward(critical[i], action)
                if truncated and not terminated:  # a time limit is no terminal state
                    with torch.no_grad():
                        rewards[t, i] += args.gamma * agent.value(task.encode([observations[i]])).item()
                if terminated or truncated:
                    returns.append(episode_return[i])
                    observations[i], episode_return[i], paid[i] = env.reset()[0], 0.0, set()

        with torch.no_grad():
            # Of the executed actions: the probability ratio starts at 1, overridden or not.
            logprobs = agent.policy(obs).log_prob(actions)
            values, next_values = agent.value(obs).numpy(), agent.value(task.encode(observations)).numpy()
        advantages, advantage = np.zeros(shape, np.float32), np.zeros(args.num_envs, np.float32)
        for t in reversed(range(args.num_steps)):  # dones[t]: the episode ended with step t
            delta = rewards[t] + args.gamma * (1 - dones[t]) * next_values - values[t]
            advantage = delta + args.gamma * args.gae_lambda * (1 - dones[t]) * advantage
            advantages[t], next_values = advantage, values[t]

        b_obs, b_actions, b_logprobs = obs.flatten(0, 1), actions.flatten(0, 1), logprobs.flatten()
        b_advantages, b_returns = (torch.from_numpy(array).flatten() for array in (advantages, advantages + values))
        if not task.discrete:
            agent.count_observations(b_obs)
        for _ in range(args.update_epochs):
            for index in torch.randperm(len(b_obs)).chunk(args.num_minibatches):
                policy = agent.policy(b_obs[index])
                ratio = (policy.log_prob(b_actions[index]) - b_logprobs[index]).exp()
                mb_advantages = b_advantages[index]
                mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
                clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                policy_loss = -torch.min(ratio * mb_advantages, clipped_ratio * mb_advantages).mean()
                value_loss = 0.5 * (agent.value(b_obs[index]) - b_returns[index]).square().mean()
                entropy = policy.entropy().mean()
                loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()

        if each_update:
            scalars = {"losses/policy_loss": policy_loss.item(), "losses/value_loss": value_loss.item()}
            scalars |= {"losses/entropy": entropy.item(), "modulation/overridden": overridden / len(b_obs)}
            scalars |= {"modulation/implicit_reward": implicit / len(b_obs)}
            each_update(update + 1, (update + 1) * len(b_obs), scalars, returns)


def replace_file(path: Path, write):
    """Call write(temporary name), then rename: a kill at any moment leaves no half file."""
    temporary = path.with_name(path.name + ".tmp")
    write(temporary)
    os.replace(temporary, path)


def dump(path: Path, task: Task, seed: int, episodes: list[dict]):
    """Write a line of JSON for each episode: env_id, seed, return, end, and the steps in words."""
    lines = []
    for episode in episodes:
        steps = [{"t": t, **task.words(*step[:2]), "reward": step[2]} for t, step in enumerate(episode["steps"])]
        lines.append(json.dumps({"env_id": task.env_id, "seed": seed, **episode, "steps": steps}) + "\n")
    replace_file(path, lambda temporary: temporary.write_text("".join(lines), encoding="utf-8"))


def load_agent(agent: Agent, path: str, task: Task):
    """Load a `suboptimal.pt` or `model.pt`. SystemExit, in one line, if it does not fit."""
    try:
        saved = torch.load(path)
        if saved["env_id"] != task.env_id:
            raise ValueError(f"trained on {saved['env_id']}, not on {task.env_id}")
        agent.load_state_dict(saved["agent"])
    except Exception as error:  # torch raises what it likes at a file that is none of its own
        raise SystemExit(f"--agent {path}: no agent for these settings: {gp.one_line(error, 120)}")


def check(args: Args):
    """Raise SystemExit, in one line, for settings that cannot work."""
    may_be_0 = {"seed", "accuracy", "reward_coef", "gamma", "gae_lambda", "ent_coef", "vf_coef"}
    for name, value in asdict(args).items():
        flag = f"--{name.replace('_', '-')} {value}"
        least_is_0, may_be_inf = name in may_be_0, name == "override_fraction"
        if isinstance(value, (int, float)) and not (value > 0 or (value == 0 and least_is_0)):
            raise SystemExit(f"{flag}: must be {'0 or more' if least_is_0 else 'above 0'}")
        if value == math.inf and not may_be_inf:
            raise SystemExit(f"{flag}: must be finite")
        if name in {"accuracy", "gamma", "gae_lambda"} and value > 1:
            raise SystemExit(f"{flag}: must be at most 1")
    if args.num_steps * args.num_envs < 2 * args.num_minibatches:
        raise SystemExit(f"--num-minibatches {args.num_minibatches}: each needs two steps")
    updates = math.ceil(args.total_timesteps / (args.num_steps * args.num_envs))
    if args.evaluations > updates:
        raise SystemExit(f"--evaluations {args.evaluations}: there are only {updates} updates")


def train(args: Args) -> list[dict]:
    """Pre-train or load a sub-optimal agent; dump its episodes, or refine it. Return the rows of progress.csv."""
    check(args)
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    task = Task(args.env_id)
    agent, entries = Agent(task, args.hidden), []
    if args.variant != "none" and args.explanations != "synthetic" and not args.dump_trajectories:
        entries = read_explanations(Path(args.explanations), task)  # a fault shows before the work
    if args.agent:
        load_agent(agent, args.agent, task)
    else:
        learn(agent, task, args, args.pretrain_steps)

    episodes = roll_out(agent, task, args.explain_episodes, 20_000, sample=True)
    about_episodes = f"{len(episodes)} episodes, {sum(len(e['steps']) for e in episodes)} steps"
    if args.dump_trajectories:
        dump(Path(args.dump_trajectories), task, args.seed, episodes)
        print(f"{about_episodes}, are in {args.dump_trajectories}")
        return []
    table, rng = None, np.random.default_rng(args.seed)
    if args.variant != "none":
        entries = entries or synthetic_explanations(task, episodes, args.accuracy, args.gamma, rng)
        table = Table(entries, task, episodes, args.match_radius)
        if args.variant == "random":
            table.close()
            table = Table(random_explanations(task, episodes, table.rewards, rng), task, episodes, args.match_radius)
    critical_states = len(table.rewards) if table else 0
    print(f"explained: {about_episodes}; critical states: {critical_states}")

    run_dir = Path("runs") / f"{args.env_id}__{ALGORITHM}__{args.seed}__{datetime.now():%Y%m%d-%H%M%S-%f}"
    run_dir.mkdir(parents=True)
    versions = {package.__name__: package.__version__ for package in (gym, np, torch)}
    (run_dir / "config.json").write_text(json.dumps({**asdict(args), **versions}, indent=2), encoding="utf-8")
    about = {"script": ALGORITHM, "env_id": args.env_id, "args": asdict(args)}
    suboptimal = about | {"agent": agent.state_dict()}
    replace_file(run_dir / "suboptimal.pt", lambda temporary: torch.save(suboptimal, temporary))
    writer, progress = SummaryWriter(run_dir), []
    updates = math.ceil(args.total_timesteps / (args.num_steps * args.num_envs))
    due = {round(updates * (i + 1) / args.evaluations) for i in range(args.evaluations)}

    def report(step: int, overridden: float, implicit_reward: float):
        returns = evaluate(agent, task, args.eval_episodes)
        row = {"step": step, "return_mean": returns.mean().item(), "return_std": returns.std().item()}
        row |= {"overridden": overridden, "implicit_reward": implicit_reward, "critical_states": critical_states}
        progress.append(row)
        with open(run_dir / "progress.csv", "w", newline="", encoding="utf-8") as file:
            rows = csv.DictWriter(file, row)
            rows.writeheader()
            rows.writerows(progress)
        writer.add_scalar("eval/return_mean", row["return_mean"], step)
        status = f"step {step}: return {returns.mean():.3g} +- {returns.std():.3g}"
        print(f"{status}, {overridden:.0%} of the actions overridden", flush=True)

    def each_update(update: int, step: int, scalars: dict, returns: list[float]):
        if returns:
            scalars["charts/episodic_return"] = np.mean(returns)
        for tag, value in scalars.items():
            writer.add_scalar(tag, value, step)
        if update in due:
            report(step, scalars["modulation/overridden"], scalars["modulation/implicit_reward"])

    report(0, 0.0, 0.0)
    learn(agent, task, args, args.total_timesteps, table, each_update)
    writer.close()
    if table:
        table.close()
    # Written last: a run that has a model is complete.
    refined = about | {"agent": agent.state_dict()}
    replace_file(run_dir / "model.pt", lambda temporary: torch.save(refined, temporary))
    print(f"the agent is in {run_dir / 'model.pt'}")
    return progress


if __name__ == "__main__":
    train(tyro.cli(Args))
