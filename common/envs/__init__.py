"""Environments. Importing this package registers `CartPoleContinuous-v0` with Gymnasium."""

import gymnasium as gym

from common.envs.flat import FlatEnv, make_env
from common.envs.normalize import RewardScaling, RunningNorm

__all__ = ["FlatEnv", "RewardScaling", "RunningNorm", "make_env"]

if "CartPoleContinuous-v0" not in gym.registry:
    gym.register(
        id="CartPoleContinuous-v0",
        entry_point="common.envs.cartpole:CartPoleContinuous",
        max_episode_steps=500,
    )
