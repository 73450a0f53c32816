"""Ant trot on a clock: every hip swings its leg forward and back, the right side half a cycle after the left.
The front legs reach out high by opening the knee, then pull by closing it; the back feet stay low and kick by opening it.
PD control makes the torques. To head along +x, the stride grows on the side the body has turned to and shrinks on the other.

Written by: Claude (Anthropic)  Prompt: none kept; rules by the model, gains by a search  Date: 2026-11-30
Return: 3046.4 +- 27.5 over 20 episodes, seeds 0..19  (zero action: 1000.9)
Speed 2.44 m/s, episode length 1000. Actions drawn uniformly in the box of mask_width 0.2: 2683 +- 45, length 1000.
About 5.2 million environment steps went into looking at rollouts and searching over the gains below. It can fall, rarely.
"""
import math

import numpy as np

ENV_ID = "Ant-v4"

DT = 0.05               # s per environment step
FREQUENCY = 2.5         # Hz, strides per second
RIGHT_LEAD = math.pi    # rad, right legs ahead of left legs
BACK_LEAD = 4.1         # rad, back legs ahead of front legs (a pure trot would be pi, and flips over)
STRIDE = 0.34           # rad, hip swing to each side
KNEE_MID = 0.83         # rad below the horizontal; opening the knee lifts and stretches the leg
KNEE_SWING = 0.58       # rad
FRONT_KNEE_LEAD = 2.5   # rad, front knee ahead of its hip
BACK_KNEE_LEAD = 3.7    # rad, back knee ahead of its hip
HIP_P, HIP_D = 1.0, 0.14   # torque per rad, per rad/s
KNEE_P, KNEE_D = 1.6, 0.1
HEADING = 0.85          # stride change per rad of yaw

# One row per leg in observation order: front or back, left or right (x forward, y left),
# the sign of the ankle angle that lowers the foot, the index of the hip torque in the action.
LEGS = (
    (+1, +1, +1, 2),  # front left
    (-1, +1, -1, 4),  # back left
    (-1, -1, -1, 6),  # back right
    (+1, -1, +1, 0),  # front right
)


def policy(obs: np.ndarray, step: int) -> np.ndarray:
    """obs: (27,) float. step: environment steps since reset. Returns (8,) float in the action bounds."""
    o = obs.tolist()  # Python floats are faster than numpy scalars
    w, x, y, z = o[1:5]
    yaw = math.atan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z))
    turn = HEADING * yaw  # positive: the body points left, so the left legs take longer strides
    clock = 2 * math.pi * FREQUENCY * DT * step
    torque = np.zeros(8)
    for leg, (front, left, down, action) in enumerate(LEGS):
        phase = clock + (RIGHT_LEAD if left < 0 else 0) + (BACK_LEAD if front < 0 else 0)
        lead = FRONT_KNEE_LEAD if front > 0 else BACK_KNEE_LEAD
        hip = -left * STRIDE * (1 + left * turn) * math.sin(phase)  # negative on the left is forward
        knee = down * (KNEE_MID + KNEE_SWING * math.sin(phase + lead))
        torque[action] = HIP_P * (hip - o[5 + 2 * leg]) - HIP_D * o[19 + 2 * leg]
        torque[action + 1] = KNEE_P * (knee - o[6 + 2 * leg]) - KNEE_D * o[20 + 2 * leg]
    return np.clip(torque, -1, 1)
