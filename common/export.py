"""The policy of a run as one ONNX file, to drive a robot or a game without this project or PyTorch.

    python -m common.export runs/NAME --out policy.onnx

The file holds the deterministic policy that an evaluation plays, with the normalisation of observations and
the clipping or squashing of actions inside. Input `obs`: float32[n, obs_dim], or uint8[n, C, H, W] of images,
as the scripts observe; of variants.ppo_robot its frames, newest first. Output `action`: what the environment
is given, float[n, action_dim] or int64[n, ...] counted from 0. Of a script with a memory n is 1, and
`state_0`, `state_1`, ... go in, zeros where an episode begins, and come out as `next_state_0`, ... for the
next step.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import logging
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from common import cli
from common.trained import trained_agent

PACKAGES = ("onnx", "onnxscript")


class Policy(nn.Module):
    """What a run's agent does in an evaluation, from tensors to tensors."""

    def __init__(self, agent: nn.Module) -> None:
        super().__init__()
        self.agent = agent
        self.continuous = hasattr(agent, "low")
        self.remembers = hasattr(agent, "memories")
        if self.continuous:
            for name in ("low", "high"):
                self.register_buffer(name, torch.as_tensor(getattr(agent, name)))

    def forward(self, obs: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Actions as the environment is given them, and of a memory the tensors of its state after them."""
        after: tuple[Tensor, ...] = ()
        if self.remembers:
            no_start = torch.zeros(1, dtype=torch.bool)
            output, (after,) = self.agent.step((state,), obs, no_start)  # the actor's memory alone
            action = self.agent.best(output)
        else:
            action = self.agent.best(obs)
        if self.continuous:
            if getattr(self.agent, "squash", False):
                action = self.agent.half_range * (torch.tanh(action) + 1) + self.low
            action = action.clamp(self.low, self.high)
        return action, *after


def load(run: str) -> tuple[Policy, tuple[Tensor, ...]]:
    """A run's policy, and inputs for it: an observation of zeros, and the state of an empty memory. Raises
    Refusal where there is no checkpoint."""
    agent, env, _, _ = trained_agent(run, "RUN")
    with env:
        images = getattr(env, "image_shape", None)
        numbers = getattr(agent, "actor_dim", env.obs_dim)  # a robot has no more than its actor reads
        obs = torch.zeros(2, *images, dtype=torch.uint8) if images else torch.zeros(2, numbers)
    policy = Policy(agent).eval().requires_grad_(False)
    return (policy, (obs[:1], *agent.initial(1)[0])) if policy.remembers else (policy, (obs,))


def export(run: str, out: Path) -> None:
    """Write the policy of `run` to `out`. Raises Refusal where packages are missing or the run will not do,
    CannotWrite where the file cannot be written."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    needed = " and ".join(missing)
    cli.check(not missing, f'to export, {needed} must be installed: pip install -e ".[export]"')
    policy, inputs = load(run)
    states = range(len(inputs) - 1)
    names = ["obs", *(f"state_{i}" for i in states)]
    rows = None if policy.remembers else ({0: torch.export.Dim("n")},)
    quiet = contextlib.redirect_stdout(io.StringIO())
    logging.disable(logging.WARNING)
    try:
        with quiet, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                policy, inputs, dynamo=True, input_names=names, verbose=False,
                output_names=["action", *(f"next_state_{i}" for i in states)],
                dynamic_shapes=rows,
            )  # fmt: skip
    except Exception as error:
        raise cli.Refusal(f"{run} cannot be exported: {cli.one_line(error)}") from error
    finally:
        logging.disable(logging.NOTSET)
    try:
        program.save(out)
    except OSError as error:
        raise cli.cannot_write(out, error, "nothing was exported") from error
    print(f"{out}: {', '.join(names)} -> action; {out.stat().st_size / 1024:,.0f} KB")


def main(argv: list[str] | None = None) -> None:
    """Export the run that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m common.export", description=__doc__.splitlines()[0])
    parser.add_argument("run", metavar="RUN", help="the folder of a run")
    parser.add_argument("--out", metavar="FILE.onnx", default="policy.onnx", help="default: policy.onnx")
    args = parser.parse_args(argv)
    with cli.command_line():
        export(args.run, Path(args.out))


if __name__ == "__main__":
    main()
