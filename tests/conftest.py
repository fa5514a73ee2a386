"""What the tests share: every script under test, and a training run small enough to do many times."""

import importlib
import itertools
import json
import os
import signal
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
SCRIPTS = ["ppo_continuous", "ppo_discrete", "a2c"]
TOP_LEVEL = [*SCRIPTS, "ppo_gpu_batched"]
of_ppo = pytest.mark.parametrize("script", ["ppo_continuous", "ppo_discrete"], indirect=True)
TINY = {"total_timesteps": 6 * 2 * 32, "num_envs": 2, "num_steps": 32, "eval_episodes": 2, "rerun": False}


def all_scripts():
    """The module names of all scripts: the four at the top in their order, then variants/ by name."""
    found = sorted((ROOT / "variants").glob("*.py"))
    return [*TOP_LEVEL, *(f"variants.{path.stem}" for path in found if path.stem != "__init__")]


def path_of(script):
    """A script's file, from the top of the repository: variants.ppo_memory -> variants/ppo_memory.py."""
    return script.replace(".", "/") + ".py"


@pytest.fixture(autouse=True)
def one_thread():
    """As in training: more would only wait for each other on tensors this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=SCRIPTS)
def script(request):
    """Each script's module in turn: what holds for one must hold for all."""
    return importlib.import_module(request.param)


def tiny_args(script, out, **changes):
    """Args of a run of six iterations in the folder `out`, which takes a fraction of a second."""
    return script.Args(**{**TINY, "out": str(out), **changes})


def load(folder):
    return torch.load(Path(folder) / "checkpoint.pt", weights_only=True)


def metrics(folder):
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def interrupt(patch, script, function, at, *numbers):
    """Have signals, or else SIGINT, arrive in the `at`-th call from here on of a script's function."""
    calls, original = itertools.count(1), getattr(script, function)

    def interrupted(*args, **kwargs):
        if next(calls) == at:
            for number in numbers or (signal.SIGINT,):
                os.kill(os.getpid(), number)
        return original(*args, **kwargs)

    patch.setattr(script, function, interrupted)
