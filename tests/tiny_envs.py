"""Small environments with known answers. `--env-id tiny_envs:Match-v0` works wherever this folder is importable."""

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box


class Match(gym.Env):
    """Return the observation as the action: 10 steps, each worth 1 minus the distance. The best return is 10."""

    def __init__(self):
        self.observation_space = Box(-2.0, 2.0, (1,), np.float64)
        self.action_space = Box(-2.0, 2.0, (1,), np.float32)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.target = self.np_random.uniform(-2, 2, 1)
        return self.target, {}

    def step(self, action):
        reward = 1.0 - abs(float(action[0]) - self.target[0])
        self.target = self.np_random.uniform(-2, 2, 1)
        return self.target, reward, False, False, {}


class Count(gym.Env):
    """obs = (episode, step). Even episodes end by a time limit after 7 steps, odd ones in a terminal state after 5."""

    def __init__(self, low=(-1.0, 0.0, 0.0), high=(1.0, 1.0, 1.0)):
        self.observation_space = Box(-np.inf, np.inf, (2,), np.float64)
        self.action_space = Box(np.array(low, np.float32), np.array(high, np.float32))
        self.episode = -1
        self.executed = []

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.steps = self.episode + 1, 0
        return np.array([self.episode, 0.0]), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.executed.append(action.copy())
        self.steps += 1
        terminated = self.episode % 2 == 1 and self.steps == 5
        return np.array([self.episode, self.steps], float), 1.0, terminated, self.steps == 7, {}


class Unbounded(Match):
    def __init__(self):
        super().__init__()
        self.action_space = Box(-np.inf, np.inf, (1,), np.float32)


gym.register("Match-v0", Match, max_episode_steps=10)
gym.register("Count-v0", Count)
gym.register("Unbounded-v0", Unbounded, max_episode_steps=10)
gym.register("HopperFor50-v0", "gymnasium.envs.mujoco.hopper_v4:HopperEnv", max_episode_steps=50)
