"""What a run prints: its header, the progress table, the line of an evaluation."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from common.cli import seed_name
from common.envs.cartpole import REFERENCE_RETURNS

CONSOLE_ROWS = 10  # a run's progress table has about this many rows,
ROW_SECONDS = 20.0  # and a new one at least this often


def say(line: str) -> None:
    """Print `line` at once, also where the output is a pipe or a file."""
    print(line, flush=True)


def fixed(value: float | None, digits: int) -> str:
    """`value` with that many decimals, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def header(script: str, args: Any, num_parameters: int) -> str:
    """What is about to be trained, and between which returns it will end."""
    threads, rows = torch.get_num_threads(), args.num_envs * args.num_steps
    iterations = args.total_timesteps // rows
    lines = [
        f"{script}  {args.env_id}  {seed_name(args)}  {args.device}, "
        f"{threads} thread{'s' * (threads > 1)}  {num_parameters:,} parameters",
        f"{args.num_envs} envs x {args.num_steps} steps = {rows:,} a rollout, "
        f"{iterations:,} iterations ({iterations * rows:,} steps)",
    ]
    if args.env_id in REFERENCE_RETURNS:
        reference = REFERENCE_RETURNS[args.env_id]
        floor, ceiling = reference["random"], reference["scripted"]
        lines.append(f"floor: random policy {floor:.0f}   ceiling: scripted balancer {ceiling:.0f}")
    if getattr(args, "compile", False):
        lines.append("compiling in the first iteration, which takes longer: much longer the first time ever")
    return "\n".join(lines)


class ProgressTable:
    """Rows of a table on the console, now and then; `done` of the run's iterations are behind it already."""

    def __init__(self, num_iterations: int, done: int) -> None:
        self.num_iterations = num_iterations
        self.rows = done * CONSOLE_ROWS // max(num_iterations, 1)
        self.last_row = time.perf_counter()
        self.heading_shown = False

    def due(self, iteration: int) -> bool:
        """Whether a row should follow this iteration: after each tenth of the run, and when none has come for
        long."""
        waited = time.perf_counter() - self.last_row > ROW_SECONDS
        return iteration * CONSOLE_ROWS // self.num_iterations > self.rows or (
            iteration == self.num_iterations or waited
        )

    def print_row(self, last: dict[str, Any], means: dict[str, float | None]) -> None:
        """One row: the metrics of its last iteration, `last`, and the means over all since the row before."""
        steps_left = (self.num_iterations - last["iteration"]) * last["global_step"] / last["iteration"]
        left = steps_left / max(last["sps"], 1)  # seconds; sps is rounded
        cells = [
            ("step", 10, f"{last['global_step']:,}"),
            ("return", 9, fixed(means["train_return_mean"], 1)),
            ("V@limit", 9, fixed(means["value_at_time_limit"], 1)),
        ]
        if "approx_kl" in last:
            cells += [("kl", 8, fixed(last["approx_kl"], 4)), ("clip", 7, fixed(last["clipfrac"], 2))]
        cells += [
            ("steps/s", 9, f"{last['sps']:,}"),
            ("left", 8, f"{left:.0f} s" if left < 120 else f"{left / 60:.0f} min"),
        ]
        if not self.heading_shown:
            print("".join(f"{name:>{width}}" for name, width, _ in cells))
        say("".join(f"{text:>{width}}" for _, width, text in cells))
        self.heading_shown = True
        self.rows = last["iteration"] * CONSOLE_ROWS // self.num_iterations
        self.last_row = time.perf_counter()


def evaluation_line(args: Any, returns: list[float], stopped: int) -> str:
    """What an evaluation came to, in one line for the console."""
    line = f"evaluation {np.mean(returns):.1f} +- {np.std(returns):.1f} over {len(returns)} episodes"
    if args.env_id in REFERENCE_RETURNS:
        reference = REFERENCE_RETURNS[args.env_id]
        line += f" (random {reference['random']:.0f}, scripted {reference['scripted']:.0f})"
    if stopped:
        line += f"\n{stopped} had not ended and were stopped after --eval-max-steps {args.eval_max_steps:,}"
    return line
