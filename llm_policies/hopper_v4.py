"""Hopper-v4: hop forward, the classic three-part control of a one-legged hopper, for the whole episode.

The thigh always keeps the torso level. On the ground the leg bends while falling and thrusts while rising, and the
foot steers the capture point (centre of mass + time * velocity). In the air the leg folds, then stretches to land.

Written by: Claude (Anthropic)  Prompt: none kept; rules by the model, gains by a search  Date: 2026-11-30
Return: 2621.9 +- 2.4 over 20 episodes, seeds 0..19  (zero action: 162.1)
Speed 1.62 m/s, episode length 1000. With each action drawn uniformly in the box of mask_width 0.2 around this policy's:
2625.9 +- 22.7, 1.63 m/s, length 1000. Improvement: 15.5 million environment steps, most in CMA-ES over these gains.
"""
import math

import numpy as np

ENV_ID = "Hopper-v4"

SPEED = 1.3  # m/s, wanted
PITCH_KP, PITCH_KD = 2.0, 0.6  # thigh torque against torso pitch; the torso is lighter than the leg and tips first
SPEED_TO_THIGH = 0.1  # in the air
SINKING_THIGH, RISING_THIGH = -0.34, 0.09  # thigh torque added on the ground
LEG_KP, LEG_KD = 1.5, 0.28
SINKING_LEG, RISING_LEG = -0.44, 0.21  # leg angle on the ground; the joint stops at 0, so 0.21 thrusts
FOLDED_LEG, LANDING_LEG = -0.76, 0.0  # leg angle in the air: on the way up, on the way down
BALANCE_POINT, BALANCE_GAIN = 0.1, 2.5  # m ahead of the ankle; foot torque per metre
PREVIEW = 0.38  # s
PUSH_OFF = 0.5  # foot torque while rising
LANDING_FOOT, FOOT_KP, FOOT_KD = -0.1, 0.8, 0.08  # rad, toe below level
GROUND = 0.08  # m: height of the foot's axis that counts as contact; its radius is 0.06


def policy(obs: np.ndarray, step: int) -> np.ndarray:
    """obs: (11,) float. step: environment steps since reset (unused). Returns (3,) float in [-1, 1]."""
    z, pitch, thigh, leg, foot, vx, vz, pitch_rate, _, leg_rate, foot_rate = obs.tolist()

    # Angles from the vertical (the joints turn against the pitch) and positions relative to the torso.
    thigh_tilt, leg_tilt = pitch - thigh, pitch - thigh - leg
    hip = -0.2 * math.sin(pitch)
    knee = hip - 0.45 * math.sin(thigh_tilt)
    ankle = knee - 0.5 * math.sin(leg_tilt)
    ankle_z = z - 0.2 * math.cos(pitch) - 0.45 * math.cos(thigh_tilt) - 0.5 * math.cos(leg_tilt)
    foot_slope = math.sin(leg_tilt - foot)
    on_ground = min(ankle_z - 0.26 * foot_slope, ankle_z + 0.13 * foot_slope) < GROUND  # toe, heel

    thigh_torque = -PITCH_KP * pitch - PITCH_KD * pitch_rate
    foot_torque = -FOOT_KD * foot_rate
    if on_ground:
        # Masses of thigh, leg, foot and the whole in kg; the torso's own offset is 0.
        com = (4.06 * (hip + knee) / 2 + 2.78 * (knee + ankle) / 2 + 5.32 * (ankle + 0.065)) / 15.82
        # Toe down if ahead.
        foot_torque -= BALANCE_GAIN * (com - ankle - BALANCE_POINT + PREVIEW * (vx - SPEED))
        if vz < 0:
            thigh_torque += SINKING_THIGH
            leg_angle = SINKING_LEG
        else:
            thigh_torque += RISING_THIGH
            leg_angle = RISING_LEG
            foot_torque -= PUSH_OFF
    else:
        thigh_torque += SPEED_TO_THIGH * (vx - SPEED)
        leg_angle = FOLDED_LEG if vz > 0 else LANDING_LEG
        foot_torque += FOOT_KP * (leg_tilt + LANDING_FOOT - foot)
    leg_torque = LEG_KP * (leg_angle - leg) - LEG_KD * leg_rate
    return np.clip([thigh_torque, leg_torque, foot_torque], -1.0, 1.0)
