"""Hopper-v4: stand still for the whole episode.

The foot torque keeps the capture point (centre of mass + velocity / omega) over the foot; thigh and leg hold a
straight pose, and the thigh also turns the torso upright.

Stiff enough to stand whatever constant corner of the box of mask_width 0.3 is added to its torques.

Written by: Claude (Anthropic)  Prompt: none kept; rules by the model, gains by a search  Date: 2026-11-30
Return: 1016.3 +- 0.7 over 20 episodes, seeds 0..19  (zero action: 162.1)
Speed 0.02 m/s, episode length 1000. With each action drawn uniformly in the box of mask_width 0.2 around this policy's:
1016.1 +- 0.7. Improvement: about 800000 environment steps, most of them to check the stiffness.
"""
import math

import numpy as np

ENV_ID = "Hopper-v4"

BALANCE_POINT = 0.08  # m ahead of the ankle: where the capture point should be
BALANCE_GAIN = 16.0  # foot torque per metre of error
PREVIEW = 0.25  # s: 1 / omega of an inverted pendulum 0.6 m high
THIGH_KP, THIGH_KD = 1.0, 0.2
LEG_KP, LEG_KD = 1.5, 0.3
FOOT_KD = 0.1
TORSO_KP, TORSO_KD = 1.0, 0.2
THIGH_ANGLE, LEG_ANGLE = 0.0, -0.1  # rad


def policy(obs: np.ndarray, step: int) -> np.ndarray:
    """obs: (11,) float. step: environment steps since reset (unused). Returns (3,) float in [-1, 1]."""
    _, pitch, thigh, leg, _, vx, _, pitch_rate, thigh_rate, leg_rate, foot_rate = obs.tolist()

    # Horizontal offsets from the torso; a joint angle turns against the pitch.
    sin_thigh, sin_leg = math.sin(pitch - thigh), math.sin(pitch - thigh - leg)
    hip = -0.2 * math.sin(pitch)
    knee = hip - 0.45 * sin_thigh
    ankle = knee - 0.5 * sin_leg
    # Masses of thigh, leg, foot and the whole (kg), each at its own centre.
    com = (4.06 * (hip - 0.225 * sin_thigh) + 2.78 * (knee - 0.25 * sin_leg) + 5.32 * (ankle + 0.065)) / 15.82
    capture_error = com + PREVIEW * vx - ankle - BALANCE_POINT

    thigh_torque = THIGH_KP * (THIGH_ANGLE - thigh) - THIGH_KD * thigh_rate
    thigh_torque -= TORSO_KP * pitch + TORSO_KD * pitch_rate
    leg_torque = LEG_KP * (LEG_ANGLE - leg) - LEG_KD * leg_rate
    foot_torque = -BALANCE_GAIN * capture_error - FOOT_KD * foot_rate  # toe down when tipping forward
    return np.clip([thigh_torque, leg_torque, foot_torque], -1.0, 1.0)
