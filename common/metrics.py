"""What a run measures: the lines of metrics.jsonl, what they come to, and what an evaluation comes to."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.cli import NonFinite, cannot_write
from common.console import evaluation_line, say
from common.files import write_json


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


def interquartile_mean(scores: np.ndarray) -> np.ndarray:
    """The mean of the middle half: float[..., n] -> float[...]. Between samples it weighs the border ones in
    part."""
    n = scores.shape[-1]
    inside = np.clip(np.minimum(np.arange(1, n + 1) - n / 4, 3 * n / 4 - np.arange(n)), 0, 1)
    return (np.sort(scores) * inside).sum(-1) / inside.sum()


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


def read_summary(folder: Path) -> dict[str, Any] | None:
    """The content of summary.json; None without the file."""
    path = folder / "summary.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


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


def evaluation_summary(returns: list[float] | None) -> dict[str, Any]:
    """Mean, standard deviation over episodes, and every return; without an evaluation all are None."""
    return {
        "eval_return_mean": float(np.mean(returns)) if returns else None,
        "eval_return_std": float(np.std(returns)) if returns else None,
        "eval_returns": returns,
        "eval_episodes": None if returns is None else len(returns),
    }


def report_evaluation(args: Any, checkpoint: dict[str, Any], returns: list[float], stopped: int) -> None:
    """Print what `--eval-only` found and write it to eval.json in the run's folder, or raise CannotWrite."""
    say(evaluation_line(args, returns, stopped))
    path = Path(args.eval_only) / "eval.json"
    try:
        write_json(path, {"global_step": checkpoint["global_step"], **evaluation_summary(returns)})
    except OSError as error:
        raise cannot_write(path, error, "the run itself is as it was") from error
