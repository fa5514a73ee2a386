"""Demonstrations: what an expert saw and did, played, written and read.

A file is an .npz, as `numpy.savez` writes it, of three arrays with a row a step, in the order of the steps:

    obs     float32[n, obs_dim], as the scripts observe: flat
    action  as the environment was given it: float32[n, action_dim] within its bounds, or int64[n] from 0 on
    starts  bool[n], true at the first step of each episode
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete

from common import cli
from common.envs import FlatEnv, make_env
from common.envs.experts import EXPERTS
from common.files import write_atomically
from common.process import restores_process
from common.trained import trained_agent

MAX_STEPS = 10_000  # an episode that has not ended by then is stopped
RECORDED = ("ppo_continuous", "ppo_discrete", "a2c")  # scripts whose policies need one observation alone


class Demonstrations(NamedTuple):
    """The three arrays of a file, as tensors."""

    obs: torch.Tensor
    action: torch.Tensor
    starts: torch.Tensor


def play(env: FlatEnv, policy: Callable, episodes: int) -> tuple[Demonstrations, list[float]]:
    """What `policy` does, from an observation to what the environment is given; and the episodes' returns."""
    rows, returns = [], []
    for _ in range(episodes):
        obs, _ = env.reset()
        done = False
        while not done and env.episodic_length < MAX_STEPS:
            action, start = policy(obs), env.episodic_length == 0
            rows.append((obs, action, start))
            obs, _, terminated, truncated, _ = env.step(action)
            done = terminated or truncated
        returns.append(env.episodic_return)
    obs, action, starts = (torch.as_tensor(np.array(column)) for column in zip(*rows, strict=True))
    return Demonstrations(obs, action.to(env.action_dtype), starts), returns


def scripted(env_id: str, env_kwargs: str, seed: int, episodes: int) -> tuple[Demonstrations, list[float]]:
    """What the expert that comes with common/ does there. Raises Refusal where there is none."""
    known = ", ".join(EXPERTS)
    sentence = f"--env-id {env_id} has no scripted expert, only {known} have: give --demos, or --record a run"
    cli.check(env_id in EXPERTS, sentence)
    with make_env(env_id, env_kwargs, seed, stream="demo") as env:
        return play(env, EXPERTS[env_id], episodes)


def read(path: str, env: FlatEnv, episodes: int) -> Demonstrations:
    """The first `episodes` episodes of a file. Raises Refusal, in one sentence, for what `env` cannot have
    seen or been given."""
    name = f"--demos {path}"
    try:
        with np.load(path, allow_pickle=False) as file:
            obs, action, starts = (file[key] for key in Demonstrations._fields)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise cli.Refusal(f"{name} cannot be read as an .npz: {cli.one_line(error)}") from None
    except KeyError as error:
        raise cli.Refusal(f"{name}: {cli.one_line(error)}; it needs obs, action and starts") from None
    fits = obs.ndim == 2 and obs.shape[1] == env.obs_dim
    cli.check(fits, f"{name} has obs {list(obs.shape)}, and {env.name} observes [n, {env.obs_dim}]")
    wanted = (len(obs), *env.action_shape)
    fits = action.shape == wanted and starts.shape == (len(obs),)
    shapes = f"action {list(action.shape)} and starts {list(starts.shape)}"
    cli.check(fits, f"{name} has {shapes}, and {env.name} needs {list(wanted)} and [{len(obs)}]")
    cli.check(len(obs) > 0 and bool(starts[0]), f"{name}: its first step is no episode's first")
    cli.check(bool(np.isfinite(obs).all() and np.isfinite(action).all()), f"{name} holds NaN or infinity")
    if isinstance(env.action_space, Box):
        inside = ((action >= env.low - 1e-6) & (action <= env.high + 1e-6)).all()
    else:
        inside = np.isin(action, np.arange(env.action_dim)).all()
    cli.check(bool(inside), f"{name} holds actions that are outside those of {env.name}: {env.action_space}")
    there = int(starts.sum())
    cli.check(there >= episodes, f"{name} holds {there} episodes: give --demo-episodes {there} or fewer")
    end = len(obs) if there == episodes else int(np.flatnonzero(starts)[episodes])
    obs, action, starts = (torch.as_tensor(x[:end].copy()) for x in (obs, action, starts))
    return Demonstrations(obs.float(), action.to(env.action_dtype), starts.bool())


@restores_process
def record(run: str, episodes: int, env_id: str, env_kwargs: str, seed: int) -> None:
    """Write what the policy in a run's folder does to demos.npz there; with "scripted" what the expert of
    `env_id` does to demos.npz in this directory. Its name and the mean return are printed."""
    torch.set_num_threads(1)
    if run == "scripted":
        (demos, returns), path = scripted(env_id, env_kwargs, seed, episodes), Path("demos.npz")
    else:
        agent, env, args, script = trained_agent(run, "--record", seed, "demo")
        with env:
            sentence = f"--record takes a run of {', '.join(RECORDED)}, and {run} is one of {script}"
            cli.check(script in RECORDED, sentence)
            kind = type(env.action_space).__name__
            fits = isinstance(env.action_space, (Box, Discrete)) and not getattr(args, "mask_actions", False)
            cli.check(fits, f"--record {run}: its actions are {kind}, or masked; Box and Discrete will do")

            def policy(obs: np.ndarray) -> np.ndarray:
                with torch.no_grad():
                    return agent.env_action(agent.best(torch.tensor(obs[None])))[0]

            demos, returns = play(env, policy, episodes)
        path = Path(run) / "demos.npz"
    write(path, demos)
    print(f"{path}: {len(returns)} episodes, {len(demos.obs):,} steps, mean return {np.mean(returns):.1f}")


def write(path: Path, demos: Demonstrations) -> None:
    """Write a file. Raises CannotWrite."""
    archive = io.BytesIO()
    np.savez(archive, **{name: x.numpy() for name, x in demos._asdict().items()})
    try:
        write_atomically(path, archive.getvalue())
    except OSError as error:
        raise cli.cannot_write(path, error, "nothing was recorded") from error
