"""The folder of a run that trains several seeds at once.

DIR itself is a run's folder: its checkpoint.pt holds every seed, so that one file, whole at every moment,
resumes them all; its metrics are means over the seeds, its recording overlays their curves. DIR/seed0,
DIR/seed1 and so on are run folders too, each with its seed's policy, metrics and summary, to compare, to
evaluate and to export.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np

from common import cli
from common.compare import overlay
from common.console import fixed, say
from common.files import Kept, finite_or_none, write_atomically, write_checkpoint, write_json
from common.metrics import interquartile_mean, mean, read_metrics
from common.run_folder import Run

SUMMED = ("episodes", "diverged")  # over seeds; of all other metrics the mean is taken
COLUMNS = {"evaluation": "eval_return_mean", "train return": "train_return_mean",
           "V@limit": "value_at_time_limit"}  # fmt: skip


def mean_line(lines: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """The metrics of one iteration, {seed: its line}, as one line: the mean of what the seeds have, and
    `seeds`, those that are in it."""
    first = next(iter(lines.values()))
    line: dict[str, Any] = {name: first[name] for name in ("iteration", "global_step")}
    for key in first:
        known = [value for other in lines.values() if (value := other[key]) is not None]
        if key not in line:
            line[key] = sum(known) if key in SUMMED else mean(known)
    return {**line, "seeds": list(lines)}


class SeedRuns(Run):
    """The Run of args.seeds. It alone prints, takes signals and resumes. A seed whose numbers have stopped
    being finite is ended, and nothing of it is written from there on. `state` of `restore` and `save` holds
    "agents", one for each seed.

    Raises what Run raises; Refusal also where the folder to resume is that of one seed, and NonFinite from
    `log_seeds` when the last seed has ended.
    """

    def __init__(self, script: str, args: Any, num_parameters: int) -> None:
        self.files: dict[int, Any] = {}
        super().__init__(script, args, num_parameters)
        self.kept = Kept({})
        self.seed_lines: dict[int, list[dict[str, Any]]] = {}
        for seed in args.seeds:
            with self._writing(f"seed{seed}/metrics.jsonl") as path:
                path.parent.mkdir(exist_ok=True)
                lines = self.seed_lines[seed] = read_metrics(path.parent)[: self._done(seed)]
                write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines).encode())
                self.files[seed] = path.open("a", encoding="utf-8")
        if len(args.seeds) > 1:
            say("step and steps/s count each seed's own; the rows are means over the seeds")

    def _done(self, seed: int) -> int:
        """How many iterations of a seed are in the mean so far."""
        return sum(seed in line["seeds"] for line in self.lines)

    def _resumed(self) -> dict[str, Any]:
        checkpoint, folder = super()._resumed(), Path(self.args.resume)
        several = "seeds" in checkpoint["args"]
        cli.check(several, f"--resume {folder} is one seed of several: give {folder.parent}, which holds all")
        means = [line for line in read_metrics(folder) if line["iteration"] <= checkpoint["iteration"]]
        for seed in self.args.seeds:
            wanted = [line["iteration"] for line in means if seed in line["seeds"]]
            lines = read_metrics(folder / f"seed{seed}")
            cli.check(
                [line["iteration"] for line in lines[: len(wanted)]] == wanted,
                f"--resume {folder}: seed{seed}/metrics.jsonl does not reach its checkpoint; start a new run",
            )
        return checkpoint

    @property
    def ended(self) -> dict[int, str]:
        """{seed: why} of those that have ended."""
        return self.kept.value

    def going_on(self, agents: Any) -> list[tuple[int, Any]]:
        """(seed, agent) of the seeds that have not ended."""
        pairs = zip(self.args.seeds, agents, strict=True)
        return [(seed, agent) for seed, agent in pairs if seed not in self.ended]

    def _open_recording(self) -> None:
        """None while training: an overlay of all seeds is written at the end."""

    def _seed_args(self, seed: int) -> dict[str, Any]:
        args = cli.training_args(self.args)
        return {"seed": seed, **{name: value for name, value in args.items() if name != "seeds"}}

    def restore(self, state: dict[str, Any]) -> int:
        """As Run's; says which seeds of a resumed run had ended."""
        first = super().restore({**state, "ended": self.kept})
        for seed, why in self.ended.items():
            say(f"seed {seed} has ended: {why}")
        return first

    def save(self, iteration: int, state: dict[str, Any]) -> None:
        """Write the policies of the seeds that go on, each to its folder; then what resumes them all."""
        if not self.due(iteration):
            return
        for seed, agent in self.going_on(state["agents"]):
            content = {
                "script": self.script,
                "args": self._seed_args(seed),
                "iteration": iteration,
                "global_step": iteration * self.batch_size,
                "state": {"agent": agent.state_dict()},
            }
            with self._writing(f"seed{seed}/checkpoint.pt") as path:
                write_checkpoint(path, content)
        super().save(iteration, {**state, "ended": self.kept})

    def log_seeds(self, lines: dict[int, list[dict[str, Any]]], ends: dict[int, str]) -> None:
        """Write {seed: its new metrics}, and their means as the run's own; end the seeds of {seed: why}."""
        together: dict[int, dict[int, dict[str, Any]]] = {}
        for seed, new in lines.items():
            for line in new:
                together.setdefault(line["iteration"], {})[seed] = line
        before = len(self.lines)
        if together:
            self.log(*(mean_line(together[iteration]) for iteration in sorted(together)))
        clocks = {line["iteration"]: {k: line[k] for k in ("sps", "seconds")} for line in self.lines[before:]}
        for seed, new in lines.items():
            clocked = [finite_or_none({**line, **clocks[line["iteration"]]}) for line in new]
            self.seed_lines[seed] += clocked
            with self._writing(f"seed{seed}/metrics.jsonl"):
                self.files[seed].writelines(json.dumps(line) + "\n" for line in clocked)
                self.files[seed].flush()
        for seed, why in ends.items():
            self.ended[seed] = why
            stays = f"the checkpoint of iteration {self.saved} stays"
            say(f"seed {seed} ends here, {why}; {stays} in {self.folder / f'seed{seed}'}")
        if len(self.ended) == len(self.args.seeds):
            raise cli.NonFinite("no seed is left: try a lower --learning-rate")

    def _write_summary(self, returns: dict[int, list[float]] | None) -> None:
        self.summaries: dict[int, dict[str, Any]] = {}
        for seed, _ in self.going_on(self.args.seeds):
            of_seed = None if returns is None else returns[seed]
            content = self._summary(self._seed_args(seed), self.seed_lines[seed], of_seed)
            self.summaries[seed] = finite_or_none(content)
            with self._writing(f"seed{seed}/summary.json") as path:
                write_json(path, content)
        content = self._summary(cli.training_args(self.args), self.lines, None)
        content |= {name: self._over_seeds(name)[0] for name in COLUMNS.values()}
        more = {f"{name}_iqm": self._over_seeds(name)[1] for name in COLUMNS.values()}
        with self._writing("summary.json") as path:
            write_json(path, {**content, **more, "ended": {str(k): v for k, v in self.ended.items()}})

    def _over_seeds(self, key: str) -> tuple[float | None, float | None]:
        """The mean and the interquartile mean of a figure over the seeds that have it."""
        known = [value for summary in self.summaries.values() if (value := summary[key]) is not None]
        return mean(known), float(interquartile_mean(np.array(known))) if known else None

    def report_seeds(self, results: dict[int, tuple[list[float], int]]) -> None:
        """Add the evaluations, {seed: (returns, stopped)}, to the summaries; print the table; overlay the
        curves; say what to do next."""
        self._write_summary({seed: returns for seed, (returns, _) in results.items()})
        self.close()
        rows = [(str(seed), [s[key] for key in COLUMNS.values()]) for seed, s in self.summaries.items()]
        figures = [self._over_seeds(key) for key in COLUMNS.values()]
        rows += [(name, [pair[i] for pair in figures]) for i, name in enumerate(("mean", "IQM"))]
        say("".join(f"{name:>14}" for name in ("seed", *COLUMNS)))
        for name, values in rows:
            say("".join(f"{text:>14}" for text in (name, *(fixed(value, 1) for value in values))))
        for seed, why in self.ended.items():
            say(f"seed {seed} is not among them: {why}")
        stopped = sum(stopped for _, stopped in results.values())
        if stopped:
            say(f"{stopped} episodes were stopped after --eval-max-steps {self.args.eval_max_steps:,}")
        folders = {seed: self.folder / f"seed{seed}" for seed in self.args.seeds}
        if self.args.rerun:
            groups = {f"mean of {len(folders)}": list(folders.values())} if len(folders) > 1 else {}
            groups |= {f"seed {seed}": [folder] for seed, folder in folders.items()}
            overlay(groups, self.folder / "recording.rrd", f"{self.script} {self.args.env_id}")
        if getattr(self.args, "clip_ratio", False):
            say(f"ablate   {cli.command(self.script, self.args, clip_ratio=False)}")
        say(f"compare  python -m common.compare {shlex.quote(str(self.folder.parent))}")

    def close(self) -> None:
        """Close the files of every seed too."""
        with contextlib.ExitStack() as files:
            for file in self.files.values():
                files.callback(file.close)
        super().close()
