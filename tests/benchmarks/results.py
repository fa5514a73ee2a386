"""Learning results over seeds: one command trains them, one prints the tables and draws the figures.

    python -m tests.benchmarks.results run pendulum --seeds 5    # two seeds side by side; go on if cut
    python -m tests.benchmarks.results run --main                # every recipe of the README's table
    python -m tests.benchmarks.results run --ablations           # every flag off, ten seeds each
    python -m tests.benchmarks.results report                    # results.json to the tables and the figures

A recipe is a command line of docs/recipes.md. Every seed is a run of its own under runs/results/, evaluated
over 100 episodes on the same evaluation seeds; an interrupted run is resumed, a finished one is kept.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from common.metrics import interquartile_mean, read_metrics, read_summary
from tests.benchmarks.motion import motion

ROOT = Path(__file__).parent.parent.parent
RESULTS = Path(__file__).parent / "results.json"
SPEED = Path(__file__).parent / "speed.json"
REPORT = Path(__file__).parent / "RESULTS.md"
DOCS = ROOT / "docs"
MAIN_TABLE = "results"  # the README's; the recipes of a variant have a table of their own in docs/
CURVE_POINTS = 50  # a training curve is kept as this many means


REPORT_HEAD = """# Results

Written by `python -m tests.benchmarks.results report` from `results.json`: do not edit. Returns are those of
evaluations of the last checkpoint over 100 episodes with the best action, on the same evaluation seeds for
every run. IQM is the interquartile mean over training seeds and, from five seeds on, its bootstrap 95%
interval (Agarwal et al. 2021, arXiv:2108.13264), which from so few seeds is too narrow; [500, 500] is the
cart-poles' ceiling, not precision. `training` is the mean return of all training episodes.

## Recipes

Trained by `python -m tests.benchmarks.results run --main`.

![Training curves of the recipes](../../docs/results.png)
"""
WHERE = """Episodes have other seeds since commit 4f536a8: what was trained before it gives other digits when
it is trained again, of the same algorithm."""
REPORT_ABLATIONS = """
## Ablations

Trained by `python -m tests.benchmarks.results run --main --ablations`: the command as it is, then with a flag
added. A run is cut into 50 equal parts: `steps to` is the end of the first one whose mean training return
reached the threshold, and how many runs did; a run that never does counts with its whole budget. `training`
is the mean return of all training episodes, `final` the evaluation. `V@limit` is the mean value of the states
in which the clock ran out, in the last ten iterations in which it did; runs in which it never did are left
out, and with `--norm-reward` it is in units of scaled rewards."""


class Recipe(NamedTuple):
    """A command line, on how many seeds it is reported, below what its mean and its lowest seed must not fall
    (a test holds it), and the table it stands in: the one that a page shows at `<!-- NAME -->`, or "" for
    none."""

    command: str
    seeds: int = 10
    least_mean: float = -math.inf
    least_seed: float = -math.inf
    table: str = MAIN_TABLE


MUJOCO = (
    "--total-timesteps 1000000 --num-envs 4 --num-steps 512 --num-minibatches 32 --update-epochs 10 "
    "--learning-rate 3e-4 --gae-lambda 0.95 --norm-obs --norm-reward"
)
RECIPES = {
    "continuous": Recipe("ppo_continuous.py", 10, 500, 500),
    "pendulum": Recipe(
        "ppo_continuous.py --env-id Pendulum-v1 --total-timesteps 200000 --num-minibatches 8 "
        "--update-epochs 10 --learning-rate 1e-3 --norm-reward",
        10,
        -165,
    ),
    "hopper": Recipe(f"ppo_continuous.py --env-id Hopper-v5 {MUJOCO}", 5, 2300, 1500),
    "half cheetah": Recipe(f"ppo_continuous.py --env-id HalfCheetah-v5 {MUJOCO}", 5, 1800),
    "half cheetah tuned": Recipe(
        "ppo_continuous.py --env-id HalfCheetah-v5 "
        + MUJOCO.replace("--gae-lambda 0.95", "--gamma 0.98 --gae-lambda 0.92")
        + " --log-std-init -1.0 --hidden-dim 256",
        5,
        4000,
    ),
    "discrete": Recipe("ppo_discrete.py", 10, 470),
    "lunar lander": Recipe(
        "ppo_discrete.py --env-id LunarLander-v3 --total-timesteps 1000000 --num-envs 8 --num-steps 512 "
        "--num-minibatches 16 --update-epochs 8 --learning-rate 1e-3 --gamma 0.999 --gae-lambda 0.98 "
        "--ent-coef 0.01 --norm-obs --norm-reward",
        5,
        240,
        180,
    ),
    "acrobot": Recipe("ppo_discrete.py --env-id Acrobot-v1 --total-timesteps 500000", 5, -83),
    "a2c": Recipe("a2c.py", 5, 495),
    "ppo at a2c's budget": Recipe("ppo_discrete.py --total-timesteps 500000", 5),
    "batched": Recipe(
        "ppo_gpu_batched.py --num-envs 64 --num-steps 64 --total-timesteps 131072 --learning-rate 6e-3 "
        "--threads 1",
        10,
        495,
        475,
    ),
    "batched pendulum": Recipe(
        "ppo_gpu_batched.py --env-id Pendulum-v1 --total-timesteps 204800 --num-envs 16 --num-steps 128 "
        "--num-minibatches 16 --update-epochs 10 --learning-rate 1e-3 --norm-reward --threads 1",
        10,
        -165,
    ),
}
TAXI = (
    "ppo_discrete.py --env-id Taxi-v4 --total-timesteps 200000 --num-steps 256 --gae-lambda 0.95 "
    "--ent-coef 0.01 --norm-reward"
)
RECIPES["taxi"] = Recipe(TAXI, 5, table="masks")
RECIPES["taxi masked"] = Recipe(f"{TAXI} --mask-actions", 5, 7.0, table="masks")
MEMORY = "-m variants.ppo_memory"
REPEAT = f"{MEMORY} --env-id RepeatFirst-v0 --total-timesteps 100000"
REPEAT_32 = (
    f"{MEMORY} --env-id RepeatFirst-v0 --total-timesteps 200000 --env-kwargs '{{\"length\": 32}}' "
    "--num-steps 66 --bptt-length 33"
)
for name, command, seeds, least in (
    ("memory", MEMORY, 5, 450),
    ("repeat first", REPEAT, 3, 0.95),
    ("repeat 32", REPEAT_32, 2, 0.95),
):
    for memory in ("gru", "lstm", "transformer", "mamba"):
        RECIPES[f"{name} {memory}"] = Recipe(f"{command} --memory {memory}", seeds, least, table="memory")
    RECIPES[f"{name} none"] = Recipe(f"{command} --memory none", seeds, table="memory")
# Mamba does not learn this one, and so promises nothing.
RECIPES["repeat 32 mamba"] = RECIPES["repeat 32 mamba"]._replace(least_mean=-math.inf)
RECIPES["memory break"] = Recipe(f"{MEMORY} --break-memory", 3, table="memory_bugs")
RECIPES["memory stale"] = Recipe(f"{MEMORY} --break-stale", 3, table="memory_bugs")
RECIPES["repeat first break"] = Recipe(f"{REPEAT} --break-memory", 3, table="memory_bugs")
RECIPES["repeat first stale"] = Recipe(f"{REPEAT} --break-stale", 3, table="memory_bugs")
RECIPES["pendulum no velocity"] = Recipe(
    f"{MEMORY} --env-id PendulumNoVelocity-v0 --gamma 0.97 --norm-reward", 5, -260, table="memory"
)
WHOLE = f"{MEMORY} --env-id Pendulum-v1 --memory none --gamma 0.97 --norm-reward"
RECIPES["rollout advantages"] = Recipe(WHOLE, 5, table="layouts")
RECIPES["minibatch advantages"] = Recipe(f"{WHOLE} --recompute-advantages", 5, table="layouts")
PIXELS = "-m variants.ppo_pixels"
RECIPES["catch"] = Recipe(PIXELS, 5, 0.99, table="images")
CART_POLE = (
    f"{PIXELS} --env-id CartPolePixels-v0 --total-timesteps 120000 --learning-rate 5e-4 --ent-coef 0 "
    "--norm-reward"
)
RECIPES["two frames"] = Recipe(f"{CART_POLE} --frame-stack 2", 5, 400, table="images")
RECIPES["one frame"] = Recipe(CART_POLE, 3, table="images")
for game in ("Breakout", "Asterix"):
    command = f"--env-id MinAtar/{game}-v1 --total-timesteps 1000000 --num-envs 16 --num-minibatches 8"
    RECIPES[game.lower()] = Recipe(f"{PIXELS} {command}", 3, table="images")
IMITATION = "-m variants.ppo_imitation"
ALONE = f"{IMITATION} --pretrain-epochs 300 --total-timesteps 0"
POLE = f"{IMITATION} --env-id CartPoleContinuous-v0 --total-timesteps 150000"
for name, recipe in {
    "clone 1": Recipe(f"{ALONE} --demo-episodes 1", 5),
    "clone 5": Recipe(ALONE, 5),
    "gail": Recipe(IMITATION, 5, -250),
    "clone then gail": Recipe(f"{IMITATION} --pretrain-epochs 300", 5, -250),
    "true reward": Recipe(f"{IMITATION} --reward env", 3),
    "gail shuffled": Recipe(f"{IMITATION} --break-demos", 3),
    "gail frozen": Recipe(f"{IMITATION} --discriminator-updates 0", 3),
    "pole gail": Recipe(POLE, 3, 450),
    "pole shuffled": Recipe(f"{POLE} --break-demos", 3),
    "pole frozen": Recipe(f"{POLE} --discriminator-updates 0", 3),
}.items():
    RECIPES[name] = recipe._replace(table="imitation")
ROBOT = "-m variants.ppo_robot"
POLE = f"{ROBOT} --env-id CartPoleContinuousNoVelocity-v0"
SET_POINT = f"{ROBOT} --env-id SetPoint-v0"
for name, recipe in {
    "one masked frame": Recipe(f"{POLE} --no-privileged-critic"),
    "one frame, privileged": Recipe(POLE),
    "four masked frames": Recipe(f"{POLE} --frame-stack 4 --no-privileged-critic", 5, 450),
    "four frames, privileged": Recipe(f"{POLE} --frame-stack 4", 5, 450),
    "robot pendulum": Recipe(ROBOT, 5, -165),
    "mirror loss": Recipe(f"{ROBOT} --mirror-coef 1", 5, -165),
    **{f"action rate {w}": Recipe(f"{ROBOT} --action-rate-cost {w}", 5, -185) for w in (0.1, 0.3, 0.5)},
    **{f"set point {kind}": Recipe(f"{SET_POINT} --actor {kind}", 5) for kind in ("p", "pd", "pid")},
}.items():
    RECIPES[name] = recipe._replace(seeds=5, table="robot")
RECIPES["robot hopper"] = Recipe(
    f"{ROBOT} --env-id Hopper-v5 --total-timesteps 2000000 --num-envs 64 --num-steps 64 --norm-obs "
    "--learning-rate 5e-4 --gae-lambda 0.95",
    3,
    table="robot",
)
RECIPES["raw pendulum"] = Recipe(
    "ppo_continuous.py --env-id Pendulum-v1 --total-timesteps 200000 --num-envs 4 --num-steps 512 "
    "--num-minibatches 32 --update-epochs 10 --learning-rate 1e-3 --gae-lambda 0.95",
    5,
    table="",
)

# Each trick by the flag that turns it over, beside the scripts' defaults and the Pendulum-v1 recipe, and what
# the tables below say of it in one line.
TRICKS = {
    "--no-clip-ratio": "updates without bound: seven cart-poles of ten end below 500, Pendulum is lost",
    "--no-norm-adv": "nothing lost on the cart-pole; Pendulum learns a little slower",
    "--clip-vloss": "three cart-poles of ten end below 500; V lags behind (V@limit 81 for 100)",
    "--no-anneal-lr": "the last updates stay large: Pendulum's end is less steady",
    "--gae-lambda 1.0": "the cart-pole learns faster, Pendulum takes nearly twice as long",
    "--no-orthogonal-init": "no difference that ten seeds show",
    "--max-grad-norm 0": "three cart-poles of ten end below 500",
    "--shared-trunk": "one body for actor and critic: the cart-pole suffers, Pendulum does not",
    "--norm-obs": "costs on both, whose observations need no scaling",
    "--norm-reward": "slows the cart-pole; without it this Pendulum recipe fails",
}
SQUASH = {"--squash": "Pendulum learns faster; nothing gained on the cart-pole"}
BUGS = ("--break", "--break-reset")


class Ablation(NamedTuple):
    """A table: the recipe it changes, the training return that `steps to` counts to, and the flags."""

    title: str
    base: str
    threshold: float
    flags: tuple[str, ...]


ABLATIONS = (
    Ablation("ppo_continuous.py, CartPoleContinuous-v0", "continuous", 400.0, (*TRICKS, *BUGS, *SQUASH)),
    Ablation(
        "ppo_continuous.py, Pendulum-v1",
        "pendulum",
        -250.0,
        (*(f.replace("--norm-reward", "--no-norm-reward") for f in TRICKS), *BUGS, *SQUASH),
    ),
    Ablation("ppo_discrete.py, CartPole-v1", "discrete", 400.0, (*TRICKS, *BUGS)),
    # Rewards as they are, so that V is in their unit, and rollouts long enough to learn from them.
    Ablation("ppo_continuous.py, raw Pendulum-v1", "raw pendulum", -250.0, BUGS),
)
for _, base, _, flags in ABLATIONS:
    command, seeds = RECIPES[base][:2]
    RECIPES |= {f"{base} {flag}": Recipe(f"{command} {flag}", seeds, table="") for flag in flags}


def tables() -> dict[str, list[str]]:
    """The names of the recipes of each table, in the order in which they are given above."""
    found: dict[str, list[str]] = {}
    for name, recipe in RECIPES.items():
        if recipe.table:
            found.setdefault(recipe.table, []).append(name)
    return found


def script_and_flags(command: str) -> tuple[list[str], list[str]]:
    """A command line in two: ["ppo_discrete.py"] or ["-m", "variants.ppo_memory"], and its flags."""
    words = shlex.split(command)
    cut = 2 if words[0] == "-m" else 1
    return words[:cut], words[cut:]


def setting(command: str, field: str) -> Any:
    """What a command line sets a field of the script's Args to: the script's default where it does not."""
    script, flags = script_and_flags(command)
    default = getattr(importlib.import_module(script[-1].removesuffix(".py")).Args(), field)
    flag = "--" + field.replace("_", "-")
    return type(default)(flags[flags.index(flag) + 1]) if flag in flags else default


def bootstrap_interval(scores: np.ndarray, draws: int = 10_000) -> tuple[float, float]:
    """95% interval of the interquartile mean over resampled seeds (Agarwal et al. 2021, arXiv:2108.13264)."""
    means = interquartile_mean(np.random.default_rng(0).choice(scores, (draws, len(scores))))
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


def machine() -> str:
    """Processor, cores and torch, as the tables name them."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    processor = (models or [platform.processor() or platform.machine()])[0]
    return f"{processor}, {os.cpu_count()} cores, torch {torch.__version__}"


def commit() -> str:
    """The commit the repository is at; with a + where the scripts, variants/ or common/ differ from it."""

    def git(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)

    changed = git("diff", "--quiet", "HEAD", "--", ":(glob)*.py", "common", "variants").returncode
    return (git("rev-parse", "--short", "HEAD").stdout.strip() or "unknown") + "+" * bool(changed)


def folder_of(recipe: str) -> Path:
    """Where a recipe's runs are; a changed command line has another folder."""
    mark = hashlib.sha256(RECIPES[recipe].command.encode()).hexdigest()[:8]
    return ROOT / "runs" / "results" / f"{recipe.replace(' ', '_')}-{mark}"


def run_seed(recipe: str, seed: int) -> dict[str, Any]:
    """Train one seed, or go on with it, or take it as it is; returns its row for results.json. Raises
    RuntimeError where the script refuses or fails, and where the run has no evaluation."""
    folder = folder_of(recipe) / f"seed{seed}"
    script, flags = script_and_flags(RECIPES[recipe].command)
    summary = read_summary(folder)
    if summary is None or summary["eval_returns"] is None:  # not trained, or cut in its evaluation
        resumed = (folder / "checkpoint.pt").exists()
        where = ["--resume", folder] if resumed else [*flags, "--seed", str(seed), "--out", folder]
        words = [sys.executable, *script, *where, "--eval-episodes", "100", "--no-rerun"]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{recipe}, seed {seed}: {done.stderr.strip() or done.stdout.strip()}")
        where = f"{machine()}; commit {commit()}, {time.strftime('%Y-%m-%d')}"
        (folder / "trained.txt").write_text(where)
    summary = read_summary(folder)
    if summary["eval_return_mean"] is None:
        raise RuntimeError(
            f"{recipe}, seed {seed}: no result, since its evaluation failed: python {' '.join(script)} "
            f"--eval-only {folder} says why; without that folder it is trained anew"
        )
    kept = ("seed", "eval_return_mean", "train_return_mean", "value_at_time_limit", "train_seconds")
    row = {key: summary[key] for key in kept}
    if script[-1] == "variants.ppo_robot":
        last = read_metrics(folder)[-10:]
        row |= {f"last_{key}": middle([line[key] for line in last]) for key in ("action_rate", "asymmetry")}
        row |= motion(folder)
    return {
        **row,
        "trained": (folder / "trained.txt").read_text(),
        "curve": curve(read_metrics(folder), summary["global_step"]),
        "eval_returns": [round(score, 2) for score in summary["eval_returns"]],
    }


def middle(values: list[float | None]) -> float | None:
    """The mean; None where there is none."""
    return None if None in values else float(np.mean(values))


def curve(lines: list[dict[str, Any]], total: int) -> list[float | None]:
    """The mean return of the training episodes that ended in each CURVE_POINTS-th part of the run."""
    episodes, returns = np.zeros(CURVE_POINTS), np.zeros(CURVE_POINTS)
    for line in lines:
        if line["episodes"]:
            part = min((line["global_step"] - 1) * CURVE_POINTS // total, CURVE_POINTS - 1)
            episodes[part] += line["episodes"]
            returns[part] += line["episodes"] * line["episodic_return"]
    return [round(r / n, 1) if n else None for r, n in zip(returns, episodes, strict=True)]


def store(recipe: str, row: dict[str, Any]) -> None:
    """Put one seed's row into results.json, in place of an earlier one."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    command = RECIPES[recipe].command
    entry = results.get(recipe, {})
    rows = {r["seed"]: r for r in entry.get("runs", [])} if entry.get("command") == command else {}
    rows[row["seed"]] = row
    results[recipe] = {"command": command, "runs": [rows[seed] for seed in sorted(rows)]}
    write(results)


def write(results: dict[str, Any]) -> None:
    """results.json with one line for each run, so that a diff shows which runs changed."""
    blocks = []
    for recipe in sorted(results):
        name, command = json.dumps(recipe), json.dumps(results[recipe]["command"])
        runs = ",\n".join("  " + json.dumps(run) for run in results[recipe]["runs"])
        blocks.append(f'{name}: {{"command": {command},\n "runs": [\n{runs}]}}')
    temporary = RESULTS.with_suffix(".tmp")
    temporary.write_text("{\n" + ",\n".join(blocks) + "\n}\n")
    temporary.replace(RESULTS)


def run(jobs: list[tuple[str, int]], side_by_side: int) -> None:
    """Train (recipe, seed) pairs, that many at a time; each goes into results.json as it finishes."""
    started = time.perf_counter()
    pool = ThreadPoolExecutor(side_by_side)
    waiting = {pool.submit(run_seed, *job): job for job in jobs}
    try:
        for count, done in enumerate(as_completed(waiting), start=1):
            recipe, row = waiting[done][0], done.result()
            store(recipe, row)
            minutes = (time.perf_counter() - started) / 60
            score = f"{recipe}  seed {row['seed']}  {row['eval_return_mean']:.1f}"
            print(f"{count}/{len(jobs)}  {minutes:.1f} min  {score}", flush=True)
    except (KeyboardInterrupt, RuntimeError) as stop:
        pool.shutdown(cancel_futures=True)  # the runs got the Ctrl-C too: each saves itself first
        reason = str(stop) or "stopped and saved"
        print(f"{reason}\nrun the same command again to go on", file=sys.stderr)
        raise SystemExit(130 if isinstance(stop, KeyboardInterrupt) else 1) from None


def steps_to(curve: list[float | None], threshold: float, total: int) -> float:
    """Environment steps until the mean training return first reaches the threshold, to 1/CURVE_POINTS of the
    run; `total` where it never does."""
    reached = [score is not None and score >= threshold for score in curve]
    return total * (reached.index(True) + 1) / CURVE_POINTS if any(reached) else float(total)


def with_interval(values: list[float], digits: int = 0) -> str:
    """The interquartile mean and, from 5 values on, its 95% interval."""
    scores = np.array(values)
    text = f"{interquartile_mean(scores):,.{digits}f}"
    if len(scores) >= 5:
        low, high = bootstrap_interval(scores)
        text += f" [{low:,.{digits}f}, {high:,.{digits}f}]"
    return re.sub(r"-(0(?:\.0)?)(?![\d.])", r"\1", text)


def digits_of(values: list[float]) -> int:
    """One decimal where the scores are small."""
    return 0 if max(map(abs, values)) >= 250 else 1


def markdown(header: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]


def results_table(results: dict[str, Any], table: str, every_seed: bool) -> list[str]:
    """Environment, script, budget and what came out; at the end every seed, or the lowest."""
    rows = []
    for name in (n for n in tables()[table] if n in results):
        command = results[name]["command"]
        scores = [run["eval_return_mean"] for run in results[name]["runs"]]
        digits = digits_of(scores)
        training = [run["train_return_mean"] for run in results[name]["runs"]]
        middle = 0.0 if None in training else float(interquartile_mean(np.array(training)))
        last = " ".join(f"{score:,.{digits}f}" for score in (scores if every_seed else [min(scores)]))
        rows.append([
            name, setting(command, "env_id"), f"`{script_and_flags(command)[0][-1]}`",
            f"{setting(command, 'total_timesteps') / 1000:,.0f}k",
            "-" if None in training else f"{middle:,.{int(abs(middle) < 10)}f}",
            str(len(scores)), f"{np.mean(scores):,.{digits}f}", with_interval(scores, digits), last,
        ])  # fmt: skip
    header = ["recipe", "environment", "script", "steps", "training", "seeds", "mean", "IQM [95%]"]
    return markdown([*header, "each seed, from 0" if every_seed else "worst seed"], rows)


def ablation_table(ablation: Ablation, results: dict[str, Any]) -> list[str]:
    """One line for each flag: what it does to the speed of learning, to the score and to V@limit."""
    rows = []
    for flag in ("", *ablation.flags):
        name = f"{ablation.base} {flag}".strip()
        if name not in results:
            continue
        runs, total = results[name]["runs"], setting(results[name]["command"], "total_timesteps")
        steps = [steps_to(run["curve"], ablation.threshold, total) / 1000 for run in runs]
        reached = sum(max(s or -np.inf for s in run["curve"]) >= ablation.threshold for run in runs)
        final, training = ([run[key] for run in runs] for key in ("eval_return_mean", "train_return_mean"))
        at_limit = [v for run in runs if (v := run["value_at_time_limit"]) is not None]
        rows.append([
            f"`{flag}`" if flag else "as it is",
            f"{with_interval(steps)}, {reached} of {len(runs)}",
            with_interval(training),
            with_interval(final, digits_of(final)),
            with_interval(at_limit, 1) if at_limit else "-",
        ])  # fmt: skip
    header = ["flag", f"thousand steps to {ablation.threshold:.0f}", "training", "final", "V@limit"]
    return markdown(header, rows)


def tricks_table(results: dict[str, Any]) -> list[str]:
    """A line for each trick, its score on two environments and what it buys."""
    rows = []
    for flag, meaning in {"": "", **TRICKS, **SQUASH}.items():
        cells = [f"`{flag}`" if flag else "as it is"]
        for ablation in ABLATIONS[:2]:
            changed = flag if f"{ablation.base} {flag}" in results else flag.replace("--", "--no-", 1)
            entry = results[f"{ablation.base} {changed}".strip()]
            final = [run["eval_return_mean"] for run in entry["runs"]]
            cells.append(with_interval(final))
            training = np.array([run["train_return_mean"] for run in entry["runs"]])
            cells.append(f"{interquartile_mean(training):,.0f}")
        rows.append([*cells, meaning])
    header = ["flag", "cart-pole", "training", "Pendulum-v1", "training", "what it shows"]
    return markdown(header, rows)


def motion_table(results: dict[str, Any]) -> list[str]:
    """What the policies of `variants.ppo_robot` do beside scoring: means over seeds."""

    def mean(runs: list[dict[str, Any]], key: str, form: str) -> str:
        values = [run[key] for run in runs]
        return "-" if None in values else f"{np.mean(values):{form}}"

    rows = []
    for name in (n for n in tables()["robot"] if n in results):
        runs = results[name]["runs"]
        keys = ("last_action_rate", "action_rate", "last_asymmetry", "asymmetry", "steady_error")
        rows.append([name, mean(runs, "eval_return_mean", ",.1f"), *(mean(runs, key, ".2g") for key in keys)])
    header = ["recipe", "return", "rate, training", "rate", "asymmetry, training", "asymmetry"]
    return markdown([*header, "steady error"], rows)


def bugs_table(results: dict[str, Any]) -> list[str]:
    """What --break and --break-reset do to the score and to the value at the time limit."""
    rows = []
    for flag in ("", *BUGS):
        cells = [f"`{flag}`" if flag else "as it is"]
        for base in ("continuous", "pendulum", "raw pendulum"):
            runs = results[f"{base} {flag}".strip()]["runs"]
            for key, digits in (("eval_return_mean", 0), ("value_at_time_limit", 1)):
                cells.append(with_interval([run[key] for run in runs], digits))
        rows.append(cells)
    header = ["flag", "cart-pole", "V@limit", "Pendulum-v1", "V@limit", "raw rewards", "V@limit"]
    return markdown(header, rows)


def blocks(results: dict[str, Any]) -> dict[str, list[str]]:
    """What the pages show of the results, by the name that it has there."""
    from tests.benchmarks.speed import speed_section

    return {
        "tricks": tricks_table(results),
        "bugs": bugs_table(results),
        "motion": motion_table(results),
        "speed": speed_section(json.loads(SPEED.read_text())),
        **{table: results_table(results, table, every_seed=False) for table in tables()},
    }


def pages() -> list[Path]:
    """The README and the pages of docs/."""
    return [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]


def with_blocks(page: str, written: dict[str, list[str]]) -> str:
    """A page's text with its blocks anew: each stands between `<!-- its name -->` and `<!-- end -->`."""

    def block(found: re.Match) -> str:
        return "\n".join([f"<!-- {found[1]} -->", *written[found[1]], "<!-- end -->"])

    return re.sub(r"<!-- (?!end)(\w+) -->.*?<!-- end -->", block, page, flags=re.S)


def report() -> None:
    """Write RESULTS.md, the blocks of the pages and the figures from results.json."""
    if importlib.util.find_spec("matplotlib") is None:
        sys.exit('the figures need matplotlib: pip install -e ".[bench]"')
    results = json.loads(RESULTS.read_text())
    REPORT.write_text("\n".join(report_lines(results)) + "\n")
    print(REPORT.read_text())
    written = blocks(results)
    for page in pages():
        page.write_text(with_blocks(page.read_text(), written))
    draw(results)


def report_lines(results: dict[str, Any]) -> list[str]:
    """The text of RESULTS.md."""
    lines = [REPORT_HEAD]
    for table, names in tables().items():
        if table != MAIN_TABLE:
            lines += ["", f"### {table.capitalize()}", ""]
        lines += [*results_table(results, table, every_seed=True), "", "```"]
        lines += [f"{name + ':':<22}{results[name]['command']}" for name in names if name in results]
        lines += ["```"]
    lines.append(REPORT_ABLATIONS)
    for ablation in ABLATIONS:
        command = f"`{results[ablation.base]['command']}` and a flag:"
        lines += ["", f"### {ablation.title}", "", command, "", *ablation_table(ablation, results)]
    lines += ["", "Final scores, each seed from 0:", "", "```"]
    for name in (n for n in RECIPES if n in results and not RECIPES[n].table):
        scores = " ".join(f"{run['eval_return_mean']:.0f}" for run in results[name]["runs"])
        lines.append(f"{name:<34}{scores}")
    lines += ["```", "", "## Where", "", WHERE, ""]
    where: dict[str, list[str]] = {}
    for name, entry in results.items():
        for row in entry["runs"]:
            where.setdefault(row["trained"], []).append(f"{name} seed {row['seed']}")
    most = max(where, key=lambda place: len(where[place]))
    lines.append(f"{len(where.pop(most))} runs: {most}")
    return lines + [f"- {', '.join(runs)}: {place}" for place, runs in where.items()]


def draw_curves(axis: Any, entry: dict[str, Any], label: str, color: str) -> None:
    """A recipe's training curves: the median over seeds, and a band from the lower quartile to the upper."""
    curves = np.array([run["curve"] for run in entry["runs"]], float)  # NaN where no episode ended
    total = setting(entry["command"], "total_timesteps")
    steps = total / 1000 * (np.arange(CURVE_POINTS) + 0.5) / CURVE_POINTS
    known = ~np.isnan(curves).all(0)
    curves, steps = curves[:, known], steps[known]
    low, middle, high = np.nanquantile(curves, [0.25, 0.5, 0.75], axis=0)
    axis.plot(steps, middle, color=color, label=label, linewidth=2)
    axis.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
    axis.set_xlim(0, total / 1000)
    axis.set_xlabel("thousand steps")


def draw(results: dict[str, Any]) -> None:
    """docs/learning_curve.png: the default run with and without the clip; docs/results.png: the README's
    recipes."""
    from matplotlib.figure import Figure  # of the bench extra

    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axis = figure.subplots()
    for name, color in (("continuous", "tab:blue"), ("continuous --no-clip-ratio", "tab:orange")):
        label = f"python {results[name]['command']}, {len(results[name]['runs'])} seeds"
        draw_curves(axis, results[name], label, color)
    axis.set(title="CartPoleContinuous-v0: median and quartiles", ylabel="training return")
    axis.legend(loc="lower right", fontsize="small")
    figure.savefig(DOCS / "learning_curve.png", dpi=150)

    names = [name for name in tables()[MAIN_TABLE] if name in results]
    figure = Figure(figsize=(12, 3 * math.ceil(len(names) / 4)), layout="constrained")
    for position, name in enumerate(names, start=1):
        axis = figure.add_subplot(math.ceil(len(names) / 4), 4, position)
        draw_curves(axis, results[name], name, "tab:blue")
        axis.set_title(f"{name}, {len(results[name]['runs'])} seeds", fontsize="medium")
    figure.supylabel("training return: median and quartiles over seeds", fontsize="medium")
    figure.savefig(DOCS / "results.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    shown = [name for names in tables().values() for name in names]
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run", help="train recipes and store their results")
    runner.add_argument("recipes", nargs="*", metavar="RECIPE", help="; ".join((*shown, "one and a flag")))
    runner.add_argument("--main", action="store_true", help="all recipes of the README's table")
    runner.add_argument("--table", choices=tables(), help="all recipes of one table")
    runner.add_argument("--ablations", action="store_true", help="all recipes with a flag changed")
    runner.add_argument("--seeds", type=int, help="seeds 0 to this - 1; default: as in the tables")
    runner.add_argument("--jobs", type=int, default=2, help="runs side by side")
    commands.add_parser("report", help="write RESULTS.md, the pages' tables and the figures (bench extra)")
    args = parser.parse_args()
    if args.command == "report":
        report()
        return
    if args.jobs < 1 or (args.seeds is not None and args.seeds < 1):
        parser.error("--seeds and --jobs take numbers from 1 on")
    for name in args.recipes:
        if name not in RECIPES:
            known = "\n".join(RECIPES)
            parser.error(f"no recipe {name!r}; there are (a name with spaces needs quotes):\n{known}")
    names = [*args.recipes, *tables()[MAIN_TABLE] * args.main, *tables().get(args.table, [])]
    names += [name for name in RECIPES if args.ablations and name not in shown]
    if not names:
        parser.error("name a recipe, or give --main, --table or --ablations")
    jobs = [(name, seed) for name in names for seed in range(args.seeds or RECIPES[name].seeds)]
    run(list(dict.fromkeys(jobs)), args.jobs)


if __name__ == "__main__":
    main()
