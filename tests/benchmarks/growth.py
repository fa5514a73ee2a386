"""Steps/s against the number of environments, the width of the networks and that of the observation.

One factor at a time leaves the base, CartPole-v1 with `ppo_discrete.py`'s 8 environments x 128 steps and
`ppo_gpu_batched.py`'s 256 x 32. Its observation is filled up with zeros, so that only its width changes.
Both are timed in CPU seconds of one thread: what calls cost and what arithmetic costs does not depend on how
many cores share it, and threads that wait for each other do not blur it.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from common.envs.batched import BATCHED_ENVS, BatchedCartPole

# The most environments of each script: an eager step of more would take as long as so many steps of one.
MOST = {"ppo_discrete": 256, "ppo_gpu_batched": 4096}
FACTORS = {
    "num_envs": (1, 8, 64, 256, 1024, 4096),
    "hidden_dim": (64, 256, 1024),
    "obs_dim": (4, 32, 100, 1000),
}
PADDED_FROM = 4  # words of the cart-pole's observation
ROWS = 20_480  # environment steps of a measurement, in at least 4 rollouts and at most 80


def padded_space(obs_dim: int) -> gym.spaces.Box:
    """The cart-pole's observation and zeros."""
    space = BatchedCartPole.single_observation_space
    more = np.zeros(obs_dim - PADDED_FROM, np.float32)
    return gym.spaces.Box(np.concatenate([space.low, more]), np.concatenate([space.high, more]))


def padded_cart_pole(obs_dim: int) -> gym.Env:
    env, more = gym.make("CartPole-v1"), np.zeros(obs_dim - PADDED_FROM, np.float32)
    return gym.wrappers.TransformObservation(
        env, lambda obs: np.concatenate([obs, more]), padded_space(obs_dim)
    )


def padded_batched(width: int) -> type[BatchedCartPole]:
    class BatchedPaddedCartPole(BatchedCartPole):
        single_observation_space = padded_space(width)

        def observe(self, state: Tensor) -> Tensor:
            return nn.functional.pad(state, (0, width - self.state_dim))

    return BatchedPaddedCartPole


@contextlib.contextmanager
def padded_envs(obs_dim: int) -> Iterator[str]:
    """The id under which both kinds of script find a cart-pole of that width meanwhile."""
    env_id = f"PaddedCartPole{obs_dim}-v0"
    gym.register(env_id, lambda: padded_cart_pole(obs_dim))
    try:
        with mock.patch.dict(BATCHED_ENVS, {env_id: padded_batched(obs_dim)}):
            yield env_id
    finally:
        del gym.registry[env_id]


def rate(script: str, quick: bool, obs_dim: int = PADDED_FROM, **flags: Any) -> float:
    """Steps/s of a script with these flags off its base."""
    from tests.benchmarks import speed

    args = importlib.import_module(script).Args(**flags)
    rows = args.num_envs * args.num_steps
    rollouts = 4 if quick else min(80, max(4, ROWS // rows))
    with padded_envs(obs_dim) as env_id:
        flags = {**flags, "env_id": env_id, "total_timesteps": rollouts * rows}
        if script == "ppo_gpu_batched":
            setting = speed.Setting(script, "", {**flags, "threads": 1}, False)
            return speed.run_batched(setting, 0, time.process_time).rate
        return speed.run_script(speed.Setting(script, "", flags, False), 0).rate


def measure(quick: bool) -> list[dict[str, Any]]:
    """One row for each value of a factor, one run each; the base is measured once for each script."""
    threads = torch.get_num_threads()
    bases = {script: rate(script, quick) for script in MOST}
    rows = []
    for factor, values in FACTORS.items():
        for value in values:
            row: dict[str, Any] = {"factor": factor, "value": value}
            for script, most in MOST.items():
                if value == getattr(importlib.import_module(script).Args(), factor, PADDED_FROM):
                    row[script] = bases[script]
                elif factor != "num_envs" or value <= most:
                    row[script] = rate(script, quick, **{factor: value})
            rows.append(row)
            print(factor, value, {script: round(row[script]) for script in MOST if script in row}, flush=True)
    torch.set_num_threads(threads)
    return rows


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows as Markdown."""
    lines = ["| size | value | `ppo_discrete.py` | `ppo_gpu_batched.py` |", "|" + " --- |" * 4]
    for row in rows:
        cells = [f"`{row['factor']}`", f"{row['value']:,}"]
        cells += [f"{row[script]:,.0f}" if script in row else "-" for script in MOST]
        lines.append("| " + " | ".join(cells) + " |")
    return lines
