"""Hopper-v4: a harmful prior for the study `priors`, the opposite of what `llm_policies/hopper_v4.py` does."""

import numpy as np

from llm_policies.hopper_v4 import policy as hop  # found beside the training script

ENV_ID = "Hopper-v4"


def policy(obs: np.ndarray, step: int) -> np.ndarray:
    """obs: (11,) float. step: environment steps since reset (unused). Returns (3,) float in [-1, 1]."""
    return -hop(obs, step)
