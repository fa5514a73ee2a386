"""Learning results over seeds.

    python -m tests.benchmarks.results run pendulum --seeds 5    # train, two seeds side by side; go on if cut
    python -m tests.benchmarks.results table                     # print what results.json holds

A recipe is a command line of the README. Every seed is a run of its own under runs/results/, evaluated over
100 episodes on the same evaluation seeds; an interrupted run is resumed, a finished one is kept.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent.parent
RESULTS = Path(__file__).parent / "results.json"
PENDULUM = (
    "ppo_continuous.py --env-id Pendulum-v1 --total-timesteps 200000 --num-envs 1 --num-steps 2048 "
    "--num-minibatches 32 --update-epochs 10 --learning-rate 1e-3 --gamma 0.98 --gae-lambda 0.95"
)
LUNAR_LANDER = (
    "ppo_discrete.py --env-id LunarLander-v3 --total-timesteps 1000000 --num-envs 8 --num-steps 512 "
    "--num-minibatches 16 --update-epochs 8 --learning-rate 1e-3 --gamma 0.999 --gae-lambda 0.98 "
    "--ent-coef 0.01 --norm-obs --norm-reward"
)
RECIPES = {
    "continuous": "ppo_continuous.py",
    "discrete": "ppo_discrete.py",
    "a2c": "a2c.py",
    "ppo at a2c's budget": "ppo_discrete.py --total-timesteps 500000",
    "pendulum": PENDULUM,
    "pendulum --norm-reward": f"{PENDULUM} --num-envs 4 --num-steps 512 --norm-reward",
    "pendulum --break": f"{PENDULUM} --break",
    "pendulum --break-reset": f"{PENDULUM} --break-reset",
    "lunar lander": LUNAR_LANDER,
}
ABLATIONS = (
    "--no-clip-ratio", "--no-norm-adv", "--clip-vloss", "--no-anneal-lr", "--gae-lambda 1.0",
    "--no-orthogonal-init", "--max-grad-norm 0", "--shared-trunk", "--norm-obs", "--norm-reward",
    "--break", "--break-reset", "--ent-coef 0.01", "--target-kl 0.02", "--optimizer rmsprop",
)  # fmt: skip
for flags in (*ABLATIONS, "--squash", "--log-std-init -1.0"):
    RECIPES[f"continuous {flags}"] = f"ppo_continuous.py {flags}"
for flags in ABLATIONS:
    RECIPES[f"discrete {flags}"] = f"ppo_discrete.py {flags}"


def interquartile_mean(scores: np.ndarray) -> float:
    """The mean of the middle half: float[n] -> float. Between samples it weighs the border ones in part."""
    scores, n = np.sort(scores), len(scores)
    inside = np.clip(np.minimum(np.arange(1, n + 1) - n / 4, 3 * n / 4 - np.arange(n)), 0, 1)
    return float((scores * inside).sum() / inside.sum())


def bootstrap_interval(scores: np.ndarray, draws: int = 10_000) -> tuple[float, float]:
    """95% interval of the interquartile mean over resampled seeds (Agarwal et al. 2021, arXiv:2108.13264)."""
    rng = np.random.default_rng(0)
    means = [interquartile_mean(rng.choice(scores, len(scores))) for _ in range(draws)]
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


def run_seed(recipe: str, seed: int) -> dict:
    """Train one seed, or go on with it, or take it as it is; returns its summary."""
    folder = ROOT / "runs" / "results" / recipe.replace(" ", "_") / f"seed{seed}"
    summary = folder / "summary.json"
    if not summary.exists():
        script, *flags = shlex.split(RECIPES[recipe])
        resumed = (folder / "checkpoint.pt").exists()
        where = ["--resume", folder] if resumed else [*flags, "--seed", str(seed), "--out", folder]
        words = [sys.executable, script, *where, "--eval-episodes", "100", "--no-rerun"]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{recipe}, seed {seed}: {done.stderr.strip()}")
    return json.loads(summary.read_text())


def run(recipe: str, seeds: int, jobs: int) -> None:
    """Train the seeds 0 .. seeds-1 of a recipe, `jobs` at a time, and put them into results.json."""
    with ThreadPoolExecutor(jobs) as pool:
        summaries = []
        for summary in pool.map(lambda seed: run_seed(recipe, seed), range(seeds)):
            summaries.append(summary)
            print(f"{recipe}  seed {summary['seed']}  {summary['eval_return_mean']:.1f}", flush=True)
    keep = ("seed", "eval_return_mean", "train_return_mean", "value_at_time_limit", "sps", "eval_returns")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[recipe] = {"command": RECIPES[recipe], "runs": [{k: s[k] for k in keep} for s in summaries]}
    RESULTS.write_text(json.dumps(results, indent=0, sort_keys=True) + "\n")


def table() -> None:
    """One line a recipe: the interquartile mean and its interval from 5 seeds on, and every seed."""
    results = json.loads(RESULTS.read_text())
    for recipe in (name for name in RECIPES if name in results):
        runs = results[recipe]["runs"]
        scores = np.array([r["eval_return_mean"] for r in runs])
        line = f"{recipe:<34}{len(scores):>3} seeds"
        if len(scores) >= 5:
            low, high = bootstrap_interval(scores)
            line += f"  IQM {interquartile_mean(scores):.1f} [{low:.1f}, {high:.1f}]"
        at_limit = [r["value_at_time_limit"] for r in runs if r["value_at_time_limit"] is not None]
        line += f"  train {np.mean([r['train_return_mean'] for r in runs]):.1f}"
        line += f"  V@limit {np.mean(at_limit):.1f}" if at_limit else ""
        print(line + "  " + " ".join(f"{score:.0f}" for score in scores))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run", help="train recipes and store their results")
    runner.add_argument("recipes", nargs="+", metavar="RECIPE", help="; ".join(RECIPES))
    runner.add_argument("--seeds", type=int, default=5)
    runner.add_argument("--jobs", type=int, default=2, help="runs side by side")
    commands.add_parser("table", help="print the stored results")
    args = parser.parse_args()
    if args.command == "table":
        table()
        return
    for recipe in args.recipes:
        if recipe not in RECIPES:
            parser.error(f"no recipe {recipe!r}; there are: {', '.join(RECIPES)}")
        run(recipe, args.seeds, args.jobs)


if __name__ == "__main__":
    main()
