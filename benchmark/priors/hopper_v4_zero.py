"""Hopper-v4: a prior without content for the study `priors`, the zero action."""

import numpy as np

ENV_ID = "Hopper-v4"


def policy(obs: np.ndarray, step: int) -> np.ndarray:
    """obs: (11,) float. step: environment steps since reset (unused). Returns (3,) zeros."""
    return np.zeros(3)
