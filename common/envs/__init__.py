"""Environments. Importing this package registers those that are our own with Gymnasium."""

import gymnasium as gym

from common.envs.flat import FlatEnv
from common.envs.images import ImageEnv
from common.envs.make import make_env
from common.envs.normalize import RewardScaling, RunningNorm

__all__ = ["FlatEnv", "ImageEnv", "RewardScaling", "RunningNorm", "make_env"]

for name, entry_point, max_episode_steps in (
    ("CartPoleContinuous-v0", "common.envs.cartpole:CartPoleContinuous", 500),
    ("CartPoleContinuousNoVelocity-v0", "common.envs.partial:CartPoleContinuousNoVelocity", 500),
    ("SetPoint-v0", "common.envs.setpoint:SetPoint", 200),
    ("CartPoleNoVelocity-v0", "common.envs.partial:CartPoleNoVelocity", 500),
    ("PendulumNoVelocity-v0", "common.envs.partial:PendulumNoVelocity", 200),
    ("RepeatFirst-v0", "common.envs.partial:RepeatFirst", None),
    ("Catch-v0", "common.envs.pixels:Catch", None),
    ("CartPolePixels-v0", "common.envs.pixels:CartPolePixels", 500),
):
    if name not in gym.registry:
        gym.register(id=name, entry_point=entry_point, max_episode_steps=max_episode_steps)
