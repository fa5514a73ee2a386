"""One seed, many random streams: what one part of a run draws never moves what another part draws."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

STREAMS = ("init", "action", "minibatch", "env", "eval", "reset", "demo", "discriminator")


def derive_seed(seed: int, stream: str, *index: int) -> int:
    """A seed for `stream` (one of STREAMS) and an index within it, such as the environment's: below 2**31,
    since libraries keep theirs in 32 bits, signed or not.

    NumPy's SeedSequence hashes the whole key, so that neighbouring seeds and indices share nothing.
    """
    key = (STREAMS.index(stream), *index)
    return int(np.random.SeedSequence(seed, spawn_key=key).generate_state(1)[0]) >> 1


def episode_seed(seed: int, stream: str, index: int, episode: int) -> int:
    """The seed of an environment's k-th episode: they count on from the environment's own. With every episode
    hashed, ten runs of ten thousand episodes would meet twice in 31 bits; so, one time in hundreds."""
    return (derive_seed(seed, stream, index) + episode) % 2**31


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
