"""One seed, many random streams: what one part of a run draws never moves what another part draws."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch

STREAMS = ("init", "action", "minibatch", "env", "eval", "reset")
Function = TypeVar("Function", bound=Callable)


def derive_seed(seed: int, stream: str, *index: int) -> int:
    """A 63-bit seed for `stream` (one of STREAMS) and an index within it, such as (environment, episode).

    NumPy's SeedSequence hashes the whole key, so that neighbouring seeds and indices share nothing; with 32
    bits, ten runs of ten thousand episodes would already be likely to meet the same episode twice.
    """
    key = (STREAMS.index(stream), *index)
    high, low = np.random.SeedSequence(seed, spawn_key=key).generate_state(2)
    return (int(high) << 31) ^ int(low)


class RandomStream:
    """A torch generator of its own, with a state that a checkpoint can hold."""

    def __init__(self, seed: int, stream: str, device: str = "cpu") -> None:
        self.generator = torch.Generator(device).manual_seed(derive_seed(seed, stream))

    def normal(self, *shape: int) -> torch.Tensor:
        """Standard normal noise, float32."""
        return torch.randn(shape, generator=self.generator)

    def uniform(self, *shape: int) -> torch.Tensor:
        """Uniform noise on [0, 1), float32."""
        return torch.rand(shape, generator=self.generator)

    def permutation(self, n: int) -> torch.Tensor:
        """0 .. n-1 in random order, int64[n]."""
        return torch.randperm(n, generator=self.generator)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.generator.set_state(state["state"])


@contextmanager
def initial_weights(seed: int) -> Iterator[None]:
    """Inside, torch's global generator, from which layers draw their weights, is the stream "init" of `seed`;
    afterwards it is as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(seed, "init"))
        yield


def restores_process(function: Function) -> Function:
    """A decorator: when `function` returns or raises, torch's thread count and the handlers of SIGINT and
    SIGTERM are what they were before the call."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        threads = torch.get_num_threads()
        in_main_thread = threading.current_thread() is threading.main_thread()
        handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)} if in_main_thread else {}
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_num_threads(threads)
            for number, handler in handlers.items():
                if handler is not None:  # None: set by another language, and not Python's to put back
                    signal.signal(number, handler)

    return wrapper
