"""Exercise 9: when a memory is emptied, and from where it is replayed.

A policy with a memory acts on what it has seen so far. Between two steps it keeps a state, and two moments
decide whether that works. An episode's first observation must find the memory empty, or what is learned of
one episode leaks into the next. And the update, which goes through the rollout again in short chunks, must
begin each chunk with what the policy remembered there when it acted, or the probabilities that it compares
are of two different policies. Both mistakes still train, only worse, and so both have lasted for years.

You will learn: on which side of a step a reset stands, and what a chunk needs to be replayed.
Read first: `NoMemory` and `collect_rollout` in variants/ppo_memory.py: `starts` is what you need of them.
Time: about 20 minutes.

The memory here is one number for each environment, `remember` below. Before you write code, work out on paper
what it is after each step of this rollout, and what it was before step 3, where the second chunk begins. It
enters the rollout as 8.

    t   obs
    0    2
    1    4
    2    6      the first observation of a new episode: starts[2] is true
    3    1      the second chunk begins here, in the middle of the episode
    4    3
    5    5      another episode begins: starts[5] is true
"""

import torch
from torch import Tensor


def remember(state: Tensor, obs: Tensor) -> Tensor:
    """A memory that fades: half of what was there, and the observation. (N,) and (N,) -> (N,); 0 is empty."""
    return 0.5 * state + obs


def step(state: Tensor, obs: Tensor, starts: Tensor) -> Tensor:
    """Take in one observation of each of N environments: the state (N,) after it, on which the policy acts.

    `starts`, bool (N,), is true where `obs` is the first observation of an episode.
    """
    # In place of `raise Blank`: what must happen, in which order? torch.where(flag, a, b) picks a where the
    # flag is true and b where it is not, for each environment by itself.
    state = torch.where(starts, 0.0, state)
    return remember(state, obs)


def collect(state: Tensor, obs: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Go through a rollout as the policy does while it acts: obs and starts are (T, N), and `state` (N,) is
    what the rollout before has left.

    Returns what the policy acted on at each step (T, N); the state with which each chunk of `length` steps is
    to be replayed (T / length, N); and the state with which the next rollout goes on (N,).
    """
    seen, chunk_states = [], []
    for t in range(len(obs)):
        # In place of `raise Blank`: take in obs[t], and append what the policy acts on to `seen`. Where a
        # chunk begins, append to `chunk_states` what is needed to go through the chunk again.
        if t % length == 0:
            chunk_states.append(state)
        state = step(state, obs[t], starts[t])
        seen.append(state)
    return torch.stack(seen), torch.stack(chunk_states), state


def replay(state: Tensor, obs: Tensor, starts: Tensor) -> Tensor:
    """Go through one chunk again, as the update does: obs and starts are (length, N), `state` is the one that
    was kept for it. Returns what the policy acts on at each step (length, N); gradients flow through it."""
    # In place of `raise Blank`: an episode may well begin within the chunk.
    seen = []
    for x, start in zip(obs, starts, strict=True):
        state = step(state, x, start)
        seen.append(state)
    return torch.stack(seen)


# Run:    pytest exercises/test_ex9.py
# Stuck:  python -m exercises.hint 9
