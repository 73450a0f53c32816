"""Hopper-v4: a policy written by a language model and screened by generate_policy.py.

Written by: qwen2.5-coder-1.5b-instruct at 127.0.0.1  Prompt: hopper_v4_qwen.prompt.txt (sha256 6721a3bc3a759915)  Date: 2026-11-30
Return: 999.0 +- 0.7 over 20 episodes, seeds 0..19  (zero action: 162.1 +- 62.1, uniform random: 17.0 +- 6.6)
Candidate 2.5 (round.number) of 16 in 2 rounds, its code unchanged.
Environment steps spent on all: 66358
"""
ENV_ID = "Hopper-v4"

import numpy as np
import math

def policy(obs: np.ndarray, step: int) -> np.ndarray:
    """obs: (11,) float. step: environment steps since reset. Returns (3,) float."""
    # Example control law: proportional-derivative control
    target_angle = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    current_angle = obs[2:8]
    angle_error = target_angle - current_angle
    velocity = obs[8:]
    kp = 10.0
    kd = 1.0
    dt = 0.008  # assuming dt is known

    # Add more complex control laws here
    if step % 10 == 0:
        kp += 0.1
        kd += 0.1

    return np.array([kp * angle_error[0] - kd * velocity[0],
                       kp * angle_error[1] - kd * velocity[1],
                       kp * angle_error[2] - kd * velocity[2]])
