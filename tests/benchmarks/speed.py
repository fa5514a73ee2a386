"""Speed beside Stable-Baselines3 with the same settings: `python -m tests.benchmarks.speed` (bench extra).

Both train on one thread in turn, three times each. A rate is environment steps per second of CPU time in the
steady state, from the start of the second rollout to the start of the last; the medians and their ratio are
printed. The share of environment, policy and update is that of the script's own time.

`ppo_gpu_batched.py` is measured by the clock, on two threads, eager and compiled, with the machine's rate of
matrix products beside it: where that is low, another process had the cores.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# name: (script, its flags, Stable-Baselines3 algorithm, its arguments, environments)
SETTINGS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "Pendulum-v1, 1 env x 2048 steps, 10 epochs x 32 minibatches": (
        "ppo_continuous",
        {"env_id": "Pendulum-v1", "num_envs": 1, "num_steps": 2048, "update_epochs": 10}
        | {"num_minibatches": 32},
        "PPO",
        {"n_steps": 2048, "n_epochs": 10, "batch_size": 64},
    ),
    "CartPole-v1, 4 envs x 128 steps, 4 epochs x 4 minibatches": (
        "ppo_discrete",
        {"env_id": "CartPole-v1", "num_envs": 4, "num_steps": 128, "update_epochs": 4, "num_minibatches": 4},
        "PPO",
        {"n_steps": 128, "n_epochs": 4, "batch_size": 128},
    ),
    "CartPole-v1, A2C, 8 envs x 5 steps": (
        "a2c",
        {"env_id": "CartPole-v1", "num_envs": 8, "num_steps": 5},
        "A2C",
        {"n_steps": 5},
    ),
}


def timed(function: Callable, clock: dict[str, float], name: str) -> Callable:
    """`function`, adding the CPU seconds it takes to clock[name]."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            clock[name] = clock.get(name, 0.0) + time.process_time() - start

    return wrapper


def rate_of_script(name: str, flags: dict[str, Any], steps: int) -> tuple[float, dict[str, float]]:
    """Steps per CPU-second of a script, and the share of its time by part."""
    script = importlib.import_module(name)
    originals = {part: getattr(script, part) for part in ("collect_rollout", "update", "compute_gae")}
    rollout = flags["num_envs"] * flags["num_steps"]
    starts: list[float] = []
    clock: dict[str, float] = {}

    def collect(agent: Any, envs: list, noise: torch.Tensor) -> Any:
        starts.append(time.process_time())
        for env in envs:
            if not hasattr(env, "timed"):
                env.step, env.timed = timed(env.step, clock, "environment"), True
        return timed(originals["collect_rollout"], clock, "rollout")(agent, envs, noise)

    script.collect_rollout = collect
    script.update = timed(originals["update"], clock, "update")
    script.compute_gae = timed(originals["compute_gae"], clock, "gae")
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            total = steps // rollout * rollout
            quiet = {"out": folder, "rerun": False, "eval_episodes": 0}
            script.train(script.Args(**flags, **quiet, total_timesteps=total))
    finally:
        for part, function in originals.items():
            setattr(script, part, function)
    clock["policy"] = clock.pop("rollout") - clock["environment"]
    total_clock = sum(clock.values())
    rate = rollout * (len(starts) - 2) / (starts[-1] - starts[1])
    return rate, {part: seconds / total_clock for part, seconds in clock.items()}


def rate_of_sb3(algorithm: str, arguments: dict[str, Any], flags: dict[str, Any], steps: int) -> float:
    """Steps per CPU-second of Stable-Baselines3."""
    import stable_baselines3
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    starts: list[float] = []

    class Clock(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:
            starts.append(time.process_time())

    envs = make_vec_env(flags["env_id"], n_envs=flags["num_envs"], seed=0)
    model = getattr(stable_baselines3, algorithm)("MlpPolicy", envs, device="cpu", seed=0, **arguments)
    model.learn(steps, callback=Clock())
    return flags["num_envs"] * flags["num_steps"] * (len(starts) - 2) / (starts[-1] - starts[1])


def batched_rate(compiled: bool, iterations: int = 20) -> str:
    """What 1,024 environments x 32 steps of CartPole-v1 reach on two threads, from the fifth iteration on."""
    import ppo_gpu_batched

    torch.set_num_threads(2)
    matrix = torch.randn(1024, 1024)
    start = time.perf_counter()
    for _ in range(20):
        matrix @ matrix
    gigaflops = 20 * 2 * 1024**3 / (time.perf_counter() - start) / 1e9
    flags = {"num_envs": 1024, "num_steps": 32, "total_timesteps": iterations * 32768, "threads": 2}
    flags |= {"device": "cpu", "compile": compiled, "log_every": 1}
    quiet = {"rerun": False, "eval_episodes": 0, "checkpoint_every": 1000}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        ppo_gpu_batched.train(ppo_gpu_batched.Args(**flags, **quiet, out=folder))
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    first, last = lines[4], lines[-1]
    rate = (last["global_step"] - first["global_step"]) / (last["seconds"] - first["seconds"])
    how = f"compiled ({lines[0]['seconds']:.0f} s before)" if compiled else "eager"
    return f"  {how:<26}{rate:>9,.0f} steps/s   matrix products {gigaflops:.0f} GFLOP/s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_480, help="environment steps of each measurement")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{platform.machine()} {platform.processor() or ''} torch {torch.__version__}, one thread")
    for name, (script, flags, algorithm, arguments) in SETTINGS.items():
        ours, theirs = [], []
        for _ in range(args.repeats):
            rate, shares = rate_of_script(script, flags, args.steps)
            ours.append(rate)
            theirs.append(rate_of_sb3(algorithm, arguments, flags, args.steps))
        ratio = statistics.median(ours) / statistics.median(theirs)
        parts = "  ".join(f"{part} {share:.0%}" for part, share in shares.items())
        print(f"\n{name}\n  {script + '.py':<20}{statistics.median(ours):>9,.0f} steps/CPU-s   {parts}")
        print(f"  {'Stable-Baselines3':<20}{statistics.median(theirs):>9,.0f} steps/CPU-s")
        print(f"  ratio {ratio:>23.2f}")
    print("\nppo_gpu_batched.py, CartPole-v1, 1,024 envs x 32 steps, 4 epochs x 4 minibatches, 2 threads")
    for compiled in (False, True):
        print(batched_rate(compiled), flush=True)


if __name__ == "__main__":
    main()
