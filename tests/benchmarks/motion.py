"""How a run of variants.ppo_robot moves: what a score does not show of a policy that is to drive a motor.

    python -m tests.benchmarks.motion runs/NAME ...

Plays the best action for 20 episodes, as an evaluation does, and takes means over all their steps: of
|a_t - a_(t-1)|^2 and |a_t - 2 a_(t-1) + a_(t-2)|^2 of executed actions, of the mirror loss, and of |error| in
the last quarter of every episode, where the environment names one.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from pathlib import Path

import torch

from common import cli
from common.envs.batched import BATCHED_ENVS
from common.trained import trained_agent
from variants import ppo_robot

EPISODES = 20
KEYS = ("action_rate", "action_smoothness", "asymmetry", "steady_error")


@torch.no_grad()
def motion(folder: Path | str) -> dict[str, float | None]:
    """The means, by KEYS; None for what the environment does not declare. Raises Refusal where there is no
    run."""
    agent, env, args, script = trained_agent(str(folder), "RUN")
    env.close()
    own = cli.script_file(script)
    cli.check(script == ppo_robot.SCRIPT, f"RUN {folder} is of {own}: give one of variants/ppo_robot.py")
    errors = getattr(BATCHED_ENVS.get(args.env_id), "errors", None)
    episodes: list[list[torch.Tensor]] = []
    best = agent.best

    def watched(row: torch.Tensor) -> torch.Tensor:
        episodes[-1].append(row[0])
        return best(row)

    first = agent.frames.first

    def begins(seen: torch.Tensor) -> torch.Tensor:
        episodes.append([])
        return first(seen)

    agent.best, agent.frames.first = watched, begins
    ppo_robot.evaluate(agent, dataclasses.replace(args, eval_episodes=EPISODES))
    agent.best, agent.frames.first = best, first

    found: dict[str, list[float]] = {key: [] for key in KEYS}
    for rows in map(torch.stack, episodes):
        change = best(rows).clamp(agent.frames.low, agent.frames.high).diff(dim=0)
        found["action_rate"] += change.square().sum(-1).tolist()
        found["action_smoothness"] += change.diff(dim=0).square().sum(-1).tolist()
        if agent.frames.mirrors:
            found["asymmetry"] += [agent.asymmetry(row).item() for row in rows]
        if errors:
            found["steady_error"] += rows[-(len(rows) // 4) :, errors[0][0]].abs().tolist()
    return {key: statistics.fmean(values) if values else None for key, values in found.items()}


def main() -> None:
    """Print the means of the runs that the command line names, one line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs of variants.ppo_robot")
    with cli.command_line():
        for run in parser.parse_args().runs:
            print(run, "  ".join(f"{k} {'-' if v is None else f'{v:.3g}'}" for k, v in motion(run).items()))


if __name__ == "__main__":
    main()
