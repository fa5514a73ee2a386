"""Environments. Importing this package registers those that are our own with Gymnasium."""

import gymnasium as gym

from common.envs.flat import FlatEnv, make_env
from common.envs.normalize import RewardScaling, RunningNorm

__all__ = ["FlatEnv", "RewardScaling", "RunningNorm", "make_env"]

for name, entry_point, max_episode_steps in (
    ("CartPoleContinuous-v0", "common.envs.cartpole:CartPoleContinuous", 500),
    ("CartPoleNoVelocity-v0", "common.envs.partial:CartPoleNoVelocity", 500),
    ("PendulumNoVelocity-v0", "common.envs.partial:PendulumNoVelocity", 200),
    ("RepeatFirst-v0", "common.envs.partial:RepeatFirst", None),
):
    if name not in gym.registry:
        gym.register(id=name, entry_point=entry_point, max_episode_steps=max_episode_steps)
