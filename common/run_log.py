"""A run's folder and its console: metrics, checkpoints, summary, recording, and stopping without loss.

A script makes one `Run`, gives it each iteration's metrics and, by name, everything its checkpoint must hold.
Nothing here draws from a training random stream: a script without its `run` lines trains the same weights.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.cli import NonFinite, Refusal, check, command, load_checkpoint, one_line, training_args
from common.envs.cartpole import REFERENCE_RETURNS

FILES = ("checkpoint.pt", "metrics.jsonl", "summary.json", "eval.json", "recording.rrd")
CONSOLE_ROWS = 10  # a run's progress table has about this many rows,
ROW_SECONDS = 20.0  # and a new one at least this often


class Interrupted(SystemExit):
    """Ctrl-C or SIGTERM stopped the run; `code` is the exit status, 130 or 143."""


def require_finite(iteration: int, **quantities: torch.Tensor) -> None:
    """Raise NonFinite naming the first of `quantities` that holds a NaN or an infinity."""
    for name, value in quantities.items():
        if not torch.isfinite(value).all():
            raise NonFinite(
                f"iteration {iteration}: the {name} is not finite, so the run stops here; "
                "its last good checkpoint stays; try a lower --learning-rate, --norm-obs or --norm-reward"
            )


def mean(values: list[float]) -> float | None:
    """The mean, or None where there is nothing to take it of."""
    return statistics.fmean(values) if values else None


def fixed(value: float | None, digits: int) -> str:
    """`value` with that many decimals, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def canonical(value: Any) -> Any:
    """A copy of `value` whose pickled bytes depend on its content alone.

    Pickle writes an object met twice as a reference, so that equal content gives other bytes when identities
    differ, as they do after loading: containers are rebuilt, strings interned, tensors cloned to the CPU.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True).contiguous()
    if isinstance(value, dict):
        return {canonical(k): canonical(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [canonical(v) for v in value]
    if isinstance(value, str):
        return sys.intern(str(value))
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise TypeError(f"a checkpoint holds tensors, numbers, strings and containers, no {type(value).__name__}")


def write_atomically(path: Path, write: Any) -> None:
    """Call `write(file)` on a temporary file beside `path`, then rename it: a reader, or a process killed at
    any moment, finds the old content or the new, never a part."""
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` as JSON, atomically; NaN becomes null."""
    text = json.dumps(finite_or_none(content), indent=1) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def finite_or_none(value: Any) -> Any:
    """`value` with None for every float in it that JSON cannot hold."""
    if isinstance(value, dict):
        return {k: finite_or_none(v) for k, v in value.items()}
    if isinstance(value, list):
        return [finite_or_none(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl in order, up to a line that was cut off in writing; [] without the file."""
    lines: list[dict[str, Any]] = []
    path = folder / "metrics.jsonl"
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def train_summary(lines: list[dict[str, Any]]) -> dict[str, float | None]:
    """`train_return_mean`, the mean return of all training episodes, and `value_at_time_limit`, the mean over
    the last 10 iterations in which an episode met its time limit; each None where there was none."""
    episodes = sum(line["episodes"] for line in lines)
    total = sum(line["episodes"] * line["episodic_return"] for line in lines if line["episodes"])
    at_limit = [v for line in lines if (v := line.get("value_at_time_limit")) is not None][-10:]
    return {
        "train_return_mean": total / episodes if episodes else None,
        "value_at_time_limit": mean(at_limit),
    }


def evaluation_summary(returns: list[float]) -> dict[str, Any]:
    """Mean, standard deviation over episodes, and every return."""
    return {
        "eval_return_mean": float(np.mean(returns)) if returns else None,
        "eval_return_std": float(np.std(returns)) if returns else None,
        "eval_returns": returns,
        "eval_episodes": len(returns),
    }


def evaluation_line(args: Any, returns: list[float], stopped: int) -> str:
    """What an evaluation came to, in one line for the console."""
    line = f"evaluation {np.mean(returns):.1f} +- {np.std(returns):.1f} over {len(returns)} episodes"
    if args.env_id in REFERENCE_RETURNS:
        reference = REFERENCE_RETURNS[args.env_id]
        line += f" (random {reference['random']:.0f}, scripted {reference['scripted']:.0f})"
    if stopped:
        line += f"\n{stopped} had not ended and were stopped after --eval-max-steps {args.eval_max_steps:,}"
    return line


def report_evaluation(args: Any, checkpoint: dict[str, Any], returns: list[float], stopped: int) -> None:
    """Print what `--eval-only` found and write it to eval.json in the run's folder."""
    print(evaluation_line(args, returns, stopped))
    content = {"global_step": checkpoint["global_step"], **evaluation_summary(returns)}
    write_json(Path(args.eval_only) / "eval.json", content)


def no_display() -> bool:
    """Whether there is no screen to draw on."""
    screen = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return sys.platform not in ("darwin", "win32") and not screen


def watch_command(recording: Path) -> str:
    """The command line that opens a recording; in the browser where there is no display."""
    return f"python -m rerun {shlex.quote(str(recording))}{' --web-viewer' * no_display()}"


class Run:
    """A run's folder: a fresh one, `--out`, or the one that `--resume` goes on in.

    Raises Refusal where the folder holds another run, or where a flag beside --resume would change the run.
    """

    def __init__(self, script: str, args: Any, num_parameters: int) -> None:
        self.script, self.args = script, args
        self.batch_size = args.num_envs * args.num_steps
        self.num_iterations = args.total_timesteps // self.batch_size
        self.checkpoint = self._resumed() if args.resume is not None else None
        self.folder = Path(args.resume) if args.resume is not None else self._new_folder()
        self.signal = 0  # the signal that asked the run to stop
        self.asked_about, self.stopping = -1, 0  # the iteration, and the signal that ends the run after it
        self.training = True
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._on_signal)
            signal.signal(signal.SIGTERM, self._on_signal)
        first = self.checkpoint["iteration"] if self.checkpoint else 0
        self.lines = [line for line in read_metrics(self.folder) if line["iteration"] <= first]
        write_atomically(
            self.folder / "metrics.jsonl",
            lambda file: file.writelines((json.dumps(line) + "\n").encode() for line in self.lines),
        )
        self.metrics = (self.folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._print_header(num_parameters, first)
        self.recording = self._open_recording() if args.rerun else None
        self.first_step = first * self.batch_size
        self.seconds_before = self.lines[-1]["seconds"] if self.lines else 0.0
        self.started = self.last_row = time.perf_counter()
        self.shown, self.header_shown = len(self.lines), False  # how much of the progress table is printed
        self.rows = first * CONSOLE_ROWS // self.num_iterations

    def _resumed(self) -> dict[str, Any]:
        checkpoint = load_checkpoint(self.args, self.script)
        check(self.args.out is None, "--resume goes on in the run's own folder: leave --out out")
        check(
            self.num_iterations >= checkpoint["iteration"],
            f"--total-timesteps {self.args.total_timesteps} is less than the run has done: give "
            f"{checkpoint['global_step']} or more",
        )
        lines, done = read_metrics(Path(self.args.resume)), checkpoint["iteration"]
        check(
            [line["iteration"] for line in lines[:done]] == list(range(1, done + 1)),
            f"--resume {self.args.resume}: its metrics.jsonl does not reach its checkpoint; start a new run",
        )
        return checkpoint

    def _new_folder(self) -> Path:
        if self.args.out is not None:
            folder = Path(self.args.out)
            check(
                not any((folder / name).exists() for name in FILES),
                f"--out {folder} holds a run already: --resume {folder} goes on with it, or name another",
            )
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise Refusal(f"--out {folder} cannot be made into a folder ({error.strerror})") from None
            return folder
        env = re.sub(r"[^\w.-]+", "-", self.args.env_id)
        name = f"{self.script}_{env}_seed{self.args.seed}_{time.strftime('%Y%m%d-%H%M%S')}"
        for suffix in ["", *(f"-{n}" for n in range(2, 1000))]:
            folder = Path("runs") / (name + suffix)
            try:
                folder.mkdir(parents=True)
                return folder
            except FileExistsError:
                continue
            except OSError as error:
                raise Refusal(f"runs/ cannot be written ({error.strerror}): give --out a folder") from None
        raise Refusal(f"runs/{name} and a thousand numbers after it are taken: give --out a folder")

    def _print_header(self, num_parameters: int, first: int) -> None:
        args, threads = self.args, torch.get_num_threads()
        print(
            f"{self.script}  {args.env_id}  seed {args.seed}  {args.device}, "
            f"{threads} thread{'s' * (threads > 1)}  {num_parameters:,} parameters\n"
            f"{args.num_envs} envs x {args.num_steps} steps = {self.batch_size:,} a rollout, "
            f"{self.num_iterations:,} iterations ({self.num_iterations * self.batch_size:,} steps)"
        )
        if args.env_id in REFERENCE_RETURNS:
            reference = REFERENCE_RETURNS[args.env_id]
            floor, ceiling = reference["random"], reference["scripted"]
            print(f"floor: random policy {floor:.0f}   ceiling: scripted balancer {ceiling:.0f}")
        if self.checkpoint:
            done = f"{self.folder} has done {first:,} of {self.num_iterations:,} iterations"
            finished = first == self.num_iterations and (self.folder / "summary.json").exists()
            print(f"{done}, {'and is finished: --total-timesteps extends it' if finished else 'going on'}")
        sys.stdout.flush()

    def _open_recording(self) -> Any:
        try:
            from common.recording import Recording

            title = f"{self.script} {self.args.env_id} seed {self.args.seed}"
            recording = Recording(
                self.folder / "recording.rrd",
                title,
                self.num_iterations * self.batch_size,
                warn=self.say,
                watch=self.args.watch,
            )
        except ImportError:
            self.say("no recording: rerun is not installed (pip install rerun-sdk); the run goes on without")
            return None
        except Exception as error:
            self.say(f"no recording, the run goes on without: {one_line(error)}")
            return None
        for line in self.lines:
            recording.log(line)
        return recording

    def say(self, line: str) -> None:
        print(line, flush=True)

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
        if iteration != self.asked_about:
            self.asked_about, self.stopping = iteration, self.signal
        regular = iteration % self.args.checkpoint_every == 0 or iteration == self.num_iterations
        return regular or bool(self.stopping)

    def save(self, iteration: int, state: dict[str, Any]) -> None:
        """Write checkpoint.pt when it is due: at the start, every --checkpoint-every iterations, at the end,
        and when the run was asked to stop."""
        if not self.due(iteration):
            return
        content = {
            "script": self.script,
            "args": training_args(self.args),
            "iteration": iteration,
            "global_step": iteration * self.batch_size,
            "state": {name: part.state_dict() for name, part in state.items()},
        }
        write_atomically(self.folder / "checkpoint.pt", lambda file: torch.save(canonical(content), file))
        self.end_training(iteration)

    def end_training(self, iteration: int) -> None:
        """From the last checkpoint on there is nothing left to save: a signal stops at once."""
        if iteration == self.num_iterations:
            self.training = False
            self.stopping = self.signal

    def log(self, *metrics: dict[str, Any]) -> None:
        """Write the metrics of one iteration, or of several at once, to metrics.jsonl and the recording; now
        and then a row to the console."""
        now = time.perf_counter()
        seconds, iteration = now - self.started, metrics[-1]["iteration"]
        sps = (metrics[-1]["global_step"] - self.first_step) / seconds
        clock = {"sps": round(sps), "seconds": round(self.seconds_before + seconds, 3)}
        for line in metrics:
            line = finite_or_none({**line, **clock})
            if line.get("diverged"):
                self.say(f"iteration {line['iteration']}: {line['diverged']:.0f} diverged lanes were ended")
            self.lines.append(line)
            self.metrics.write(json.dumps(line) + "\n")
            if self.recording:
                self.recording.log(line)
        self.metrics.flush()
        rows_due = iteration * CONSOLE_ROWS // self.num_iterations
        if rows_due > self.rows or iteration == self.num_iterations or now - self.last_row > ROW_SECONDS:
            left = (self.num_iterations - iteration) * self.batch_size / sps
            self._print_row(self.lines[self.shown :], left)
            self.rows, self.last_row, self.shown = rows_due, now, len(self.lines)

    def _print_row(self, lines: list[dict[str, Any]], left: float) -> None:
        """One row of the progress table: means over `lines`, the iterations since the row before it."""
        last, summary = lines[-1], train_summary(lines)
        cells = [
            ("step", 10, f"{last['global_step']:,}"),
            ("return", 9, fixed(summary["train_return_mean"], 1)),
            ("V@limit", 9, fixed(summary["value_at_time_limit"], 1)),
        ]
        if "approx_kl" in last:
            cells += [("kl", 8, fixed(last["approx_kl"], 4)), ("clip", 7, fixed(last["clipfrac"], 2))]
        cells += [
            ("steps/s", 9, f"{last['sps']:,}"),
            ("left", 8, f"{left:.0f} s" if left < 120 else f"{left / 60:.0f} min"),
        ]
        if not self.header_shown:
            print("".join(f"{name:>{width}}" for name, width, _ in cells))
        self.header_shown = True
        print("".join(f"{text:>{width}}" for _, width, text in cells), flush=True)

    def _on_signal(self, number: int, frame: Any) -> None:
        name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        if self.signal or not self.training:  # the second time, or with the last checkpoint already written
            self.say(f"\nstopped at once; the last checkpoint stays\nresume   {self.resume_command()}")
            raise Interrupted(128 + number)
        self.signal = number
        self.say(f"\n{name}: finishing this iteration, then saving (once more stops at once)")

    def stop_if_asked(self) -> None:
        """After a signal, and once the iteration is saved: say how to go on, and raise Interrupted."""
        if self.stopping:
            self.close()
            self.say(f"saved    {self.folder / 'checkpoint.pt'}\nresume   {self.resume_command()}")
            raise Interrupted(128 + self.stopping)

    def resume_command(self) -> str:
        return shlex.join(["python", f"{self.script}.py", "--resume", str(self.folder)])

    @property
    def film(self) -> Callable[[Any], None] | None:
        """What takes an environment as the next frame of the evaluated episode; None without a recording."""
        return self.recording.film if self.recording else None

    def finish(self, returns: list[float], stopped: int, **more: Any) -> None:
        """Write summary.json, with `more` in it, and say what came of the run and what to do next."""
        self.training = False
        seconds = self.lines[-1]["seconds"]
        steps = self.lines[-1]["global_step"]
        content = {
            "script": self.script,
            "env_id": self.args.env_id,
            "seed": self.args.seed,
            "args": training_args(self.args),
            "global_step": steps,
            "iterations": self.lines[-1]["iteration"],
            **evaluation_summary(returns),
            **train_summary(self.lines),
            "train_seconds": seconds,
            "sps": round(steps / seconds),
            **more,
        }
        write_json(self.folder / "summary.json", content)
        self.close()
        if returns:
            self.say(evaluation_line(self.args, returns, stopped))
        if self.recording:
            self.say(f"watch    {watch_command(self.folder / 'recording.rrd')}")
        if getattr(self.args, "clip_ratio", False):
            self.say(f"ablate   {command(self.script, self.args, clip_ratio=False)}")
        self.say(f"compare  python -m common.compare {shlex.quote(str(self.folder.parent))}")

    def close(self) -> None:
        """Close the files; the recording is complete from here on."""
        self.metrics.close()
        if self.recording:
            self.recording.close()
