"""CleanRL's and PureJaxRL's published scripts with our settings, each read from a checkout of theirs.

A script's text is changed in memory where today's Gymnasium or gymnax or the measurement asks for it, put
into a temporary folder and run there in a process of its own. `CHANGES` has all that is changed.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent.parent
MARK = "rollout begins at "
PACKAGES = {
    "cleanrl": ("tensorboard",),
    "purejaxrl": ("jax", "flax", "optax", "distrax", "gymnax"),
}
TITLES = {"cleanrl": "CleanRL", "purejaxrl": "PureJaxRL"}


class Change(NamedTuple):
    """What a script's text has once, what stands there instead, and why."""

    old: str
    new: str
    reason: str


CLEANRL = (
    Change(
        "    for iteration in range(1, args.num_iterations + 1):\n",
        "    torch.set_num_threads(1)\n"
        "    for iteration in range(1, args.num_iterations + 1):\n"
        f'        print("{MARK}", time.process_time(), flush=True)\n',
        "one thread, and the CPU seconds at the start of each rollout",
    ),
    Change(
        "for i in range(args.num_envs)]",
        "for i in range(args.num_envs)], autoreset_mode=gym.vector.AutoresetMode.SAME_STEP",
        "Gymnasium 1.0 resets a step later unless asked",
    ),
    Change(
        'for info in infos["final_info"]:',
        'for info in [{"episode": {key: infos["final_info"]["episode"][key][i] for key in "rl"}} '
        'for i in np.flatnonzero(infos["final_info"]["_episode"])]:',
        "Gymnasium 1.0 gives a dict of arrays, not a list of dicts",
    ),
)
CHANGES = {
    "cleanrl/ppo.py": CLEANRL,
    "cleanrl/ppo_continuous_action.py": (
        *CLEANRL,
        Change(
            "lambda obs: np.clip(obs, -10, 10))",
            "lambda obs: np.clip(obs, -10, 10), env.observation_space)",
            "Gymnasium 1.0 asks for the space of what TransformObservation returns",
        ),
    ),
    "purejaxrl/ppo.py": (
        Change(
            "from wrappers import LogWrapper, FlattenObservationWrapper",
            "from gymnax.wrappers import FlattenObservationWrapper, LegacyStepAPIWrapper, LogWrapper",
            "its wrappers.py imports brax and navix too, and gymnax has the same two wrappers",
        ),
        Change(
            "env = LogWrapper(env)",
            "env = LegacyStepAPIWrapper(LogWrapper(env))",
            "gymnax 1.0 returns terminated and truncated, the script takes one flag",
        ),
    ),
}


class Setting(NamedTuple):
    """One row: our script and its flags, and CleanRL's or PureJaxRL's script beside it. Beside CleanRL the
    time is CPU seconds of one thread, beside PureJaxRL the clock's on all cores."""

    script: str
    what: str
    flags: dict[str, Any]
    path: str
    rollouts: int = 0  # PureJaxRL's; CleanRL makes as many as ours


PENDULUM = {"env_id": "Pendulum-v1", "num_envs": 1, "num_steps": 2048, "update_epochs": 10}
PENDULUM |= {"num_minibatches": 32, "total_timesteps": 20_480}
CARTPOLE = {"num_envs": 4, "total_timesteps": 20_480}
WIDE = {"num_envs": 1024, "num_steps": 32, "total_timesteps": 20 * 32_768}
SETTINGS = (
    Setting("ppo_continuous", "Pendulum-v1, 1 x 2,048", PENDULUM, "cleanrl/ppo_continuous_action.py"),
    Setting("ppo_discrete", "CartPole-v1, 4 x 128", CARTPOLE, "cleanrl/ppo.py"),
    Setting("ppo_discrete", "CartPole-v1, 4 x 128, by the clock", CARTPOLE, "purejaxrl/ppo.py", 400),
    Setting("ppo_gpu_batched", "CartPole-v1, 1,024 x 32, by the clock", WIDE, "purejaxrl/ppo.py", 20),
    Setting(
        "ppo_gpu_batched", "CartPole-v1, 1,024 x 32, `--compile`, by the clock", WIDE | {"compile": True},
        "purejaxrl/ppo.py", 20,
    ),
)  # fmt: skip


def peer_of(path: str) -> str:
    return path.split("/")[0]


def refuse_what_is_missing(folders: dict[str, Path | None]) -> None:
    """End in one sentence where no checkout is given, or a script or a package is not there."""
    if not any(folders.values()):
        sys.exit("--peers needs a checkout to measure: give --cleanrl DIR, --purejaxrl DIR or both")
    for peer, folder in folders.items():
        if folder is None:
            continue
        missing = [name for name in PACKAGES[peer] if importlib.util.find_spec(name) is None]
        if missing:
            sys.exit(f"{TITLES[peer]} needs {' and '.join(missing)}: pip install {' '.join(PACKAGES[peer])}")
        for path in (path for path in CHANGES if peer_of(path) == peer):
            changed_text(folder, path)


def changed_text(folder: Path, path: str) -> str:
    """The text of a script of a checkout, changed; ends in one sentence where it is another version."""
    file = folder / path
    if not file.is_file():
        sys.exit(f"--{peer_of(path)} {folder} has no {path}: give the top folder of a checkout")
    text = file.read_text(encoding="utf-8")
    for change in CHANGES[path]:
        if text.count(change.old) != 1:
            lacks = f"{change.old.strip()!r} does not stand there once"
            sys.exit(f"{file} is not the version that these changes were written for: {lacks}")
        text = text.replace(change.old, change.new)
    return text


def run_apart(text: str, name: str, words: list[str]) -> str:
    """What the words after `python` print in a fresh folder that holds the text under that name."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / name).write_text(text, encoding="utf-8")
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, *words], cwd=folder, env=environ, capture_output=True, text=True
        )
    if done.returncode:
        sys.exit(f"{name} failed: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout


def run_cleanrl(folder: Path, path: str, args: Any, seed: int) -> float:
    """Steps/s, from the start of the second rollout to the start of the last."""
    names = "env_id num_envs num_steps total_timesteps learning_rate gamma gae_lambda num_minibatches "
    names += "update_epochs clip_coef ent_coef vf_coef max_grad_norm"
    words = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in names.split()]
    for name in ("anneal_lr", "norm_adv", "clip_vloss"):
        words.append(f"--{'' if getattr(args, name) else 'no-'}{name.replace('_', '-')}")
    name = Path(path).name
    out = run_apart(changed_text(folder, path), name, [name, *words, f"--seed={seed}", "--no-cuda"])
    starts = [float(line.removeprefix(MARK)) for line in out.splitlines() if line.startswith(MARK)]
    return args.num_envs * args.num_steps * (len(starts) - 2) / (starts[-1] - starts[1])


def run_purejaxrl(folder: Path, path: str, args: Any, rollouts: int, seed: int) -> tuple[float, float]:
    """Steps/s of the compiled program by the clock, and the seconds it took to compile."""
    config = {
        "LR": args.learning_rate, "NUM_ENVS": args.num_envs, "NUM_STEPS": args.num_steps,
        "TOTAL_TIMESTEPS": rollouts * args.num_envs * args.num_steps, "UPDATE_EPOCHS": args.update_epochs,
        "NUM_MINIBATCHES": args.num_minibatches, "GAMMA": args.gamma, "GAE_LAMBDA": args.gae_lambda,
        "CLIP_EPS": args.clip_coef, "ENT_COEF": args.ent_coef, "VF_COEF": args.vf_coef,
        "MAX_GRAD_NORM": args.max_grad_norm, "ACTIVATION": "tanh", "ENV_NAME": args.env_id,
        "ANNEAL_LR": args.anneal_lr, "DEBUG": False,
    }  # fmt: skip
    words = ["-m", "tests.benchmarks.peers", "theirs.py", json.dumps(config), str(seed)]
    run_seconds, compile_seconds = json.loads(
        run_apart(changed_text(folder, path), "theirs.py", words).splitlines()[-1]
    )
    return config["TOTAL_TIMESTEPS"] / run_seconds, compile_seconds


def time_jax(file: str, config: str, seed: str) -> None:
    """In the process of its own: print the seconds of training and of compiling."""
    import jax

    spec = importlib.util.spec_from_file_location("theirs", file)
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    key, start = jax.random.PRNGKey(int(seed)), time.perf_counter()
    program = jax.jit(theirs.make_train(json.loads(config))).lower(key).compile()
    compiled = time.perf_counter()
    jax.block_until_ready(program(key))
    print(json.dumps([time.perf_counter() - compiled, compiled - start]))


def one_round(setting: Setting, folder: Path, seed: int, quick: bool) -> dict[str, float]:
    """Each of a row's implementations once, in turn: their steps/s, and seconds of compiling."""
    from tests.benchmarks import speed

    same = speed.Setting(setting.script, setting.what, setting.flags, False)
    same = speed.shortened(same) if quick else same
    args = importlib.import_module(same.script).Args(**same.flags)
    if peer_of(setting.path) == "cleanrl":
        ours, sb3 = speed.run_script(same, seed), speed.run_sb3(same, seed)
        return {
            "rate": ours.rate,
            "sb3": sb3.rate,
            "cleanrl": run_cleanrl(folder, setting.path, args, seed),
        }
    if setting.script == "ppo_gpu_batched":
        ours = speed.compiled_rate(args.compile, iterations=6 if quick else 20)
        seen = {"rate": ours["rate"]} | ({"compile": ours["first_iteration"]} if args.compile else {})
    else:
        seen = {"rate": speed.run_script(same, seed, time.perf_counter).rate}
    rollouts = 4 if quick else setting.rollouts
    rate, seconds = run_purejaxrl(folder, setting.path, args, rollouts, seed)
    return {**seen, "purejaxrl": rate, "purejaxrl_compile": seconds}


def measure(folders: dict[str, Path | None], repeats: int, quick: bool) -> list[dict[str, Any]]:
    """The rows of the peers' table, of medians; before them what was changed is printed."""
    import torch

    for path, changes in CHANGES.items():
        if folders[peer_of(path)]:
            print(f"{path}, changed in memory:", *(f"  {c.reason}" for c in changes), sep="\n", flush=True)
    rows, threads = [], torch.get_num_threads()
    for setting in SETTINGS:
        folder = folders[peer_of(setting.path)]
        if folder is None:
            continue
        rounds = []
        for seed in range(repeats):
            torch.set_num_threads(1 if peer_of(setting.path) == "cleanrl" else threads)
            rounds.append(one_round(setting, folder, seed, quick))
            seen = {name: round(value, 1) for name, value in rounds[-1].items()}
            print(setting.script, setting.what, seed, seen, flush=True)
        medians = {name: statistics.median(seen[name] for seen in rounds) for name in rounds[0]}
        rows.append({"script": setting.script, "what": setting.what, **medians})
    torch.set_num_threads(threads)
    return rows


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows as Markdown, seconds of compiling in brackets."""
    lines = ["| script and setting | steps/s | SB3 | CleanRL | PureJaxRL |", "|" + " --- |" * 5]
    for row in rows:
        cells = [f"`{row['script']}.py`, {row['what']}"]
        for rate, seconds in (
            ("rate", "compile"), ("sb3", ""), ("cleanrl", ""), ("purejaxrl", "purejaxrl_compile"),
        ):  # fmt: skip
            after = f" ({row[seconds]:.0f} s)" if seconds in row else ""
            cells.append(f"{row[rate]:,.0f}{after}" if rate in row else "-")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    time_jax(*sys.argv[1:])
