"""HalfCheetah gallop on a clock: each joint target is a sine of the stride, the front leg at a fixed phase ahead of
the back leg; both legs kick, the front foot is held straight. PD control turns the targets into torques.
When the nose drops both thighs push further back, whose reaction lifts it again.

Written by: Claude (Anthropic)  Prompt: none kept; rules by the model, gains by a search  Date: 2026-11-30
Return: 4645.2 +- 159.9 over 20 episodes, seeds 0..19  (zero action: -0.0)
Speed 5.02 m/s, episode length 1000. Actions drawn uniformly in the box of mask_width 0.2: 3719 +- 166, length 1000.
About 8.1 million environment steps went into looking at rollouts and searching over the gains below.
"""
import math

import numpy as np

ENV_ID = "HalfCheetah-v4"

DT = 0.05           # s per environment step
FREQUENCY = 4.4     # Hz, strides per second
FRONT_LEAD = 2.6    # rad, front thigh ahead of back thigh
P, D = 1.36, 0.02   # torque per rad, per rad/s; without D it stumbles and loses over half its return
PITCH = 1.2         # rad of both thighs per rad of pitch (positive pitch: nose down)
PITCH_RATE = -0.03  # rad of both thighs per rad/s of pitch; spares the pitching of the gait itself

# One row per joint in observation and action order: middle and swing of its target in rad
# (positive moves the foot back), and its lead over the thigh of the same leg in rad.
# Targets may lie outside the joint range: they then ask for full torque.
BACK_LEG = (
    (0.78, 1.04, 0.0),    # thigh
    (0.28, 1.42, 2.26),   # shin
    (0.0, 1.31, -0.36),   # foot
)
FRONT_LEG = (
    (-0.53, 0.24, 0.0),   # thigh
    (-0.25, 1.01, 0.6),   # shin
    (0.0, 0.0, 0.0),      # foot, held straight
)


def policy(obs: np.ndarray, step: int) -> np.ndarray:
    """obs: (17,) float. step: environment steps since reset. Returns (6,) float in the action bounds."""
    o = obs.tolist()  # Python floats are faster than numpy scalars
    clock = 2 * math.pi * FREQUENCY * DT * step
    targets = [middle + swing * math.sin(clock + lead) for middle, swing, lead in BACK_LEG]
    targets += [middle + swing * math.sin(clock + FRONT_LEAD + lead) for middle, swing, lead in FRONT_LEG]
    lean = PITCH * o[1] + PITCH_RATE * o[10]
    targets[0] += lean
    targets[3] += lean
    torque = [P * (target - o[2 + joint]) - D * o[11 + joint] for joint, target in enumerate(targets)]
    return np.clip(torque, -1, 1)
