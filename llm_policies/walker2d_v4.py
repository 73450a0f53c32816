"""Walker2d-v4: walk forward on a clock, after SIMBICON (Yin, Loken and van de Panne 2007).

The legs take turns. The swing leg lifts and reaches forward, further when the hip is ahead of the standing foot or
too fast; the standing thigh holds the torso's lean and the standing foot steers the capture point.

Written by: Claude (Anthropic)  Prompt: none kept; rules by the model, gains by a search  Date: 2026-11-30
Return: 3259.6 +- 41.6 over 20 episodes, seeds 0..19  (zero action: 92.5)
Speed 2.28 m/s, episode length 1000. With each action drawn uniformly in the box of mask_width 0.2 around this policy's:
3327.6 +- 39.9, 2.33 m/s, length 1000. Improvement: 2.8 million environment steps, most in CMA-ES over these gains.
"""
import math

import numpy as np

ENV_ID = "Walker2d-v4"

STEP_TIME = 33  # environment steps of 0.008 s that each leg swings
SPEED = 1.6  # m/s, wanted
PITCH, PITCH_KP, PITCH_KD = -0.34, 4.0, 0.13  # lean back: a thigh cannot swing ahead of the torso's line
REACH, HIP_TO_REACH, SPEED_TO_REACH = 0.36, 0.46, 0.07  # rad ahead of the vertical, per metre, per m/s
THIGH_KP, THIGH_KD = 2.6, 0.29
LIFT_LEG, LAND_LEG, STANCE_LEG = -1.2, -0.06, -0.42  # rad
LEG_KP, LEG_KD = 2.9, 0.28
BALANCE_POINT, BALANCE_GAIN, PREVIEW = 0.22, 3.1, 0.2  # m ahead of the ankle, foot torque per metre, s
SWING_FOOT, FOOT_KP, FOOT_KD = 0.25, 1.1, 0.12  # rad above level
RIGHT, LEFT = 2, 5  # where each leg's thigh, leg and foot angles start in obs; their velocities are 9 further on


def policy(obs: np.ndarray, step: int) -> np.ndarray:
    """obs: (17,) float. step: environment steps since reset. Returns (6,) float in [-1, 1]."""
    obs = obs.tolist()
    pitch, vx, pitch_rate = obs[1], obs[8], obs[10]
    right_swings = step // STEP_TIME % 2 == 0
    lifting = step % STEP_TIME < STEP_TIME / 2
    swing, stance = (RIGHT, LEFT) if right_swings else (LEFT, RIGHT)

    thigh, leg, foot = obs[stance : stance + 3]
    thigh_rate, leg_rate, foot_rate = obs[stance + 9 : stance + 12]
    # Joints turn against the pitch, so pitch - thigh is the thigh's angle from the vertical.
    hip = 0.45 * math.sin(pitch - thigh) + 0.5 * math.sin(pitch - thigh - leg)  # m ahead of the standing ankle
    stance_torques = (
        -PITCH_KP * (pitch - PITCH) - PITCH_KD * pitch_rate,
        LEG_KP * (STANCE_LEG - leg) - LEG_KD * leg_rate,
        -BALANCE_GAIN * (hip - BALANCE_POINT + PREVIEW * (vx - SPEED)) - FOOT_KD * foot_rate,  # toe down if ahead
    )

    thigh, leg, foot = obs[swing : swing + 3]
    thigh_rate, leg_rate, foot_rate = obs[swing + 9 : swing + 12]
    reach = REACH + HIP_TO_REACH * hip + SPEED_TO_REACH * (vx - SPEED)
    leg_angle = LIFT_LEG if lifting else LAND_LEG
    swing_torques = (
        THIGH_KP * (pitch + reach - thigh) - THIGH_KD * thigh_rate,
        LEG_KP * (leg_angle - leg) - LEG_KD * leg_rate,
        FOOT_KP * (pitch - thigh - leg + SWING_FOOT - foot) - FOOT_KD * foot_rate,
    )
    torques = swing_torques + stance_torques if right_swings else stance_torques + swing_torques
    return np.clip(torques, -1.0, 1.0)
