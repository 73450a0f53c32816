"""What is SAC's own: equality with a plain SAC, the squashed Gaussian's density, the temperature, known optima."""

import math
from copy import deepcopy

import camel_sac
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import newest_run, same_weights, trained


def plain_sac(env_id, total_timesteps, learning_starts, batch_size, autotune=True, checkpoint=None, **_):
    """SAC as in CleanRL, without a word about masks, from scratch or from a checkpoint. Return its weights."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(1)
    env = gym.make(env_id)
    low, high = torch.from_numpy(env.action_space.low), torch.from_numpy(env.action_space.high)
    scale, bias = (high - low) / 2, (high + low) / 2
    obs_dim, act_dim = env.observation_space.shape[0], len(low)
    actor, qf = camel_sac.Actor(obs_dim, low, high), camel_sac.TwinCritic(obs_dim, act_dim)
    target_qf = deepcopy(qf)
    log_alpha = torch.zeros(1, requires_grad=True)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4, fused=True)
    qf_optimizer = torch.optim.Adam(qf.parameters(), lr=1e-3, fused=True)
    alpha_optimizer = torch.optim.Adam([log_alpha], lr=1e-3, fused=True)
    rows, updates, first_step = [], 0, 0
    obs, _ = env.reset(seed=1)
    if checkpoint:
        for name, part in [("actor", actor), ("qf", qf), ("target_qf", target_qf)]:
            part.load_state_dict(checkpoint[name])
        actor_optimizer.load_state_dict(checkpoint["actor_optimizer"])
        qf_optimizer.load_state_dict(checkpoint["qf_optimizer"])
        alpha_optimizer.load_state_dict(checkpoint["temperature_optimizer"])
        log_alpha.data.copy_(checkpoint["temperature"]["log_alpha"])
        generator.set_state(checkpoint["generator"])
        rows = list(checkpoint["rows"][:, : -2 * act_dim])
        updates, first_step = checkpoint["updates"], checkpoint["step"]
        env.unwrapped.np_random.bit_generator.state = checkpoint["env_generator"]
        obs, _ = env.reset()
    alpha = log_alpha.exp().item() if autotune else 0.2

    def get_action(x):
        x = torch.relu(actor.fc2(torch.relu(actor.fc1(x))))
        mean, log_std = actor.fc_mean(x), torch.tanh(actor.fc_logstd(x))
        normal = torch.distributions.Normal(mean, (-5 + 0.5 * (2 - -5) * (log_std + 1)).exp())
        x_t = mean + normal.scale * torch.randn(mean.shape, generator=generator)
        y_t = torch.tanh(x_t)
        log_prob = normal.log_prob(x_t) - torch.log(scale * (1 - y_t.pow(2)) + 1e-6)
        return y_t * scale + bias, log_prob.sum(-1, keepdim=True)

    for step in range(first_step, total_timesteps):
        with torch.no_grad():
            if step < learning_starts:
                action = torch.lerp(low, high, torch.rand(act_dim, generator=generator))
            else:
                action, _ = get_action(torch.from_numpy(obs).float())
        next_obs, reward, terminated, truncated, _ = env.step(action.numpy())
        row = obs, action, [reward], next_obs, [terminated]
        rows.append(torch.cat([torch.as_tensor(part).float() for part in row]))
        obs = next_obs
        if step >= learning_starts:
            batch = torch.stack(rows)[torch.randint(len(rows), (batch_size,), generator=generator)]
            b_obs, b_action, b_reward, b_next_obs, b_terminated = batch.split([obs_dim, act_dim, 1, obs_dim, 1], 1)
            with torch.no_grad():
                next_action, next_log_pi = get_action(b_next_obs)
                qf1_next, qf2_next = target_qf(b_next_obs, next_action)
                min_qf_next = torch.min(qf1_next, qf2_next) - alpha * next_log_pi
                target = b_reward + 0.99 * (1 - b_terminated) * min_qf_next
            qf1, qf2 = qf(b_obs, b_action)
            loss = ((qf1 - target) ** 2).mean() + ((qf2 - target) ** 2).mean()
            qf_optimizer.zero_grad()
            loss.backward()
            qf_optimizer.step()
            updates += 1
            if updates % 2 == 0:
                for _ in range(2):
                    pi, log_pi = get_action(b_obs)
                    actor_loss = (alpha * log_pi - torch.min(*qf(b_obs, pi))).mean()
                    actor_optimizer.zero_grad()
                    actor_loss.backward()
                    actor_optimizer.step()
                    if autotune:
                        with torch.no_grad():
                            _, log_pi = get_action(b_obs)
                        alpha_loss = (-log_alpha.exp() * (log_pi - act_dim)).mean()
                        alpha_optimizer.zero_grad()
                        alpha_loss.backward()
                        alpha_optimizer.step()
                        alpha = log_alpha.exp().item()
            with torch.no_grad():
                for parameter, target_parameter in zip(qf.parameters(), target_qf.parameters()):
                    target_parameter.lerp_(parameter, 0.005)
        if terminated or truncated:
            obs, _ = env.reset()
    return {"actor": actor.state_dict(), "qf": qf.state_dict()}


SETTINGS = dict(env_id="Hopper-v4", total_timesteps=350, learning_starts=250, batch_size=256, eval_episodes=1)


@pytest.mark.parametrize("autotune", [True, False])
def test_mask_off_is_plain_sac_to_the_bit(autotune):
    ours = trained(camel_sac, mask=False, autotune=autotune, **SETTINGS)
    assert same_weights(ours, plain_sac(**SETTINGS, autotune=autotune))


def test_at_epsilon_0_the_path_is_plain_sac_to_the_bit(write_policy, keep_checkpoint):
    """From a checkpoint of a masked run, taken when epsilon had reached 0, plain SAC ends in the same weights."""
    keep_checkpoint(camel_sac, lambda contents: contents["epsilon"] == 0)
    settings = SETTINGS | dict(epsilon_fraction=0.1, epsilon_schedule="linear", checkpoint_frequency=1)
    masked = trained(camel_sac, policy_file=write_policy("Hopper-v4", "return 0.5 * np.sin(obs[:3])"), **settings)
    checkpoint = torch.load("kept/checkpoint.pt")
    assert 260 <= checkpoint["step"] < 345
    assert same_weights(masked, plain_sac(**SETTINGS, checkpoint=checkpoint))


# --- The density of the squashed Gaussian


def actor_with(mean: float, log_std: float, low: float, high: float):
    """An actor of one action whose Gaussian is the same for every observation."""
    actor = camel_sac.Actor(1, torch.tensor([low]), torch.tensor([high]))
    for layer, bias in ((actor.fc_mean, mean), (actor.fc_logstd, math.atanh((log_std + 5) / 3.5 - 1))):
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.constant_(layer.bias, bias)
    return actor


def log_probs(actor, noise, monkeypatch):
    """The actions and log-densities that the standard normal draws `noise` lead to."""
    noise = torch.as_tensor(noise, dtype=torch.float32).reshape(-1, 1)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "randn", lambda *shape, **_: noise)
        with torch.no_grad():
            action, log_prob = actor.sample(torch.zeros(len(noise), 1), torch.Generator())
    return action[:, 0].double().numpy(), log_prob[:, 0].double().numpy()


@pytest.mark.parametrize("low, high", [(-0.4, 0.4), (-2.0, 2.0), (-0.3, 0.7), (1.0, 6.0)])
@pytest.mark.parametrize("mean, log_std", [(0.0, -1.0), (0.7, -0.3), (-1.0, -2.5)])
def test_density_integrates_to_one(monkeypatch, low, high, mean, log_std):
    action, log_prob = log_probs(actor_with(mean, log_std, low, high), np.linspace(-6, 6, 40001), monkeypatch)
    assert low <= action.min() and action.max() <= high
    assert np.trapezoid(np.exp(log_prob), action) == pytest.approx(1.0, abs=2e-3)


@pytest.mark.parametrize("low, high", [(-0.4, 0.4), (-2.0, 2.0), (-0.3, 0.7)])
@pytest.mark.parametrize("draw", [0.0, 1.0, -1.5])
def test_density_in_closed_form(monkeypatch, low, high, draw):
    """Normal density of the raw action over the slope of scale * tanh, at mean 0.3 and std exp(-0.5)."""
    (action,), (log_prob,) = log_probs(actor_with(0.3, -0.5, low, high), [draw], monkeypatch)
    raw, scale = 0.3 + math.exp(-0.5) * draw, (high - low) / 2
    normal = -(draw**2) / 2 + 0.5 - math.log(math.sqrt(2 * math.pi))
    assert action == pytest.approx(scale * math.tanh(raw) + (high + low) / 2, abs=1e-5)
    assert log_prob == pytest.approx(normal - math.log(scale * (1 - math.tanh(raw) ** 2)), abs=1e-4)


def test_deterministic_action_is_that_of_the_mean(monkeypatch):
    actor = actor_with(0.3, -0.5, -2.0, 2.0)
    (action,), _ = log_probs(actor, [0.0], monkeypatch)
    assert actor(torch.zeros(1, 1)).item() == pytest.approx(action)


# --- The temperature


def temperature_after(write_policy, **settings):
    settings = SETTINGS | dict(learning_starts=200, total_timesteps=500, checkpoint_frequency=1) | settings
    if "mask" not in settings:
        settings["policy_file"] = write_policy("Hopper-v4", "return np.zeros(3)")
    camel_sac.train(camel_sac.Args(**settings))
    return torch.load(newest_run() / "checkpoint.pt")["temperature"]["log_alpha"].exp().item()


def test_temperature_is_the_same_in_a_narrow_box(write_policy):
    masked = temperature_after(write_policy, mask_width=0.05, epsilon_schedule="adaptive")
    unmasked = temperature_after(write_policy, mask=False)
    assert masked == pytest.approx(unmasked, rel=0.05) and 0.5 < masked < 0.9


def test_fixed_temperature(write_policy):
    assert temperature_after(write_policy, autotune=False, total_timesteps=230) == 1.0  # untouched, and not used


def test_no_autotune_flag(run):
    flags = "--env-id tiny_envs:Match-v0 --no-mask --no-autotune --total-timesteps 60 --learning-starts 40".split()
    assert run("camel_sac.py", *flags).returncode == 0


@pytest.mark.parametrize("surplus, rises", [(0.01, True), (-0.01, False)])
def test_target_entropy_is_minus_the_number_of_actions(monkeypatch, surplus, rises):
    """The temperature rests where the log-probability is act_dim: 3 for Count-v0."""
    sample = camel_sac.Actor.sample

    def sample_at(self, obs, generator):
        action, log_prob = sample(self, obs, generator)
        return action, 0 * log_prob + 3 + surplus

    monkeypatch.setattr(camel_sac.Actor, "sample", sample_at)
    settings = dict(total_timesteps=60, learning_starts=40, eval_episodes=1, checkpoint_frequency=1)
    camel_sac.train(camel_sac.Args(env_id="tiny_envs:Count-v0", mask=False, **settings))
    log_alpha = torch.load(newest_run() / "checkpoint.pt")["temperature"]["log_alpha"].item()
    assert log_alpha > 0.005 if rises else log_alpha < -0.005


def test_temperature_moves_after_a_resume(small):
    settings = dict(env_id="Match-v0", mask=False, **small) | {"checkpoint_frequency": 20}
    camel_sac.train(camel_sac.Args(**settings))
    path = newest_run() / "checkpoint.pt"
    before = torch.load(path)["temperature"]["log_alpha"].item()
    camel_sac.train(camel_sac.Args(**settings | {"total_timesteps": 240}, resume=str(path)))
    after = torch.load(path)["temperature"]["log_alpha"].item()
    assert before < 0 and after < before - 0.01


@pytest.mark.parametrize(
    "prior, settings",
    [
        # The adaptive schedule holds here: outside so good a box SAC's own noise returns less than inside.
        ("helpful", {"epsilon_schedule": "linear"}),
        ("harmful", {"epsilon_fraction": 0.3}),
        ("harmful", {"epsilon_schedule": "linear", "epsilon_fraction": 0.3}),
    ],
)
def test_known_optimum_is_found(write_policy, prior, settings):
    """Match-v0 is worth 10; the harmful prior is worth about -3, and is overcome once epsilon is 0."""
    settings["policy_file"] = write_policy("Match-v0", "return obs + 0.1" if prior == "helpful" else "return -obs")
    settings |= dict(total_timesteps=1200, learning_starts=200, batch_size=64, gamma=0.5, policy_lr=1e-3)
    camel_sac.train(camel_sac.Args(env_id="Match-v0", **settings))
    rows = np.genfromtxt(newest_run() / "progress.csv", delimiter=",", names=True)
    assert rows["return_mean"].flat[-1] > 9


def test_pendulum_is_solved():
    """Actions of +-2. Solved is above -250; the zero action is worth about -1200."""
    settings = dict(total_timesteps=5000, learning_starts=1000, eval_frequency=0)
    camel_sac.train(camel_sac.Args(env_id="Pendulum-v1", mask=False, **settings))
    rows = np.genfromtxt(newest_run() / "progress.csv", delimiter=",", names=True)
    assert rows["return_mean"].flat[-1] > -250
