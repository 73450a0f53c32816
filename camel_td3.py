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
"""CAMEL-TD3: TD3 whose actions are constrained, early in training, by a Python policy written by a language model.

At each step the policy file proposes an action, the prior. A box around it is the part of the action space that the
agent may use. Epsilon-masking decides how often the box applies: at first always, then with probability epsilon, which
falls while training goes about as well as in the warm-up, and rises again when it does not. The critic's target uses
the next state's box with that probability too, drawn anew. The actor's loss uses the state's box in full down to
epsilon 0.1, and then one that opens to the whole space at epsilon 0 (masking-aware optimization). `# CAMEL` marks the
main places that turn TD3 into CAMEL. The idea is that of arXiv 2502.11896; its abstract gives no formulas: these are
our choice.

    python camel_td3.py --total-timesteps 30000             # Hopper-v4: 3 minutes, return about 2790
    python camel_td3.py --total-timesteps 30000 --no-mask   # plain TD3: 3 minutes, return about 310
    python camel_td3.py --evaluate runs/RUN/model.pt        # the same return again

Seed 1, one core of a 2026 server processor whose other core was busy too, torch 2.13.0. The bare policy returns 2621.
"""

import csv
import json
import os
import re
import time
import warnings
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import nn
from torch.utils.tensorboard import SummaryWriter

ALGORITHM = "camel_td3"


@dataclass
class Args:
    env_id: str = "Hopper-v4"
    """Gymnasium environment with Box observations and actions; `module:Name-v0` imports `module` first"""
    seed: int = 1
    """seed of the networks, the exploration, the mask and the environment's first reset"""
    total_timesteps: int = 1_000_000
    """environment steps of the run, warm-up included"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """where the networks and the buffer live; auto is cuda if there is one, else cpu"""
    torch_threads: int = 1
    """CPU threads of torch; one is best when several runs share the machine"""

    policy_file: str = ""
    """the prior: a `.py` policy, or a `.pt` model of a run (expert masking); default: `llm_policies/<env>.py`"""
    mask: bool = True
    """`--no-mask` is plain TD3: no policy file, no box"""
    mask_width: float = 0.1
    """half-width of the box around the prior, as a fraction of half the action range (2 or more: no constraint)"""
    epsilon_start: float = 1.0
    """epsilon during the warm-up, in [0, 1]"""
    epsilon_fraction: float = 0.8
    """share of the steps after the warm-up in which epsilon goes to 0, at the earliest; lower for a poor policy"""
    epsilon_schedule: Literal["adaptive", "linear"] = "adaptive"
    """adaptive: falls after an episode about as good as the warm-up's, rises after a worse one; linear: by the step"""
    epsilon_masking: Literal["step", "episode", "anneal"] = "step"
    """step, episode: full mask with probability epsilon, drawn at each step or reset; anneal: strength is epsilon"""
    mask_mapping: Literal["project", "affine"] = "project"
    """how the actor's output enters the box: clipped to it, or with the whole action space scaled onto it"""

    learning_rate: float = 3e-4
    """step size of both Adam optimizers"""
    buffer_size: int = 1_000_000
    """transitions kept; capped at `total_timesteps`"""
    gamma: float = 0.99
    """discount factor"""
    tau: float = 0.005
    """step of the target networks towards the networks, at each actor update"""
    batch_size: int = 256
    """transitions in an update"""
    policy_noise: float = 0.2
    """std of the target smoothing noise, in half action ranges"""
    noise_clip: float = 0.5
    """limit of the target smoothing noise, in half action ranges"""
    exploration_noise: float = 0.1
    """std of the exploration noise, in half action ranges"""
    learning_starts: int = 10_000
    """environment steps of the warm-up: actions uniform in the box (without a mask, in the whole space), no updates"""
    policy_frequency: int = 2
    """critic updates for each update of the actor and the targets"""

    eval_frequency: int = 5_000
    """environment steps between evaluations (without noise or mask); 0: only at the end"""
    eval_episodes: int = 10
    """episodes in an evaluation; reset seeds are the same in every run"""
    checkpoint_frequency: int = 0
    """least number of environment steps between checkpoints, written when an episode ends; 0: none"""
    resume: str = ""
    """`checkpoint.pt` of a run to continue; of its settings `--total-timesteps` and `--torch-threads` may change"""
    evaluate: str = ""
    """`model.pt` or `checkpoint.pt` of a run to evaluate, with no training"""


# --- CAMEL: the policy file, the box, the mask, the schedule ---------------------------------------------------------
def default_policy_file(env_id: str) -> Path:
    """`HalfCheetah-v4` -> `llm_policies/half_cheetah_v4.py`, beside this script."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", env_id)
    return Path(__file__).parent / "llm_policies" / (re.sub(r"\W+", "_", name).lower() + ".py")


def load_policy(path: Path, env: gym.Env):
    """Return `prior(obs, step) -> (act_dim,) float32 array in the action bounds` from a `.py` policy or a `.pt` model.

    A `.py` file defines ENV_ID, the environment's id without `module:`, and policy(obs, step). obs: (obs_dim,) float
    array. step: environment steps since the reset. Answers are clipped to the bounds. The file and each answer are
    checked: SystemExit with one line that says what was wrong, and at which step.
    """
    low, high = env.action_space.low, env.action_space.high
    if not path.is_file():
        raise SystemExit(f"{path}: no such policy file; write one, make one with generate_policy.py, or use --no-mask")
    if path.suffix == ".pt":
        saved = load_saved(str(path))
        env_id, policy = saved["env_id"], model_policy(saved["actor"])
    else:
        namespace = {"__name__": path.stem}
        try:
            exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), namespace)
        except (Exception, SystemExit) as error:
            raise SystemExit(f"{path}: cannot be loaded: {type(error).__name__}: {one_line(error)}")
        env_id, policy = namespace.get("ENV_ID"), namespace.get("policy")
    if not callable(policy):
        raise SystemExit(f"{path}: defines no function policy(obs, step)")
    if env_id != env.spec.id:
        raise SystemExit(f"{path}: made for ENV_ID = {env_id!r}, but the environment is {env.spec.id!r}")

    def prior(obs: np.ndarray, step: int) -> np.ndarray:
        try:
            answer = policy(obs.copy(), step)
            action = np.asarray(answer)
        except (Exception, SystemExit) as error:
            raise SystemExit(f"{path}: policy() failed at step {step}: {type(error).__name__}: {one_line(error)}")
        if action.dtype.kind not in "fiu" or action.shape != low.shape or not np.isfinite(action).all():
            expected, found = f"{len(low)} finite numbers", f"{type(answer).__name__} {one_line(answer)[:80]}"
            raise SystemExit(f"{path}: policy() must return {expected}; at step {step} it returned {found}")
        return action.clip(low, high).astype(np.float32)

    return prior


def model_policy(weights: dict[str, torch.Tensor]):
    """Return the deterministic policy of a saved actor of `camel_td3.py` or `camel_sac.py`, in numpy."""
    w = {name: tensor.numpy() for name, tensor in weights.items()}

    def policy(obs: np.ndarray, step: int) -> np.ndarray:
        x = np.maximum(w["fc1.weight"] @ obs.astype(np.float32) + w["fc1.bias"], 0)
        x = np.maximum(w["fc2.weight"] @ x + w["fc2.bias"], 0)
        return np.tanh(w["fc_mean.weight"] @ x + w["fc_mean.bias"]) * w["action_scale"] + w["action_bias"]

    return policy


def action_box(prior, strength, low, high, mask_width: float):
    """Return (box_low, box_high), the part of the action space that the agent may use.

    prior: (..., act_dim), or (..., 0) for the whole space. strength: a number or (..., 1); 0 is the whole space, 1 the
    box of +-mask_width half ranges around the prior. low, high: (act_dim,).
    """
    if prior.shape[-1] == 0:
        return low, high
    half_width = mask_width * (high - low) / 2
    box_low = (low + strength * (prior - half_width - low)).clamp(low, high)
    box_high = (high + strength * (prior + half_width - high)).clamp(low, high)
    return box_low, box_high


class Project(torch.autograd.Function):
    """Clip an action to its box. Outside the box, a descent step always leads back in.

    A plain clamp has no gradient outside, so an output that starts there never comes in, and is still there once the
    mask is gone. Passing the gradient as it is lets the output run away. Turning the outward one around is inverting
    gradients (Hausknecht & Stone, arXiv 1511.04143) without their scaling.
    """

    @staticmethod
    def forward(ctx, action, box_low, box_high):
        projected = action.clamp(box_low, box_high)
        ctx.save_for_backward(action - projected)
        return projected

    @staticmethod
    def backward(ctx, gradient):
        (excess,) = ctx.saved_tensors  # > 0 above the box, < 0 below, 0 inside; a descent step moves by -gradient
        return torch.where(excess == 0, gradient, excess.sign() * gradient.abs()), None, None


def mask_action(action, box, low, high, mapping: str):
    """Return the (..., act_dim) action that the actor's output stands for inside its box."""
    if mapping == "project":
        return Project.apply(action, *box)
    return box[0] + (action - low) / (high - low) * (box[1] - box[0])


def mask_strength(epsilon: float, masking: str, generator: torch.Generator, *shape: int):
    """Return the strength of the mask: epsilon, or a tensor of `shape` that is 1 with probability epsilon, else 0."""
    if masking == "anneal":
        return epsilon
    return (torch.rand(shape, generator=generator, device=generator.device) < epsilon).float()


def linear_epsilon(step: int, args: Args) -> float:
    """Return epsilon_start during the warm-up, then a straight line to 0 over epsilon_fraction of what remains."""
    decay_steps = args.epsilon_fraction * (args.total_timesteps - args.learning_starts)
    progress = max(0, step - args.learning_starts) / max(1.0, decay_steps)
    return args.epsilon_start * max(0.0, 1.0 - progress)


def adaptive_epsilon(epsilon: float, episode_return: float, length: int, warm_up_returns: list, args: Args) -> float:
    """Return epsilon after a training episode: lower if it went as well as the warm-up's episodes, else higher.

    As well: a return of at least their mean - 10 % or - 2 std, whichever is lower. Epsilon falls as fast as the linear
    schedule. It rises by as much as it falls in four episodes of the warm-up's length, since a failed episode is often
    short: the mask lets go of an agent that does as well as random actions in the box, and takes hold of one that does
    not.
    """
    mean, std = np.mean(warm_up_returns), np.std(warm_up_returns)
    good = episode_return >= mean - max(0.1 * abs(mean), 2 * std)
    steps = -length if good else 4 * args.learning_starts / len(warm_up_returns)
    decay_steps = args.epsilon_fraction * (args.total_timesteps - args.learning_starts)
    return float(np.clip(epsilon + args.epsilon_start * steps / max(1.0, decay_steps), 0.0, args.epsilon_start))


# --- Networks --------------------------------------------------------------------------------------------------------
class Actor(nn.Module):
    def __init__(self, obs_dim: int, low: torch.Tensor, high: torch.Tensor):
        super().__init__()
        self.fc1 = nn.Linear(obs_dim, 256)
        self.fc2 = nn.Linear(256, 256)
        self.fc_mean = nn.Linear(256, low.shape[0])
        self.register_buffer("action_scale", (high - low) / 2)
        self.register_buffer("action_bias", (high + low) / 2)

    def forward(self, obs):
        x = torch.relu_(self.fc1(obs))
        x = torch.relu_(self.fc2(x))
        return torch.tanh(self.fc_mean(x)) * self.action_scale + self.action_bias


class TwinCritic(nn.Module):
    """Two Q-networks in one batched pass: each parameter has a leading dimension of 2. Initialised as nn.Linear is."""

    def __init__(self, obs_dim: int, act_dim: int):
        super().__init__()
        sizes = [obs_dim + act_dim, 256, 256, 1]
        bounds = [n**-0.5 for n in sizes[:-1]]
        self.weights = nn.ParameterList(
            torch.empty(2, n, m).uniform_(-b, b) for n, m, b in zip(sizes[:-1], sizes[1:], bounds)
        )
        self.biases = nn.ParameterList(torch.empty(2, 1, m).uniform_(-b, b) for m, b in zip(sizes[1:], bounds))

    def forward(self, obs, action, critics: int = 2):
        """obs: (batch, obs_dim). action: (batch, act_dim). Return (critics, batch, 1) values of the first `critics`."""
        parameters = [*self.weights, *self.biases]
        if critics == 1:  # only then, since a slice's gradient is a copy
            parameters = [parameter[:1] for parameter in parameters]
        w1, w2, w3, b1, b2, b3 = parameters
        x = torch.cat([obs, action], 1).expand(critics, -1, -1)
        x = torch.relu_(torch.baddbmm(b1, x, w1))
        x = torch.relu_(torch.baddbmm(b2, x, w2))
        return (x * w3.mT).sum(-1, keepdim=True) + b3  # a third of the time of a product with one column


# --- Replay buffer ---------------------------------------------------------------------------------------------------
class ReplayBuffer:
    """Transitions as rows of one preallocated float32 tensor, so that a batch is a single gather.

    A row: obs, action, reward, next_obs, terminated, and the priors at obs and next_obs (no columns without a mask).
    """

    def __init__(self, capacity: int, obs_dim: int, act_dim: int, prior_dim: int, device: torch.device):
        self.sizes = [obs_dim, act_dim, 1, obs_dim, 1, prior_dim, prior_dim]
        self.rows = torch.zeros(capacity, sum(self.sizes), device=device)
        self.count = 0  # rows ever added

    def __len__(self):
        return min(self.count, len(self.rows))

    def add(self, *values):
        """values: a row in the order above, each a vector or a number."""
        row = np.concatenate([np.atleast_1d(value) for value in values], dtype=np.float32)
        self.rows[self.count % len(self.rows)] = torch.from_numpy(row)
        self.count += 1

    def sample(self, batch_size: int, generator: torch.Generator):
        """Return the seven parts of a row, each (batch_size, size), drawn uniformly with replacement."""
        indices = torch.randint(len(self), (batch_size,), generator=generator, device=self.rows.device)
        return self.rows[indices].split(self.sizes, 1)


# --- Environment, evaluation, saving ---------------------------------------------------------------------------------
def one_line(thing) -> str:
    return " ".join(str(thing).split())


def make_env(env_id: str) -> gym.Env:
    """Return the environment. SystemExit if it cannot be built or its spaces do not fit."""
    # The published results that users compare with are on v4.
    warnings.filterwarnings("ignore", message=".*is out of date.*")
    try:
        # Copied, since an environment may go on to change the array that it returned.
        env = gym.wrappers.TransformObservation(gym.make(env_id), np.array, None)
    except (gym.error.Error, ImportError) as error:
        raise SystemExit(f"--env-id {env_id}: {one_line(error)}")
    for name, space in (("observation", env.observation_space), ("action", env.action_space)):
        if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
            raise SystemExit(f"--env-id {env_id}: the {name} space must be a one-dimensional Box, not {space}")
    low, high = env.action_space.low, env.action_space.high
    if not (np.isfinite(high - low) & (low < high)).all():
        raise SystemExit(f"--env-id {env_id}: the action bounds must be finite and apart, not {env.action_space}")
    return env


def evaluate(env: gym.Env, policy, episodes: int) -> np.ndarray:
    """Return the undiscounted returns of `policy(obs, step) -> action` on reset seeds 10000, 10001, ..."""
    returns = np.zeros(episodes)
    for i in range(episodes):
        obs, _ = env.reset(seed=10_000 + i)
        action, done, step = policy(obs, 0), False, 0
        while not done:
            obs, reward, terminated, truncated, _ = env.step(action)
            returns[i] += reward
            done, step = terminated or truncated, step + 1
            action = policy(obs, step)  # for the last observation too: a prior's fault there would stop the training
    return returns


def save(path: Path, contents: dict):
    """Write under a temporary name, then rename: a kill at any moment leaves the last good file."""
    temporary = path.with_name(path.name + ".tmp")
    torch.save(contents, temporary)
    os.replace(temporary, path)


def load_saved(path: str, script: str = "") -> dict:
    """Return the contents of a `model.pt` or `checkpoint.pt`, on the CPU. SystemExit if it is none (of `script`)."""
    try:
        saved = torch.load(path, map_location="cpu")
        made_by = saved["script"]
    except Exception as error:
        raise SystemExit(f"{path}: no model or checkpoint of camel_td3.py or camel_sac.py: {one_line(error)[:80]}")
    if script not in ("", made_by):
        raise SystemExit(f"{path}: made by {made_by}.py; this is {script}.py")
    return saved


def check(args: Args):
    """Raise SystemExit, in one line, for settings that cannot work."""
    may_be_0 = {"seed", "gamma", "epsilon_start", "epsilon_fraction", "eval_frequency", "checkpoint_frequency"}
    may_be_0 |= {"exploration_noise", "policy_noise", "noise_clip", "alpha"}
    for name, value in asdict(args).items():
        flag = f"--{name.replace('_', '-')} {value}"
        if type(value) in (int, float) and not (0 < value < np.inf or (value == 0 and name in may_be_0)):
            raise SystemExit(f"{flag}: must be {'0 or more' if name in may_be_0 else 'above 0'}")
        if name in {"gamma", "tau", "epsilon_start", "epsilon_fraction"} and value > 1:
            raise SystemExit(f"{flag}: must be at most 1")
    if args.learning_starts >= args.total_timesteps:
        raise SystemExit(f"--learning-starts {args.learning_starts}: must be below --total-timesteps")


def load_checkpoint(args: Args, script: str) -> dict:
    """Return the checkpoint that `args` resumes. SystemExit, in one line, if it cannot go on with these settings."""
    saved = load_saved(args.resume, script)
    changed = {name for name, value in saved["args"].items() if value != getattr(args, name)}
    changed -= {"total_timesteps", "torch_threads", "resume"}
    if changed:
        raise SystemExit(f"{args.resume}: cannot be resumed with another {', '.join(sorted(changed))}")
    if "rows" not in saved or saved["step"] >= args.total_timesteps:
        raise SystemExit(f"{args.resume}: cannot be resumed: no checkpoint.pt, or no steps left to train")
    return saved


def torch_device(name: str) -> torch.device:
    """Return the device of that name; SystemExit if it is not there."""
    found = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        name = "cuda" if found["cuda"] else "cpu"
    if not found[name]:
        raise SystemExit(f"--device {name}: torch finds none here; use --device cpu")
    return torch.device(name)


# --- Training --------------------------------------------------------------------------------------------------------
def train(args: Args):
    """Train an agent, go on with its training (--resume), or only measure it (--evaluate)."""
    check(args)
    device = torch_device(args.device)
    args = replace(args, device=device.type, epsilon_start=args.epsilon_start if args.mask else 0.0)
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    generator = torch.Generator(device).manual_seed(args.seed)
    # The mask has a generator of its own, so that it shifts no other draw; on the CPU a seed's low 32 bits count.
    mask_generator = torch.Generator(device).manual_seed(args.seed + 2**31)
    env, eval_env = make_env(args.env_id), make_env(args.env_id)
    obs_dim, act_dim = env.observation_space.shape[0], env.action_space.shape[0]

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.float32)).to(device)

    low, high = tensor(env.action_space.low), tensor(env.action_space.high)
    half_range = (high - low) / 2
    actor, qf = Actor(obs_dim, low, high).to(device), TwinCritic(obs_dim, act_dim).to(device)

    def agent_policy(obs: np.ndarray, step: int) -> np.ndarray:  # without noise or mask
        with torch.inference_mode():
            return actor(tensor(obs)).cpu().numpy()

    if args.evaluate:
        saved = load_saved(args.evaluate, ALGORITHM)
        if saved["env_id"] != env.spec.id:
            raise SystemExit(f"{args.evaluate}: trained on {saved['env_id']}, not on {env.spec.id}")
        actor.load_state_dict(saved["actor"])
        returns = evaluate(eval_env, agent_policy, args.eval_episodes)
        print(f"return {returns.mean():.1f} +- {returns.std():.1f} over {args.eval_episodes} episodes")
        return

    # CAMEL: the prior. Its return is measured before anything is written: most faults show before there is a run.
    if args.mask:
        prior_policy = load_policy(Path(args.policy_file or default_policy_file(env.spec.id)), env)
        prior_return = evaluate(eval_env, prior_policy, args.eval_episodes).mean().item()
        print(f"return of the bare policy: {prior_return:.1f}")
    else:
        prior_policy, prior_return = lambda obs, step: np.zeros(0), float("nan")

    target_actor, target_qf = deepcopy(actor).requires_grad_(False), deepcopy(qf).requires_grad_(False)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=args.learning_rate, fused=True)
    qf_optimizer = torch.optim.Adam(qf.parameters(), lr=args.learning_rate, fused=True)
    parameters = [*actor.parameters(), *qf.parameters()]
    target_parameters = [*target_actor.parameters(), *target_qf.parameters()]
    capacity = min(args.buffer_size, args.total_timesteps)
    buffer = ReplayBuffer(capacity, obs_dim, act_dim, act_dim if args.mask else 0, device)
    print(f"replay buffer: {capacity} transitions, {buffer.rows.nbytes / 1e6:.0f} MB")

    parts = {"actor": actor, "qf": qf, "target_actor": target_actor, "target_qf": target_qf}
    parts |= {"actor_optimizer": actor_optimizer, "qf_optimizer": qf_optimizer}
    first_step, updates, progress, training_returns, warm_up_returns = 0, 0, [], [], []
    epsilon = args.epsilon_start
    about = {"script": ALGORITHM, "env_id": env.spec.id, "args": {**asdict(args), "resume": ""}}
    obs, _ = env.reset(seed=args.seed)
    if args.resume:
        run_dir, saved = Path(args.resume).parent, load_checkpoint(args, ALGORITHM)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        buffer.rows[: len(saved["rows"])], buffer.count = saved["rows"].to(device), saved["count"]
        generator.set_state(saved["generator"])
        mask_generator.set_state(saved["mask_generator"])
        first_step, updates, epsilon = saved["step"], saved["updates"], saved["epsilon"]
        progress, training_returns = saved["progress"], saved["training_returns"]
        warm_up_returns = saved["warm_up_returns"]
        env.unwrapped.np_random.bit_generator.state = saved["env_generator"]
        del saved  # it holds a second copy of the buffer
        obs, _ = env.reset()
    else:
        run_name = f"{env.spec.id}__{ALGORITHM}__{args.seed}__{datetime.now():%Y%m%d-%H%M%S-%f}"
        run_dir = Path("runs") / run_name
        run_dir.mkdir(parents=True)
        versions = {package.__name__: package.__version__ for package in (gym, np, torch)}
        (run_dir / "config.json").write_text(json.dumps({**asdict(args), **versions}, indent=2), encoding="utf-8")
    writer = SummaryWriter(run_dir, purge_step=first_step + 1)

    def log(step: int, scalars: dict[str, float]):
        for tag, value in scalars.items():
            writer.add_scalar(tag, value, step)

    prior, episode_step, episode_return = prior_policy(obs, 0), 0, 0.0
    last_checkpoint, started = first_step, time.time()

    for step in range(first_step, args.total_timesteps):
        # CAMEL: how strongly the box applies to this action
        if args.epsilon_schedule == "linear":
            epsilon = linear_epsilon(step, args)
        if episode_step == 0 or args.epsilon_masking != "episode":
            strength = mask_strength(epsilon, args.epsilon_masking, mask_generator, 1)

        with torch.inference_mode():
            box = action_box(tensor(prior), strength, low, high, args.mask_width)  # CAMEL
            if step < args.learning_starts:
                action = torch.lerp(*box, torch.rand(act_dim, generator=generator, device=device))
            else:
                noise = torch.randn(act_dim, generator=generator, device=device) * args.exploration_noise * half_range
                action = mask_action(actor(tensor(obs)), box, low, high, args.mask_mapping) + noise  # CAMEL
            action = action.clamp(*box).cpu().numpy()  # what is executed is what is stored
        next_obs, reward, terminated, truncated, _ = env.step(action.copy())
        steps_done = step + 1
        episode_step, episode_return = episode_step + 1, episode_return + float(reward)
        next_prior = prior_policy(next_obs, episode_step)  # CAMEL
        # A time limit is no terminal state: the target goes on to bootstrap from the true last observation.
        buffer.add(obs, action, reward, next_obs, terminated, prior, next_prior)
        obs, prior = next_obs, next_prior

        if step >= args.learning_starts:
            batch = buffer.sample(args.batch_size, generator)
            b_obs, b_action, b_reward, b_next_obs, b_terminated, b_prior, b_next_prior = batch
            b_strength = mask_strength(epsilon, args.epsilon_masking, mask_generator, args.batch_size, 1)  # CAMEL
            with torch.no_grad():
                next_box = action_box(b_next_prior, b_strength, low, high, args.mask_width)  # CAMEL
                noise = torch.randn(b_action.shape, generator=generator, device=device) * args.policy_noise
                noise = noise.clamp(-args.noise_clip, args.noise_clip) * half_range
                next_action = mask_action(target_actor(b_next_obs), next_box, low, high, args.mask_mapping)  # CAMEL
                next_action = (next_action + noise).clamp(*next_box)
                next_value = target_qf(b_next_obs, next_action).min(0).values
                target = b_reward + args.gamma * (1 - b_terminated) * next_value
            values = qf(b_obs, b_action)
            qf_losses = (values - target).square().mean((1, 2))
            qf_optimizer.zero_grad()
            qf_losses.sum().backward()
            qf_optimizer.step()
            updates += 1

            if updates % args.policy_frequency == 0:
                # CAMEL: the full box down to epsilon 0.1, since a critic that knows little outside would mislead
                obs_box = action_box(b_prior, min(1.0, 10 * epsilon), low, high, args.mask_width)
                actor_action = mask_action(actor(b_obs), obs_box, low, high, args.mask_mapping)  # CAMEL
                actor_loss = -qf(b_obs, actor_action, critics=1).mean()
                actor_optimizer.zero_grad()
                actor_loss.backward(inputs=list(actor.parameters()))  # the critic gets no gradient
                actor_optimizer.step()
                with torch.no_grad():
                    torch._foreach_lerp_(target_parameters, parameters, args.tau)
                if updates % (100 * args.policy_frequency) == 0:
                    log(steps_done, {f"losses/qf{i + 1}_values": values[i].mean().item() for i in (0, 1)})
                    log(steps_done, {f"losses/qf{i + 1}_loss": qf_losses[i].item() for i in (0, 1)})
                    log(steps_done, {"losses/qf_loss": qf_losses.mean().item(), "losses/actor_loss": actor_loss.item()})

        evaluation_due = args.eval_frequency and steps_done % args.eval_frequency == 0
        if evaluation_due or steps_done == args.total_timesteps:
            returns = evaluate(eval_env, agent_policy, args.eval_episodes)
            speed = (steps_done - first_step) / (time.time() - started)
            row = {"step": steps_done, "return_mean": returns.mean().item(), "return_std": returns.std().item()}
            row["training_return"] = sum(training_returns) / len(training_returns) if training_returns else float("nan")
            row |= {"epsilon": epsilon, "steps_per_second": speed}
            progress, training_returns = progress + [row], []
            with open(run_dir / "progress.csv", "w", newline="", encoding="utf-8") as file:
                table = csv.DictWriter(file, row)
                table.writeheader()
                table.writerows(progress)
            log(steps_done, {"eval/return_mean": row["return_mean"], "eval/return_std": row["return_std"]})
            log(steps_done, {"eval/prior_return": prior_return, "charts/SPS": speed})
            minutes = (args.total_timesteps - steps_done) / speed / 60
            status = f"step {steps_done}: return {returns.mean():.1f} +- {returns.std():.1f}, epsilon {epsilon:.2f}"
            print(f"{status}, {speed:.0f} steps/s, {minutes:.0f} min left", flush=True)

        if terminated or truncated:
            log(steps_done, {"charts/episodic_return": episode_return, "charts/episodic_length": episode_step})
            log(steps_done, {"camel/epsilon": epsilon, "camel/mask_strength": float(strength)})
            log(steps_done, {"camel/box_width": ((box[1] - box[0]) / (high - low)).mean().item()})
            training_returns.append(episode_return)
            if step < args.learning_starts:
                warm_up_returns.append(episode_return)
            elif args.epsilon_schedule == "adaptive":  # CAMEL
                reference = warm_up_returns or [prior_return]  # if no episode ended in the warm-up
                epsilon = adaptive_epsilon(epsilon, episode_return, episode_step, reference, args)
            if args.checkpoint_frequency and steps_done >= last_checkpoint + args.checkpoint_frequency:
                last_checkpoint = steps_done
                checkpoint = about | {name: part.state_dict() for name, part in parts.items()}
                checkpoint |= dict(step=steps_done, updates=updates, epsilon=epsilon, progress=progress)
                checkpoint |= dict(rows=buffer.rows[: len(buffer)].clone(), count=buffer.count)  # no view: it saves all
                checkpoint |= dict(generator=generator.get_state(), mask_generator=mask_generator.get_state())
                checkpoint["env_generator"] = env.unwrapped.np_random.bit_generator.state
                checkpoint |= dict(training_returns=training_returns, warm_up_returns=warm_up_returns)
                save(run_dir / "checkpoint.pt", checkpoint)
            obs, _ = env.reset()
            prior, episode_step, episode_return = prior_policy(obs, 0), 0, 0.0

    writer.close()
    # Written last: a run that has a model is complete.
    save(run_dir / "model.pt", about | {"actor": actor.state_dict(), "qf": qf.state_dict()})
    print(f"return {row['return_mean']:.1f} +- {row['return_std']:.1f}; the agent is in {run_dir / 'model.pt'}")


if __name__ == "__main__":
    args = tyro.cli(Args)
    if path := args.resume or args.evaluate:  # the saved run's settings are the defaults
        saved_args = load_saved(path, ALGORITHM)["args"] | {"resume": args.resume, "evaluate": args.evaluate}
        args = tyro.cli(Args, default=Args(**saved_args))
    train(args)
