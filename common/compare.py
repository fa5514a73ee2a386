"""Compare runs: `python -m common.compare runs`, or any mix of runs, folders of runs and glob patterns.

Runs that differ in nothing but their seed are one row: the mean over seeds and, beside it, the spread. Only
the flags that differ between the rows are named. A recording overlays the curves of the same groups.
"""

from __future__ import annotations

import argparse
import glob
import itertools
import math
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from common.cli import flag_name, one_line
from common.console import fixed
from common.metrics import mean, read_metrics, read_summary
from common.recording import BLUE, GREEN, GREY, ORANGE, PLOTS, TIMELINE, plot, shown_plots
from common.rerun_io import complete, import_rerun, in_time, watch_command

UNFINISHED = "unfinished"
COLORS = (BLUE, ORANGE, GREEN, 0xE56B8AFF, 0xB59CF0FF, 0xE8D35BFF, 0x63D2CFFF, GREY)  # of groups overlaid


class Finished(NamedTuple):
    """A run that has its summary: where it is and what it came to."""

    folder: Path
    summary: dict[str, Any]


def find_runs(patterns: list[str]) -> list[Path]:
    """The run folders that the arguments name, each once. A run folder is one that holds metrics.jsonl."""
    found: dict[Path, Path] = {}  # by where it really is, so that no run is counted twice
    for pattern in patterns:
        for path in map(Path, sorted(glob.glob(pattern)) or [pattern]):
            here = [path] if (path / "metrics.jsonl").exists() else sorted(path.glob("*/metrics.jsonl"))
            for run in (p if p.is_dir() else p.parent for p in here):
                for one in seeds_of(run):
                    found.setdefault(one.resolve(), one)
    return list(found.values())


def seeds_of(run: Path) -> list[Path]:
    """The folders of a run's seeds where it trained several at once; else the run's own."""
    return sorted(path.parent for path in run.glob("seed*/metrics.jsonl")) or [run]


def read_run(folder: Path) -> Finished | None:
    """The run with its summary; None where there is none yet, or training has gone on beyond it."""
    summary = read_summary(folder)
    lines = read_metrics(folder)
    if summary is None or (lines and lines[-1]["global_step"] > summary["global_step"]):
        return None
    return Finished(folder, summary)


def group_runs(runs: list[Finished]) -> dict[str, list[Finished]]:
    """Runs equal in script, environment and args but for the seed, under a name: the script, the environment,
    and of the flags only those that differ between runs of that script there."""
    groups: dict[str, list[Finished]] = {}
    for run in runs:
        kind = (run.summary["script"], run.summary["env_id"])
        alike = [r.summary["args"] for r in runs if (r.summary["script"], r.summary["env_id"]) == kind]
        differing = [
            describe(field, value)
            for field, value in run.summary["args"].items()
            if field != "seed" and any(args.get(field) != value for args in alike)
        ]
        groups.setdefault(" ".join([*kind, *differing]), []).append(run)
    return groups


def describe(field: str, value: Any) -> str:
    """A flag as one would type it."""
    if isinstance(value, bool):
        return flag_name(field) if value else flag_name(field).replace("--", "--no-", 1)
    return f"{flag_name(field)} {value}"


def spread(runs: list[Finished], key: str) -> str:
    """The mean of what the runs have and, from two seeds on, +- its standard deviation over them."""
    known = [run.summary[key] for run in runs if run.summary[key] is not None]
    text = fixed(mean(known), 1)
    seeds = {run.summary["seed"] for run in runs if run.summary[key] is not None}
    return f"{text} +- {statistics.stdev(known):.1f}" if len(seeds) > 1 else text


def table(groups: dict[str, list[Finished]]) -> list[list[str]]:
    """The rows to print, the header first."""
    columns: dict[str, Callable[[list[Finished]], str]] = {
        "seeds": lambda runs: str(len({run.summary["seed"] for run in runs})),
        "evaluation": lambda runs: spread(runs, "eval_return_mean"),
        "train return": lambda runs: spread(runs, "train_return_mean"),
        "V@limit": lambda runs: spread(runs, "value_at_time_limit"),
        "steps/s": lambda runs: f"{statistics.median(run.summary['sps'] for run in runs):,.0f}",
    }
    rows = [["run", *columns]]
    rows += [[name, *(column(runs) for column in columns.values())] for name, runs in groups.items()]
    return rows


def print_table(rows: list[list[str]]) -> None:
    """Numbers in columns under their headings; a name too long for an 80-column line stands on its own."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    room = max(0, 80 - sum(width + 2 for width in widths[1:]))
    for name, *cells in rows:
        line = "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        if len(name) > room:
            print(name)
            name = ""
        print(f"{name:<{min(widths[0], room)}}{line}")


def fresh_file() -> Path:
    """A file under runs/ that is not there yet."""
    name = time.strftime("compare_%Y%m%d-%H%M%S")
    endings = itertools.chain([""], (f"-{n}" for n in itertools.count(2)))
    paths = (Path("runs") / f"{name}{ending}.rrd" for ending in endings)
    return next(path for path in paths if not path.exists())


def write_overlay(path: Path, title: str, groups: dict[str, list[list[dict]]]) -> None:
    """Overlay groups of runs in a new file at `path`. groups: {its name: [its runs' metrics lines]}.

    A group has one colour in all plots: a thick line for the mean over its runs and, from two runs on, thin
    ones a standard deviation above and below. Raises ImportError where rerun is not installed, RuntimeError
    or OSError where the file cannot be written.
    """
    rr = import_rerun()
    import rerun.blueprint as rrb

    application = re.sub(r"[^A-Za-z0-9 _:-]", "-", title)
    stream = rr.RecordingStream(application, batcher_config=rr.ChunkBatcherConfig(flush_tick=10.0))
    stream.set_log_time_enabled(False)
    stream.set_log_tick_enabled(False)
    in_time(stream.set_sinks, rr.FileSink(path))
    logged: set[str] = set()
    for key in PLOTS:
        for (name, runs), color in zip(groups.items(), itertools.cycle(COLORS), strict=False):
            points: dict[int, list[float]] = {}  # step: what the runs have there
            for line in itertools.chain(*runs):
                if line.get(key) is not None:
                    points.setdefault(line["global_step"], []).append(line[key])
            pairs = {step: values for step, values in points.items() if len(values) > 1}
            curves = {
                "mean": {step: statistics.fmean(values) for step, values in points.items()},
                "below": {step: statistics.fmean(v) - statistics.stdev(v) for step, v in pairs.items()},
                "above": {step: statistics.fmean(v) + statistics.stdev(v) for step, v in pairs.items()},
            }
            for kind, curve in curves.items():
                if not curve:
                    continue
                label, width = (name, 2.5) if kind == "mean" else ("one std above and below", 0.7)
                entity = "/".join([key, rr.escape_entity_path_part(name), kind])
                style = rr.SeriesLines(names=label, colors=color, widths=width)
                stream.log(entity, style, static=True)
                steps = sorted(curve)
                times = rr.TimeColumn(TIMELINE, sequence=[0, *steps])  # a plot's ticks count from its first
                values = rr.Scalars.columns(scalars=[math.nan, *(curve[step] for step in steps)])
                stream.send_columns(entity, [times], values)
                logged.add(key)

    lines = itertools.chain(*itertools.chain(*groups.values()))
    total_steps = max((line["global_step"] for line in lines), default=0)
    keys = shown_plots(logged)
    views = [plot(PLOTS[key][0], f"/{key}", total_steps, legend=key == keys[0]) for key in keys]
    columns = [rrb.Vertical(*column) for column in (views[:2], views[2::2], views[3::2]) if column]
    layout = rrb.Horizontal(*columns, column_shares=[8, 5, 5][: len(columns)])
    panel = rrb.TimePanel(timeline=TIMELINE, state="collapsed")
    in_time(stream.send_blueprint, rrb.Blueprint(layout, panel, collapse_panels=True))
    in_time(complete, stream)


def overlay(groups: dict[str, list[Path]], path: Path, title: str) -> bool:
    """Record the curves of groups of run folders at `path`; says how to watch them, or why there is no
    recording."""
    curves = {name: [read_metrics(folder) for folder in folders] for name, folders in groups.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_overlay(path, title, curves)
    except ImportError:
        print("no overlay: rerun is not installed (pip install rerun-sdk)", file=sys.stderr)
        return False
    except (OSError, RuntimeError) as error:
        print(f"no overlay: {one_line(error)}", file=sys.stderr)
        return False
    print(f"overlay  {watch_command(path)}")
    return True


def main(argv: list[str] | None = None) -> int:
    """Print the table and write the overlay; returns the exit status: 2 where there is nothing to
    compare, 1 where an --out could not be written."""
    parser = argparse.ArgumentParser(prog="python -m common.compare", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run, a folder of runs, or a glob pattern")
    parser.add_argument("--out", metavar="FILE.rrd", help="the overlay; default: a fresh file under runs/")
    parser.add_argument("--no-rerun", action="store_true", help="only the table")
    args = parser.parse_args(argv)
    folders = find_runs(args.runs)
    if args.out and Path(args.out).exists():
        print(f"--out {args.out} is there already: name another file", file=sys.stderr)
        return 2
    if not folders:
        print("no run there: give a folder that a script wrote, or a folder of such folders", file=sys.stderr)
        return 2
    runs = [run for run in map(read_run, folders) if run]
    groups = group_runs(runs)
    if groups:
        print_table(table(groups))
    for run in runs:
        if run.summary["eval_returns"] is None:
            print(f"not evaluated: {run.folder}, which --resume does")
    if any(len({run.summary["seed"] for run in members}) == 1 for members in groups.values()):
        print("one run is noise: repeat a row with other seeds before believing a difference")
    for path in folders:
        if path not in [run.folder for run in runs]:
            lines = read_metrics(path)
            print(f"{UNFINISHED}: {path}, {lines[-1]['global_step'] if lines else 0:,} steps so far")
    if groups and not args.no_rerun:
        path = Path(args.out) if args.out else fresh_file()
        curves = {name: [run.folder for run in members] for name, members in groups.items()}
        written = overlay(curves, path, "compare " + path.stem.removeprefix("compare_"))
        return 0 if written or args.out is None else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
