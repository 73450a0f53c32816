"""What is TD3's own: equality with a plain TD3, target smoothing, delayed updates, and known optima."""

from copy import deepcopy

import camel_td3
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import newest_run, same_weights, trained


def plain_td3(env_id, total_timesteps, learning_starts, batch_size, checkpoint=None, **_):
    """TD3 as in CleanRL, without a word about masks, from scratch or from a checkpoint. Return its weights."""
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(1)
    env = gym.make(env_id)
    low, high = torch.from_numpy(env.action_space.low), torch.from_numpy(env.action_space.high)
    scale = (high - low) / 2
    obs_dim, act_dim = env.observation_space.shape[0], len(low)
    actor, qf = camel_td3.Actor(obs_dim, low, high), camel_td3.TwinCritic(obs_dim, act_dim)
    target_actor, target_qf = deepcopy(actor), deepcopy(qf)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4, fused=True)
    qf_optimizer = torch.optim.Adam(qf.parameters(), lr=3e-4, fused=True)
    rows, updates, first_step = [], 0, 0
    obs, _ = env.reset(seed=1)
    if checkpoint:
        for name, part in [("actor", actor), ("qf", qf), ("target_actor", target_actor), ("target_qf", target_qf)]:
            part.load_state_dict(checkpoint[name])
        actor_optimizer.load_state_dict(checkpoint["actor_optimizer"])
        qf_optimizer.load_state_dict(checkpoint["qf_optimizer"])
        generator.set_state(checkpoint["generator"])
        rows, updates, first_step = (
            list(checkpoint["rows"][:, : -2 * act_dim]),
            checkpoint["updates"],
            checkpoint["step"],
        )
        env.unwrapped.np_random.bit_generator.state = checkpoint["env_generator"]
        obs, _ = env.reset()

    for step in range(first_step, total_timesteps):
        if step < learning_starts:
            action = torch.lerp(low, high, torch.rand(act_dim, generator=generator))
        else:
            with torch.no_grad():
                action = actor(torch.from_numpy(obs).float())
            action = (action + torch.randn(act_dim, generator=generator) * 0.1 * scale).clamp(low, high)
        next_obs, reward, terminated, truncated, _ = env.step(action.numpy())
        row = [
            torch.from_numpy(obs),
            action,
            torch.tensor([reward]),
            torch.from_numpy(next_obs),
            torch.tensor([terminated]),
        ]
        rows.append(torch.cat([part.float() for part in row]))
        obs = next_obs
        if step >= learning_starts:
            batch = torch.stack(rows)[torch.randint(len(rows), (batch_size,), generator=generator)]
            b_obs, b_action, b_reward, b_next_obs, b_terminated = batch.split([obs_dim, act_dim, 1, obs_dim, 1], 1)
            with torch.no_grad():
                noise = (torch.randn(batch_size, act_dim, generator=generator) * 0.2).clamp(-0.5, 0.5) * scale
                next_action = (target_actor(b_next_obs) + noise).clamp(low, high)
                qf1_next, qf2_next = target_qf(b_next_obs, next_action)
                target = b_reward + 0.99 * (1 - b_terminated) * torch.minimum(qf1_next, qf2_next)
            qf1, qf2 = qf(b_obs, b_action)
            loss = ((qf1 - target) ** 2).mean() + ((qf2 - target) ** 2).mean()
            qf_optimizer.zero_grad()
            loss.backward()
            qf_optimizer.step()
            updates += 1
            if updates % 2 == 0:
                actor_loss = -qf(b_obs, actor(b_obs), critics=1).mean()
                actor_optimizer.zero_grad()
                actor_loss.backward()
                actor_optimizer.step()
                with torch.no_grad():
                    for network, target_network in ((actor, target_actor), (qf, target_qf)):
                        for parameter, target in zip(network.parameters(), target_network.parameters()):
                            target.lerp_(parameter, 0.005)
        if terminated or truncated:
            obs, _ = env.reset()
    return {"actor": actor.state_dict(), "qf": qf.state_dict()}


SETTINGS = dict(env_id="Hopper-v4", total_timesteps=400, learning_starts=250, batch_size=256, eval_episodes=1)


@pytest.fixture
def camel():
    return camel_td3


def test_mask_off_is_plain_td3_to_the_bit():
    ours = trained(camel_td3, mask=False, **SETTINGS)
    assert same_weights(ours, plain_td3(**SETTINGS))


@pytest.mark.parametrize("masking", ["step", "episode", "anneal"])
def test_at_epsilon_0_the_path_is_plain_td3_to_the_bit(write_policy, keep_checkpoint, masking):
    """From a checkpoint of a masked run, taken when epsilon had reached 0, plain TD3 ends in the same weights."""
    keep_checkpoint(camel_td3, lambda contents: contents["epsilon"] == 0)
    settings = SETTINGS | dict(epsilon_fraction=0.2, epsilon_schedule="linear", checkpoint_frequency=1)
    settings |= dict(epsilon_masking=masking)
    masked = trained(camel_td3, policy_file=write_policy("Hopper-v4", "return 0.5 * np.sin(obs[:3])"), **settings)
    checkpoint = torch.load("kept/checkpoint.pt")
    assert 280 <= checkpoint["step"] < 350
    assert same_weights(masked, plain_td3(**SETTINGS, checkpoint=checkpoint))
    assert not same_weights(masked, plain_td3(**SETTINGS))


def test_twin_critic_is_two_independent_networks():
    torch.manual_seed(0)
    qf = camel_td3.TwinCritic(3, 2)
    obs, action = torch.randn(7, 3), torch.randn(7, 2)
    for i in (0, 1):
        x = torch.cat([obs, action], 1)
        for layer, (weight, bias) in enumerate(zip(qf.weights, qf.biases)):
            x = (torch.relu(x) if layer else x) @ weight[i] + bias[i, 0]
        assert torch.allclose(qf(obs, action)[i], x, atol=1e-6)
    assert torch.allclose(qf(obs, action, critics=1)[0], qf(obs, action)[0], atol=1e-6)
    for weight, bias in zip(qf.weights, qf.biases):  # nn.Linear's bound, filled by both critics, and differently
        bound = weight.shape[1] ** -0.5
        assert not torch.equal(weight[0], weight[1])
        assert bound * 0.9 < weight.abs().max() <= bound and bias.abs().max() <= bound


@pytest.mark.parametrize("env_id", ["tiny_envs:Count-v0", "Humanoid-v4"])
def test_smoothing_noise_is_per_row_and_dimension_and_scaled(targets, env_id):
    camel_td3.train(
        camel_td3.Args(env_id=env_id, mask=False, total_timesteps=120, learning_starts=100, eval_episodes=1)
    )
    space = gym.make(env_id).action_space
    middle, half_range = (torch.from_numpy(bound) / 2 for bound in (space.high + space.low, space.high - space.low))
    noise = torch.cat([(action - masked) / half_range for _, _, masked, action in targets])
    # Noise of up to 0.5 half ranges cannot meet a bound from here.
    free = torch.cat([((masked - middle) / half_range).abs() <= 0.5 for _, _, masked, _ in targets])
    assert noise.abs().max() <= 0.5 + 1e-6
    for column in range(noise.shape[1]):
        values = noise[free[:, column], column]
        assert len(values) > 300 and len(values.unique()) > 0.9 * len(values)
        assert values.std().item() == pytest.approx(0.197, rel=0.1)  # a normal of 0.2, cut off at 2.5 std
    both = noise[free[:, 0] & free[:, 1]]
    assert abs(np.corrcoef(both[:, 0], both[:, 1])[0, 1]) < 0.15


@pytest.mark.parametrize("policy_frequency", [1, 2, 3])
def test_delayed_actor_updates_leave_the_critic_alone(monkeypatch, policy_frequency):
    optimizers, steps = [], []

    class Adam(torch.optim.Adam):
        def __init__(self, parameters, **settings):
            super().__init__(parameters, **settings)
            optimizers.append(self)

        def step(self):
            actor_optimizer, qf_optimizer = optimizers
            steps.append("actor" if self is actor_optimizer else "critic")
            gradients = [parameter.grad.clone() for parameter in qf_optimizer.param_groups[0]["params"]]
            if self is actor_optimizer:  # the critic's gradients are those of its own last update
                assert all(torch.equal(a, b) for a, b in zip(gradients, optimizers_gradients[-1]))
            else:
                optimizers_gradients.append(gradients)
            super().step()

    optimizers_gradients = []
    monkeypatch.setattr(torch.optim, "Adam", Adam)
    settings = dict(total_timesteps=120, learning_starts=100, eval_episodes=1, policy_frequency=policy_frequency)
    camel_td3.train(camel_td3.Args(env_id="tiny_envs:Match-v0", mask=False, **settings))
    assert steps.count("critic") == 20 and steps.count("actor") == 20 // policy_frequency


@pytest.mark.parametrize(
    "prior, settings",
    [
        ("plain", {"mask": False}),
        ("helpful", {}),
        ("harmful", {"epsilon_fraction": 0.3}),
        ("harmful", {"epsilon_schedule": "linear", "epsilon_fraction": 0.3}),
        ("harmful", {"epsilon_schedule": "linear", "epsilon_fraction": 0.3, "epsilon_masking": "anneal"}),
    ],
)
def test_known_optimum_is_found(write_policy, prior, settings):
    """Match-v0 is worth 10; the harmful prior is worth about -3, and is overcome once epsilon is 0."""
    if prior != "plain":
        settings["policy_file"] = write_policy("Match-v0", "return obs + 0.1" if prior == "helpful" else "return -obs")
    settings |= dict(total_timesteps=1500, learning_starts=300, batch_size=64, gamma=0.5, learning_rate=1e-3)
    camel_td3.train(camel_td3.Args(env_id="Match-v0", **settings))
    rows = np.genfromtxt(newest_run() / "progress.csv", delimiter=",", names=True)
    assert rows["return_mean"].flat[-1] > 9
