"""Speed beside Stable-Baselines3 with the same settings: `python -m tests.benchmarks.speed` (bench extra).

Both train in turn, three times, on seeds 0, 1, 2; the table has the medians and their ratio.

- steps/s: environment steps a second, from the start of the second rollout to the start of the last.
- solved: seconds of training until the mean return of the last 100 training episodes reaches the threshold.
- the shares of the script's own time that go into the environment, the policy and the update.
- limit: steps/s of the environment alone, with random actions and nothing learned.

The single-machine scripts and Stable-Baselines3 beside them are timed in CPU seconds on one thread,
`ppo_gpu_batched.py` and Stable-Baselines3 beside it by the clock, on all cores.

`--peers` and `--growth` measure something else instead, `peers.py` and `growth.py` say what. Each part of
speed.json has its own date and commit, and stays as it is while another is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import gymnasium as gym
import torch

from common.envs import make_env
from common.envs.batched import make_batched_env
from tests.benchmarks import growth, peers
from tests.benchmarks.results import commit, machine

SPEED = Path(__file__).parent / "speed.json"
TITLES = {
    "peers": "Steps/s beside other implementations, in brackets the seconds of compiling.",
    "growth": "Steps a CPU second of one thread as one size grows and the others stay, one run each.",
}
SOLVED = 475.0  # CartPole-v1's reward_threshold


class Setting(NamedTuple):
    """A script with its flags off their defaults, and whether its environment has a threshold to reach."""

    script: str
    what: str
    flags: dict[str, Any]
    solves: bool


SETTINGS = (
    Setting("ppo_continuous", "its defaults", {}, True),
    Setting(
        "ppo_continuous",
        "Pendulum-v1, 1 env x 2,048 steps, 10 epochs x 32 minibatches",
        peers.PENDULUM,
        False,
    ),
    Setting("ppo_continuous", "the same, `--compile`", peers.PENDULUM | {"compile": True}, False),
    Setting("ppo_discrete", "its defaults", {}, True),
    Setting(
        "ppo_discrete",
        "CartPole-v1, 4 envs x 128 steps, 4 epochs x 4 minibatches",
        peers.CARTPOLE,
        False,
    ),
    Setting("ppo_discrete", "the same, `--compile`", peers.CARTPOLE | {"compile": True}, False),
    Setting("a2c", "its defaults", {}, True),
    Setting("variants.ppo_pixels", "its defaults", {"total_timesteps": 20_480}, False),
    Setting(
        "ppo_gpu_batched",
        "CartPole-v1, 64 envs x 64 steps, 4 epochs x 4 minibatches",
        {"num_envs": 64, "num_steps": 64, "total_timesteps": 131_072, "learning_rate": 6e-3},
        True,
    ),
)


def shortened(setting: Setting) -> Setting:
    """The setting with four rollouts."""
    args = importlib.import_module(setting.script).Args(**setting.flags)
    return setting._replace(flags={**setting.flags, "total_timesteps": 4 * args.num_envs * args.num_steps})


class Measured(NamedTuple):
    """What one training run came to; `solved` is None where the threshold was not reached."""

    rate: float
    solved: float | None
    shares: dict[str, float]


class Watch:
    """Times a training run: `rollout()` at the start of each rollout, with the returns that came in since."""

    def __init__(self, clock: Callable[[], float], batch_size: int, threshold: float | None) -> None:
        self.clock, self.batch_size, self.threshold = clock, batch_size, threshold
        self.begun, self.starts, self.returns, self.parts = clock(), [], [], {}
        self.solved: float | None = None

    def rollout(self, returns: list[float]) -> bool:
        """Note the time; whether there is nothing more to see."""
        self.returns = [*self.returns, *returns][-100:]
        self.starts.append(self.clock())
        reached = len(self.returns) == 100 and statistics.fmean(self.returns) >= (self.threshold or 1e9)
        if reached and self.solved is None:
            self.solved = self.starts[-1] - self.starts[0]
        return self.solved is not None

    def timed(self, function: Callable, part: str) -> Callable:
        """`function`, with the seconds it takes added to that part."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start = self.clock()
            try:
                return function(*args, **kwargs)
            finally:
                self.parts[part] = self.parts.get(part, 0.0) + self.clock() - start

        return wrapper

    def measured(self) -> Measured:
        whole = self.clock() - self.begun
        rate = self.batch_size * (len(self.starts) - 2) / (self.starts[-1] - self.starts[1])
        parts = dict(self.parts)
        if "rollout" in parts:
            parts["policy"] = parts.pop("rollout") - parts["environment"]
        return Measured(rate, self.solved, {part: seconds / whole for part, seconds in parts.items()})


class Solved(Exception):
    """Ends a training run that has reached its threshold."""


def run_script(setting: Setting, seed: int, clock: Callable[[], float] = time.process_time) -> Measured:
    """Train a single-machine script until it has solved its environment, or to its end."""
    script = importlib.import_module(setting.script)
    args = script.Args(**setting.flags, seed=seed, rerun=False, eval_episodes=0)
    originals = {part: getattr(script, part) for part in ("collect_rollout", "update")}
    watch = Watch(clock, args.num_envs * args.num_steps, SOLVED if setting.solves else None)
    ended: list[tuple[float, int]] = []

    def collect(agent: Any, envs: list, noise: torch.Tensor, *more: Any) -> Any:
        if watch.rollout([score for score, _ in ended]):
            raise Solved
        for env in envs:
            if not hasattr(env, "timed"):
                env.step, env.timed = watch.timed(env.step, "environment"), True
        rollout, ended[:] = watch.timed(originals["collect_rollout"], "rollout")(agent, envs, noise, *more)
        return rollout, ended

    script.collect_rollout, script.update = collect, watch.timed(originals["update"], "update")
    try:
        with tempfile.TemporaryDirectory() as args.out, contextlib.redirect_stdout(io.StringIO()):
            with contextlib.suppress(Solved):
                script.train(args)
            return watch.measured()
    finally:
        for part, function in originals.items():
            setattr(script, part, function)


def run_batched(setting: Setting, seed: int, clock: Callable[[], float] = time.perf_counter) -> Measured:
    """Train the batched script to its end; when it had solved the environment its metrics say."""
    script = importlib.import_module(setting.script)
    args = script.Args(**setting.flags, seed=seed, rerun=False, eval_episodes=0, log_every=1)
    watch = Watch(clock, args.num_envs * args.num_steps, SOLVED)
    named = {"collect_rollout": "rollout", "update_minibatch": "update", "make_batched_env": "", "draw": ""}
    originals = {name: getattr(script, name) for name in named}

    def make(*arguments: Any) -> Any:
        env = originals["make_batched_env"](*arguments)
        for method in ("advance", "reset_lanes", "obs"):
            setattr(env, method, watch.timed(getattr(env, method), "environment"))
        return env

    def draw(*arguments: Any) -> None:
        watch.starts.append(clock())
        originals["draw"](*arguments)

    script.make_batched_env, script.draw = make, draw
    for name, part in named.items():
        if part:
            setattr(script, name, watch.timed(originals[name], part))
    try:
        with tempfile.TemporaryDirectory() as args.out, contextlib.redirect_stdout(io.StringIO()):
            script.train(args)
            measured = watch.measured()
            text = (Path(args.out) / "metrics.jsonl").read_text()
    finally:
        for name, function in originals.items():
            setattr(script, name, function)
    returns: list[float] = []
    for line in map(json.loads, text.splitlines()):
        returns = [*returns, *[line["episodic_return"]] * line["episodes"]][-100:]
        if len(returns) == 100 and statistics.fmean(returns) >= SOLVED:
            return measured._replace(solved=line["seconds"])
    return measured


def run_sb3(setting: Setting, seed: int) -> Measured:
    """Train Stable-Baselines3 with the script's settings, until its environment is solved or to the end."""
    import stable_baselines3
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    script = importlib.import_module(setting.script)
    args, a2c = script.Args(**setting.flags), setting.script == "a2c"
    clock = time.perf_counter if setting.script == "ppo_gpu_batched" else time.process_time
    batch_size = args.num_envs * args.num_steps
    watch = Watch(clock, batch_size, SOLVED if setting.solves else None)

    ended: list[float] = []

    class Callback(BaseCallback):
        def _on_step(self) -> bool:
            ended.extend(info["episode"]["r"] for info in self.locals["infos"] if "episode" in info)
            return watch.solved is None

        def _on_rollout_start(self) -> None:
            watch.rollout(ended)
            ended.clear()

    settings = {
        "learning_rate": (lambda left: args.learning_rate * left) if args.anneal_lr else args.learning_rate,
        "n_steps": args.num_steps,
        "gamma": args.gamma,
        "gae_lambda": args.gae_lambda,
        "ent_coef": args.ent_coef,
        "vf_coef": args.vf_coef,
        "max_grad_norm": args.max_grad_norm,
        "normalize_advantage": args.norm_adv,
    }
    if not a2c:
        settings |= {"n_epochs": args.update_epochs, "clip_range": args.clip_coef}
        settings |= {"batch_size": batch_size // args.num_minibatches}
    policy, env = "MlpPolicy", args.env_id
    if hasattr(args, "net"):
        policy, env, settings["policy_kwargs"] = "CnnPolicy", *same_images(script, args)
    envs = make_vec_env(env, n_envs=args.num_envs, seed=seed)
    algorithm = stable_baselines3.A2C if a2c else stable_baselines3.PPO
    model = algorithm(policy, envs, device="cpu", seed=seed, **settings)
    model.learn(args.total_timesteps // batch_size * batch_size, callback=Callback())
    return watch.measured()


def same_images(script: Any, args: Any) -> tuple[Callable[[], gym.Env], dict[str, Any]]:
    """The script's environment as Stable-Baselines3 takes it, and policy_kwargs with the script's body."""
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

    class Body(BaseFeaturesExtractor):
        def __init__(self, space: gym.Space) -> None:
            with make_env(args.env_id, args.env_kwargs, frame_stack=args.frame_stack) as env:
                body = script.Agent(env, args).bodies[0]
            super().__init__(space, body[-2].out_features)
            self.body = body

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.body(images)

    def make() -> gym.Env:
        env = script.make_env(args.env_id, args.env_kwargs, frame_stack=args.frame_stack)
        space = gym.spaces.Box(0, 255, env.image_shape, "uint8")
        return gym.wrappers.TransformObservation(env, lambda obs: obs, space)

    return make, {"features_extractor_class": Body, "net_arch": []}


def limit(setting: Setting, steps: int = 20_000) -> float:
    """Steps/s of the environment alone."""
    args = importlib.import_module(setting.script).Args(**setting.flags)
    if setting.script == "ppo_gpu_batched":
        env = make_batched_env(args.env_id, args.num_envs, "cpu")
        noise = torch.rand(args.num_envs, env.reset_noise_dim)
        env.reset(noise)
        action, start = torch.zeros(args.num_envs, dtype=torch.int64), time.perf_counter()
        for _ in range(steps // 10):
            _, _, terminated, truncated = env.advance(action)
            env.reset_lanes(terminated | truncated, noise)
            env.obs()
        return steps // 10 * args.num_envs / (time.perf_counter() - start)
    env = gym.make(args.env_id)
    env.reset(seed=0)
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(1000)]
    start = time.process_time()
    for step in range(steps):
        _, _, terminated, truncated, _ = env.step(actions[step % 1000])
        if terminated or truncated:
            env.reset()
    return steps / (time.process_time() - start)


def compiled_rate(compiled: bool, iterations: int = 20) -> dict[str, float]:
    """What 1,024 environments x 32 steps of CartPole-v1 reach on all cores, from the fifth iteration on."""
    import ppo_gpu_batched

    torch.set_num_threads(torch.get_num_threads())
    matrix = torch.randn(1024, 1024)
    start = time.perf_counter()
    for _ in range(20):
        matrix @ matrix
    gigaflops = 20 * 2 * 1024**3 / (time.perf_counter() - start) / 1e9
    flags = {"num_envs": 1024, "num_steps": 32, "total_timesteps": iterations * 32768, "compile": compiled}
    quiet = {"rerun": False, "eval_episodes": 0, "checkpoint_every": 1000, "log_every": 1}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        run, cache = Path(folder) / "run", str(Path(folder) / "compiled")  # a cold cache
        with mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": cache}):
            ppo_gpu_batched.train(ppo_gpu_batched.Args(**flags, **quiet, out=str(run)))
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, last = lines[4], lines[-1]
    rate = (last["global_step"] - first["global_step"]) / (last["seconds"] - first["seconds"])
    return {"rate": rate, "first_iteration": lines[0]["seconds"], "gigaflops": gigaflops}


def median_solved(runs: list[Measured]) -> float | None:
    """The median of the times to solve; None where most did not."""
    times = sorted(float("inf") if run.solved is None else run.solved for run in runs)
    middle = times[len(times) // 2]
    return None if middle == float("inf") else middle


def speed_section(speed: dict[str, Any]) -> list[str]:
    """docs/speed.md's part of speed.json: where and when, a table, and the batched script at its best."""
    lines = [
        f"{speed['machine']}; {speed['date']}, commit {speed['commit']}.",
        "",
        "| script and setting | steps/s | SB3 | faster | solved | SB3 | sooner "
        "| env, policy, update | limit |",
        "|" + " --- |" * 9,
    ]
    for row in speed["rows"]:
        ours, theirs = row["solved"], row["sb3_solved"]
        cells = [
            f"`{row['script'].removeprefix('variants.')}.py`, {row['what']}",
            f"{row['rate']:,.0f}",
            f"{row['sb3_rate']:,.0f}",
            f"{row['rate'] / row['sb3_rate']:.1f}",
            f"{ours:.1f} s" if ours else "-",
            f"{theirs:.1f} s" if theirs else "-",
            f"{theirs / ours:.1f}" if ours and theirs else "-",
            ", ".join(f"{row['shares'][part]:.0%}" for part in ("environment", "policy", "update")),
            f"{row['limit']:,.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    eager, compiled = speed["eager"], speed["compiled"]
    return [
        *lines,
        "",
        f"`ppo_gpu_batched.py --num-envs 1024 --num-steps 32`: {eager['rate']:,.0f} steps/s, and "
        f"{compiled['rate']:,.0f} with `--compile`,",
        f"after {compiled['first_iteration']:.0f} s of compiling; for comparing machines: "
        f"products of 1,024 x 1,024 matrices ran at {eager['gigaflops']:.0f} GFLOP/s.",
        *part_section(speed, "peers"),
        *part_section(speed, "growth"),
    ]


def part_section(speed: dict[str, Any], part: str) -> list[str]:
    """A further table of speed.json, with where and when; nothing where it was not measured."""
    if part not in speed:
        return []
    measured = speed[part]
    where = f"{measured['machine']}; {measured['date']}, commit {measured['commit']}."
    return [
        "",
        TITLES[part],
        where,
        "",
        *{"peers": peers.table, "growth": growth.table}[part](measured["rows"]),
    ]


def stamp() -> dict[str, str]:
    """Where and when."""
    return {"machine": machine(), "commit": commit(), "date": time.strftime("%Y-%m-%d")}


def store(measured: dict[str, Any]) -> None:
    """Into speed.json, which keeps what was not measured this time."""
    SPEED.write_text(json.dumps({**json.loads(SPEED.read_text()), **measured}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="seeds of each measurement")
    parser.add_argument("--quick", action="store_true", help="four rollouts each and nothing stored: a trial")
    parser.add_argument("--peers", action="store_true", help="instead: beside the checkouts given")
    parser.add_argument("--cleanrl", type=Path, metavar="DIR", help="a checkout of CleanRL, for --peers")
    parser.add_argument("--purejaxrl", type=Path, metavar="DIR", help="a checkout of PureJaxRL, for --peers")
    parser.add_argument("--growth", action="store_true", help="instead: steps/s against the sizes")
    options = parser.parse_args()
    repeats, quick = options.repeats, options.quick
    folders = {"cleanrl": options.cleanrl, "purejaxrl": options.purejaxrl}
    if not options.peers and any(folders.values()):
        sys.exit("--cleanrl and --purejaxrl go with --peers: add it")
    if options.peers:
        peers.refuse_what_is_missing(folders)
    if importlib.util.find_spec("stable_baselines3") is None and (options.peers or not options.growth):
        sys.exit('Stable-Baselines3 is not installed: pip install -e ".[bench]"')
    if not (options.peers or options.growth):
        measured = compare(repeats, quick)
        shown = speed_section(measured)
    else:
        measured, shown = {}, []
        if options.peers:
            measured["peers"] = stamp() | {"rows": peers.measure(folders, repeats, quick)}
            if options.purejaxrl:
                measured["peers"]["machine"] += f", jax {importlib.metadata.version('jax')}"
            shown += part_section(measured, "peers")
        if options.growth:
            measured["growth"] = stamp() | {"rows": growth.measure(quick)}
            shown += part_section(measured, "growth")
    if not quick:
        store(measured)
    print("", *shown, sep="\n")


def compare(repeats: int, quick: bool) -> dict[str, Any]:
    """The scripts and Stable-Baselines3 in turn, and the batched script at its best."""
    threads = torch.get_num_threads()
    rows = []
    for setting in map(shortened, SETTINGS) if quick else SETTINGS:
        batched = setting.script == "ppo_gpu_batched"
        ours, theirs = [], []
        for seed in range(repeats):
            ours.append((run_batched if batched else run_script)(setting, seed))
            torch.set_num_threads(threads if batched else 1)
            theirs.append(run_sb3(setting, seed))
            print(setting.script, setting.what, seed, ours[-1][:2], theirs[-1][:2], flush=True)
        middle = sorted(ours, key=lambda run: run.rate)[repeats // 2]
        rows.append({
            "script": setting.script, "what": setting.what,
            "rate": middle.rate, "shares": middle.shares, "solved": median_solved(ours),
            "sb3_rate": statistics.median(run.rate for run in theirs), "sb3_solved": median_solved(theirs),
            "limit": limit(setting),
        })  # fmt: skip
    torch.set_num_threads(threads)
    speed = stamp() | {"rows": rows}
    return speed | {"eager": compiled_rate(False), "compiled": compiled_rate(not quick)}


if __name__ == "__main__":
    main()
