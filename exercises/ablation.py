"""What exercise 2 runs: `ppo_continuous.py` with a trick and without it, over several seeds.

`python -m exercises.ex2_predict_ablation` comes here. The results are written after every run, so that one
that was stopped goes on where it was; the prediction is written before the first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
SEEDS = range(8)
ARMS = {"with": [], "without": ["--no-norm-adv"]}
SETTINGS = ["--total-timesteps", "30000", "--no-rerun"]

# What one may predict, and conclude. The first that holds is the answer.
ANSWERS = {
    "always": "on every seed the run with it scored higher",
    "on average": "not on every seed, but the 95% interval of the mean difference lies above 0",
    "hurts": "the 95% interval of the mean difference lies below 0",
    "cannot tell": "the 95% interval of the mean difference holds 0",
}


def read(path: Path) -> dict[str, Any]:
    """The results file: {"prediction": ..., "predicted_at": ..., "command": ..., "scores": {"with": {"0":
    443.0, ...}, "without": {...}}}; {} where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write(path: Path, results: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def missing(results: dict[str, Any]) -> list[tuple[str, int]]:
    """The runs, (arm, seed), that have no score yet."""
    return [(arm, seed) for seed in SEEDS for arm in ARMS if str(seed) not in results["scores"][arm]]


def differences(results: dict[str, Any]) -> np.ndarray:
    """Score with minus score without, seed by seed."""
    with_it, without = (results["scores"][arm] for arm in ("with", "without"))
    return np.array([with_it[str(seed)] - without[str(seed)] for seed in SEEDS])


def bootstrap_interval(values: np.ndarray, resamples: int = 10_000) -> tuple[float, float]:
    """A 95% interval of the mean: how far it would wander if the seeds had come out otherwise.

    Draw as many values as there are, with replacement; take their mean; do that ten thousand times; leave out
    the lowest and the highest 2.5% of these means.
    """
    rng = np.random.default_rng(0)
    means = rng.choice(values, (resamples, len(values))).mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def answer(results: dict[str, Any]) -> str:
    """Which of ANSWERS the scores bear out."""
    difference = differences(results)
    low, high = bootstrap_interval(difference)
    if (difference > 0).all():
        return "always"
    return "on average" if low > 0 else "hurts" if high < 0 else "cannot tell"


def table(results: dict[str, Any]) -> Iterator[str]:
    """The lines that are printed when all runs are done."""
    yield "    seed      with   without   difference"
    difference = differences(results)
    scores = [[results["scores"][arm][str(seed)] for arm in ARMS] for seed in SEEDS]
    for seed, (with_it, without), change in zip(SEEDS, scores, difference, strict=True):
        yield f"    {seed:>4}{with_it:>10.1f}{without:>10.1f}{change:>+13.1f}"
    low, high = bootstrap_interval(difference)
    yield f"    mean{np.mean(scores, 0)[0]:>10.1f}{np.mean(scores, 0)[1]:>10.1f}{difference.mean():>+13.1f}"
    yield f"    95% bootstrap interval of the mean difference: {low:+.1f} to {high:+.1f}"


def train(arm: str, seed: int) -> float:
    """Train one run in a process of its own; returns its mean evaluation return."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = ["ppo_continuous.py", "--seed", str(seed), *SETTINGS, *ARMS[arm], "--out", str(out)]
        done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"python {' '.join(command)} stopped: {(done.stderr or done.stdout).strip()}")
        return json.loads((out / "summary.json").read_text())["eval_return_mean"]


def run(prediction: str | None, path: Path) -> int:
    """Train what is missing from the results at `path` and print the table; returns the exit status."""
    if prediction not in ANSWERS:
        what = "PREDICTION is not written yet" if prediction is None else f"PREDICTION is {prediction!r}"
        choices = ", ".join(f'"{choice}"' for choice in ANSWERS)
        print(f"{what}: choose one of {choices}, then run this again.", file=sys.stderr)
        return 2
    results = read(path)
    if not results:
        results = {
            "prediction": prediction,
            "predicted_at": time.strftime("%Y-%m-%d %H:%M:%S"),
            "command": " ".join(["python ppo_continuous.py --seed SEED", *SETTINGS, "(and --no-norm-adv)"]),
            "scores": {arm: {} for arm in ARMS},
        }
        write(path, results)  # before the first run: nobody predicts what they have seen
    todo = missing(results)
    total = len(SEEDS) * len(ARMS)
    workers = max(1, min(len(todo), os.cpu_count() or 1, 4))
    print(f"prediction   {results['prediction']!r}, recorded {results['predicted_at']} in {path.name}")
    if todo:
        print(
            f"{results['command']}\n{len(todo)} runs, {workers} at a time; about a minute on two cores",
            flush=True,
        )
    pool = ThreadPoolExecutor(workers)
    jobs = {pool.submit(train, arm, seed): (arm, seed) for arm, seed in todo}
    try:
        for job in as_completed(jobs):
            arm, seed = jobs[job]
            results["scores"][arm][str(seed)] = job.result()
            write(path, results)
            done = total - len(missing(results))
            print(f"  {done:>2} of {total}   seed {seed}  {arm:<8}{job.result():>7.1f}", flush=True)
    except (KeyboardInterrupt, RuntimeError) as stop:
        print(f"{stop or 'stopped'}: what is done is kept, and the same command goes on with the rest")
        return 1
    finally:
        pool.shutdown(cancel_futures=True)
    print("\n" + "\n".join(table(results)))
    print(
        "\nnext: write CONCLUSION and UPSETS in exercises/ex2_predict_ablation.py, then: pytest "
        "exercises/test_ex2.py"
    )
    return 0
