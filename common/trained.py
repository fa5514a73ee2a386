"""A run's agent as its evaluation has it, to be watched or exported."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from common import cli
from common.envs import FlatEnv, make_env


def trained_agent(
    run: str, flag: str, seed: int = 0, stream: str = "env"
) -> tuple[nn.Module, FlatEnv, Any, str]:
    """The agent in a run's folder, on the CPU; an environment like those it was trained in, which the caller
    closes; the run's Args, and its script. `flag` is how a refusal names what was asked for. Raises Refusal
    where there is no checkpoint."""
    checkpoint = cli.read_checkpoint(run, None, flag)
    script = checkpoint["script"]
    module = importlib.import_module(cli.start(script)[-1].removesuffix(".py"))
    args = cli.saved_args(module.Args, checkpoint, device="cpu")
    # Only a page of images stacks frames in the environment: elsewhere frame_stack is the policy's own.
    more = {"frame_stack": args.frame_stack} if hasattr(module, "ImageEnv") else {}
    more |= {"mask": args.mask_actions} if hasattr(args, "mask_actions") else {}
    env = make_env(args.env_id, getattr(args, "env_kwargs", "{}"), seed, stream=stream, **more)
    agent = module.Agent(env, args)
    module.flatten_parameters(agent)  # where a parameter lies in memory decides the last bit of a product
    agent.load_state_dict(checkpoint["state"]["agent"])
    return agent, env, args, script
