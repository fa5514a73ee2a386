"""A run's folder: checkpoints and resuming, metrics, the summary, the recording, and stopping without loss.

A script makes one `Run`, gives it each iteration's metrics and, by name, everything its checkpoint must hold.
Nothing here draws from a training random stream: a script without its `run` lines trains the same weights.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common import cli
from common.console import ProgressTable, evaluation_line, header, say
from common.files import finite_or_none, new_folder, write_atomically, write_checkpoint, write_json
from common.metrics import evaluation_summary, read_metrics, read_summary, train_summary
from common.process import on_failure
from common.recording import Recording, open_recording
from common.rerun_io import watch_command


class Interrupted(SystemExit):
    """Ctrl-C or SIGTERM stopped the run; `code` is the exit status, 130 or 143."""


class Run:
    """A run's folder: a fresh one, `--out`, or the one that `--resume` goes on in.

    Raises Refusal where the folder holds another run, or where a flag beside --resume would change the run;
    from every method CannotWrite (an OSError) where a file of the run cannot be written. A recording that
    fails costs one line of warning instead.
    """

    def __init__(self, script: str, args: Any, num_parameters: int) -> None:
        self.script, self.args = script, args
        self.batch_size = args.num_envs * args.num_steps
        self.num_iterations = args.total_timesteps // self.batch_size
        self.checkpoint = self._resumed() if args.resume is not None else None
        self.folder = Path(args.resume) if args.resume is not None else new_folder(script, args)
        first = self.checkpoint["iteration"] if self.checkpoint else 0
        self.iteration = self.saved = first  # the last that is done, and the last that is in the checkpoint
        summary = read_summary(self.folder) or {"iterations": None}
        self.finished = first == self.num_iterations == summary["iterations"]
        self.signal, self.stopping = 0, 0  # the one that asked the run to stop; the one it stops for
        self.training = True
        self.metrics = self.recording = None
        on_failure(self.explain)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._on_signal)
            signal.signal(signal.SIGTERM, self._on_signal)
        with self._writing("metrics.jsonl") as path:
            self.lines = [line for line in read_metrics(self.folder) if line["iteration"] <= first]
            write_atomically(path, "".join(json.dumps(line) + "\n" for line in self.lines).encode())
            self.metrics = path.open("a", encoding="utf-8")
        say(header(script, args, num_parameters))
        if self.checkpoint:
            done = f"{self.folder} has done {first:,} of {self.num_iterations:,} iterations"
            say(f"{done}, {'and is finished: --total-timesteps extends it' if self.finished else 'going on'}")
        self.recording = self._open_recording() if args.rerun else None
        self.table, self.shown = ProgressTable(self.num_iterations, first), len(self.lines)
        self.first_step = first * self.batch_size
        self.seconds_before = self.lines[-1]["seconds"] if self.lines else 0.0
        self.started = time.perf_counter()

    def _resumed(self) -> dict[str, Any]:
        checkpoint = cli.load_checkpoint(self.args, self.script)
        cli.check(self.args.out is None, "--resume goes on in the run's own folder: leave --out out")
        cli.check(
            self.num_iterations >= checkpoint["iteration"],
            f"--total-timesteps {self.args.total_timesteps} is less than the run has done: give "
            f"{checkpoint['global_step']} or more",
        )
        lines, done = read_metrics(Path(self.args.resume)), checkpoint["iteration"]
        cli.check(
            [line["iteration"] for line in lines[:done]] == list(range(1, done + 1)),
            f"--resume {self.args.resume}: its metrics.jsonl does not reach its checkpoint; start a new run",
        )
        return checkpoint

    def _open_recording(self) -> Recording | None:
        title = f"{self.script} {self.args.env_id} seed {self.args.seed}"
        path, steps = self.folder / "recording.rrd", self.num_iterations * self.batch_size
        return open_recording(path, title, steps, self.lines, say, self.args.watch)

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[Path]:
        """Around the writing of the file `name`: an OSError becomes the sentence that says what stays."""
        path = self.folder / name
        try:
            yield path
        except OSError as error:
            raise cli.cannot_write(path, error, self._what_stays()) from error

    def _what_stays(self) -> str:
        if not os.path.exists(self.folder / "checkpoint.pt"):
            return f"no checkpoint is left, so --out {self.folder} begins anew"
        return f"the checkpoint of iteration {self.saved} stays\nresume   {self.resume_command()}"

    say = staticmethod(say)

    def restore(self, state: dict[str, Any]) -> int:
        """Load a resumed run's checkpoint into `state` (objects with load_state_dict, by name) and return the
        first iteration still to do, counted from 1. A new run writes its first checkpoint instead."""
        if self.checkpoint is None:
            self.save(0, state)
            return 1
        for name, part in state.items():
            part.load_state_dict(self.checkpoint["state"][name])
        self.end_training(self.checkpoint["iteration"])
        self.stop_if_asked()
        return self.checkpoint["iteration"] + 1

    def due(self, iteration: int) -> bool:
        """Whether `save` will write a checkpoint after this iteration. The first to ask about an iteration
        looks whether a signal has come; what comes later stops the next."""
        if iteration != self.iteration:
            self.iteration, self.stopping = iteration, self.signal
        regular = iteration % self.args.checkpoint_every == 0 or iteration == self.num_iterations
        return regular or bool(self.stopping)

    def save(self, iteration: int, state: dict[str, Any]) -> None:
        """Write checkpoint.pt when it is due: at the start, every --checkpoint-every iterations, at the end,
        and when the run was asked to stop."""
        if not self.due(iteration):
            return
        content = {
            "script": self.script,
            "args": cli.training_args(self.args),
            "iteration": iteration,
            "global_step": iteration * self.batch_size,
            "state": {name: part.state_dict() for name, part in state.items()},
        }
        with self._writing("checkpoint.pt") as path:
            write_checkpoint(path, content)
        self.saved = iteration
        self.end_training(iteration)

    def end_training(self, iteration: int) -> None:
        """From the last checkpoint on there is nothing left to save: a signal stops at once."""
        if iteration == self.num_iterations:
            self.training = False
            self.stopping = self.signal

    def log(self, *metrics: dict[str, Any]) -> None:
        """Write the metrics of one iteration, or of several at once, to metrics.jsonl and the recording; now
        and then a row to the console."""
        seconds = time.perf_counter() - self.started
        sps = (metrics[-1]["global_step"] - self.first_step) / seconds
        clock = {"sps": round(sps), "seconds": round(self.seconds_before + seconds, 3)}
        new = [finite_or_none({**line, **clock}) for line in metrics]
        for line in new:
            if line.get("diverged"):
                say(f"iteration {line['iteration']}: {line['diverged']:.0f} diverged lanes were ended")
            if self.recording:
                self.recording.log(line)
        self.lines += new
        with self._writing("metrics.jsonl"):
            self.metrics.writelines(json.dumps(line) + "\n" for line in new)
            self.metrics.flush()
        if self.table.due(self.lines[-1]["iteration"]):
            self.table.print_row(self.lines[-1], train_summary(self.lines[self.shown :]))
            self.shown = len(self.lines)

    def _on_signal(self, number: int, frame: Any) -> None:
        name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        if self.signal or not self.training:  # the second time, or with the last checkpoint already written
            say(f"\nstopped at once; the last checkpoint stays\nresume   {self.resume_command()}")
            if self.recording:
                self.recording.close()  # left open, it would be waited for when Python ends
            raise Interrupted(128 + number)
        self.signal = number
        say(f"\n{name}: finishing this iteration, then saving (once more stops at once)")

    def stop_if_asked(self) -> None:
        """After a signal, and once the iteration is saved: say how to go on, and raise Interrupted."""
        if self.stopping:
            self.close()
            say(f"saved    {self.folder / 'checkpoint.pt'}\nresume   {self.resume_command()}")
            raise Interrupted(128 + self.stopping)

    def resume_command(self) -> str:
        return shlex.join([*cli.start(self.script), "--resume", str(self.folder)])

    @property
    def film(self) -> Callable[[Any], None] | None:
        """What takes an environment as the next frame of the evaluated episode; None without a recording."""
        return self.recording.film if self.recording else None

    def finish(self, **more: Any) -> None:
        """Write summary.json, with `more` in it and without an evaluation, which may still fail."""
        self.training = False
        self.more = more
        if not self.finished:  # an evaluation that is there is kept until the new one is
            self._write_summary(None)

    def _write_summary(self, returns: list[float] | None) -> None:
        content = self._summary(cli.training_args(self.args), self.lines, returns)
        with self._writing("summary.json") as path:
            write_json(path, content)

    def _summary(
        self, args: dict[str, Any], lines: list[dict[str, Any]], returns: list[float] | None
    ) -> dict[str, Any]:
        last = lines[-1] if lines else {"global_step": 0, "iteration": 0, "seconds": 0.0}
        return {
            "script": self.script,
            "env_id": self.args.env_id,
            "seed": args.get("seed"),
            "args": args,
            "global_step": last["global_step"],
            "iterations": last["iteration"],
            **evaluation_summary(returns),
            **train_summary(lines),
            "train_seconds": last["seconds"],
            "sps": round(last["global_step"] / last["seconds"]) if lines else None,
            **self.more,
        }

    def report(self, returns: list[float], stopped: int) -> None:
        """Add the evaluation to summary.json, and say what came of the run and what to do next."""
        self._write_summary(returns)
        self.close()
        if returns:
            say(evaluation_line(self.args, returns, stopped))
        if self.recording:
            say(f"watch    {watch_command(self.folder / 'recording.rrd')}")
        if getattr(self.args, "clip_ratio", False):
            say(f"ablate   {cli.command(self.script, self.args, clip_ratio=False)}")
        say(f"compare  python -m common.compare {shlex.quote(str(self.folder.parent))}")

    def explain(self, error: Exception) -> Exception | None:
        """Close the files after `error`. Where it came from the environment, return it with what stays and
        how to go on after its own words; None where it has said all there is to say."""
        with contextlib.suppress(OSError):  # the second failure says no more than the first
            self.close()
        if not isinstance(error, (cli.EnvironmentFailed, cli.Refusal)):
            return None
        if self.training:
            return cli.EnvironmentFailed(f"iteration {self.iteration + 1}: {error}\n{self._what_stays()}")
        evaluate = shlex.join([*cli.start(self.script), "--eval-only", str(self.folder)])
        stands = "training is complete and saved; summary.json stands without an evaluation"
        return cli.EnvironmentFailed(f"{error}\n{stands}\nevaluate {evaluate}")

    def close(self) -> None:
        """Close the files; the recording is complete from here on."""
        if self.recording:
            self.recording.close()
        if self.metrics:
            with self._writing("metrics.jsonl"):
                self.metrics.close()
