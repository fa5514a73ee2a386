"""From an id to an environment that a script can step, or one sentence that says why there is none."""

from __future__ import annotations

import importlib
import json
import logging
import warnings
from typing import Any

import gymnasium as gym
from gymnasium.wrappers import AtariPreprocessing

from common.cli import Refusal, check, one_line
from common.envs.flat import FlatEnv
from common.envs.images import ImageEnv
from common.process import at_exit

EXAMPLE = """write it like '{"g": 9.81}'"""
# Games that Gymnasium knows only once their package has registered them: namespace -> module, extra.
GAMES = {"ALE": ("ale_py", "atari"), "MinAtar": ("minatar.gym", "minatar")}


def make_env(
    env_id: str,
    env_kwargs: str = "{}",
    seed: int = 0,
    index: int = 0,
    stream: str = "env",
    render: bool = False,
    mask: bool = False,
    frame_stack: int | None = None,
) -> FlatEnv:
    """`gymnasium.make(env_id, **env_kwargs)` as a FlatEnv, or with `frame_stack` as an ImageEnv; `env_kwargs`
    is a JSON object.

    With `render`, it is made so that `env.render()` returns an image, where the environment offers that and
    can; `unrendered` says why not. Made inside of a script's `train`, it is closed at the latest when that
    ends. Raises Refusal, in one sentence, for whatever keeps the environment from being made.
    """
    try:
        kwargs = json.loads(env_kwargs)
        check(isinstance(kwargs, dict), f"--env-kwargs {env_kwargs} is no JSON object: {EXAMPLE}")
    except json.JSONDecodeError as error:
        raise Refusal(f"--env-kwargs {env_kwargs} is not JSON ({error}): {EXAMPLE}") from None
    images = frame_stack is not None
    env, unrendered = open_env(env_id, env_kwargs, kwargs, images), "it offers no images"
    if render and "rgb_array" in (env.metadata or {}).get("render_modes", []) and "render_mode" not in kwargs:
        env.close()  # first: of some only one can be open
        try:
            env = open_env(env_id, env_kwargs, {"render_mode": "rgb_array", **kwargs}, images)
        except Refusal as refusal:
            unrendered, env = str(refusal), open_env(env_id, env_kwargs, kwargs, images)
    try:
        both = (env, seed, index, stream)
        flat = ImageEnv(*both, frame_stack) if images else FlatEnv(*both, mask)
    except BaseException:
        env.close()
        raise
    flat.unrendered = unrendered
    at_exit(flat.close)
    return flat


def open_env(env_id: str, env_kwargs: str, kwargs: dict[str, Any], images: bool) -> gym.Env:
    """`gymnasium.make` without its warnings; raises Refusal where it cannot be made. With `images`, a game of
    Atari is seen as Gymnasium's AtariPreprocessing shows it: 84 x 84 in grey, every fourth frame."""
    try:
        register_games(env_id)
        atari = images and env_id.startswith("ALE/")
        with warnings.catch_warnings():  # that there is a newer version; where it matters, make raises too
            warnings.simplefilter("ignore", DeprecationWarning)
            env = gym.make(env_id, disable_env_checker=True, **({"frameskip": 1} if atari else {}), **kwargs)
        return AtariPreprocessing(env) if atari else env
    except gym.error.DependencyNotInstalled as error:
        raise Refusal(f"--env-id {env_id} needs a package that is not installed: {one_line(error)}") from None
    except Exception as error:  # whatever the environment's own code raises
        reason = one_line(error)
        raise Refusal(f"--env-id {env_id} with --env-kwargs {env_kwargs} cannot be made: {reason}") from None


def register_games(env_id: str) -> None:
    """Make the games known to Gymnasium among which `env_id` is. Raises DependencyNotInstalled."""
    name, extra = GAMES.get(env_id.partition("/")[0], (None, None))
    if name is None or env_id in gym.registry:
        return
    try:
        logging.disable(logging.WARNING)  # MinAtar's, that it cannot draw without seaborn
        module = importlib.import_module(name)
    except ImportError:
        raise gym.error.DependencyNotInstalled(f'pip install -e ".[{extra}]"') from None
    finally:
        logging.disable(logging.NOTSET)
    module.register_envs() if name == "minatar.gym" else gym.register_envs(module)
