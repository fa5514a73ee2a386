"""Checks of exercise 9: one step, then the rollout, then its chunks again."""

import pytest
import torch

from exercises.checks import check, check_number, check_tensor, load

step = pytest.mark.about("step")
collect = pytest.mark.about("collect")
replay = pytest.mark.about("replay")

# The rollout in the exercise's text, one environment.
OBS = torch.tensor([2.0, 4.0, 6.0, 1.0, 3.0, 5.0]).reshape(6, 1)
STARTS = torch.tensor([False, False, True, False, False, True]).reshape(6, 1)
ENTERS = torch.tensor([8.0])
LEAKS = "What the episode before has left is still in it: an episode's first observation must find 0 there."
LATE = "The memory is emptied after the observation, which is lost with it. Empty it before obs is taken in."


def one_step(ex, state, obs, starts):
    tensors = torch.tensor([state]), torch.tensor([obs]), torch.tensor([starts])
    after = ex.step(*tensors)
    check_tensor("What step returns", after, like=tensors[0])
    return after.item()


@step
def test_an_ordinary_step(ex):
    check_number(
        "The state after step(8, 2, False)",
        one_step(ex, 8.0, 2.0, False),
        6.0,
        {"The memory is emptied where no episode starts: starts is False here.": 2.0},
        "It is remember(8, 2): half of 8, and 2.",
    )


@step
def test_the_first_observation_of_an_episode(ex):
    check_number(
        "The state after step(7, 6, True), where an episode starts,",
        one_step(ex, 7.0, 6.0, True),
        6.0,
        {LEAKS: 9.5, LATE: 0.0},
        "The memory is emptied first: it is remember(0, 6).",
    )


@step
def test_each_environment_by_itself(ex):
    state = ex.step(torch.tensor([8.0, 8.0]), torch.tensor([2.0, 2.0]), torch.tensor([True, False]))
    check(
        state.tolist() == [2.0, 6.0],
        f"With starts [True, False], two states of 8 become {state.tolist()} after observations of 2, and "
        "should become [2.0, 6.0]: each environment has its own flag.",
    )


@step
def test_no_gradient_crosses_a_reset(ex):
    state = torch.tensor([8.0, 8.0], requires_grad=True)
    (0 * state).sum().backward()  # so that there is a gradient, of 0, also where nothing reaches it
    after = ex.step(state, torch.ones(2, requires_grad=True), torch.tensor([True, False]))
    check(after.requires_grad, "The state after a step has lost its gradient: the update learns through it.")
    after.sum().backward()
    check(
        state.grad.tolist() == [0.0, 0.5],
        f"The gradient that reaches the two states is {state.grad.tolist()}, and should be [0.0, 0.5]: none "
        "where an episode starts, half of it where it goes on.",
    )


def collected(ex):
    """What collect makes of the rollout in the text, in chunks of three steps: three lists."""
    result = ex.collect(ENTERS.clone(), OBS.clone(), STARTS.clone(), 3)
    three = isinstance(result, tuple) and len(result) == 3
    check(three, "collect should return three things, as its last line did.")
    for what, value, like in zip(
        ("what the policy acted on", "the states of the chunks", "the state that goes on"),
        result, (OBS, OBS[:2], ENTERS), strict=True,
    ):  # fmt: skip
        check_tensor(f"Of what collect returns, {what}", value, like=like)
    return [value.reshape(-1).tolist() for value in result]


@collect
def test_what_the_policy_acts_on(ex):
    seen, _, _ = collected(ex)
    before = "That is the state before the step: the policy has not seen obs yet."
    early = "The memory is emptied a step early: starts[t] belongs to obs[t]."
    mistakes = [{before: 8.0}, {before: 6.0, early: 4.0}, {before: 7.0, LEAKS: 9.5}, {before: 6.0}]
    mistakes += [{before: 4.0, early: 3.0}, {LEAKS: 7.5}]
    for t, right in enumerate([6.0, 7.0, 6.0, 4.0, 5.0, 5.0]):
        check_number(
            f"What the policy acts on at step {t}", seen[t], right, mistakes[t],
            "Take in obs[t] with step, and give it starts[t].",
        )  # fmt: skip


@collect
def test_what_a_chunk_is_replayed_from(ex):
    _, states, _ = collected(ex)
    check_number(
        "The state kept for the first chunk, which begins at step 0,",
        states[0],
        8.0,
        {
            "That is the state after the chunk's first step: replayed from there, the step is taken in "
            "twice.": 6.0,
            "An empty memory is not what the policy had there: the episode was under way.": 0.0,
        },
        "It is the state before the chunk's first step: what the rollout before has left.",
    )
    check_number(
        "The state kept for the second chunk, which begins at step 3,",
        states[1],
        6.0,
        {
            "That is the state after the chunk's first step: replayed from there, the step is taken in "
            "twice.": 4.0,
            "An empty memory is not what the policy had there: the episode was under way.": 0.0,
            "That is the state with which the rollout began.": 8.0,
        },
        "It is the state before step 3, which is the one after step 2.",
    )


@collect
def test_what_goes_on(ex):
    goes_on = collected(ex)[2][0]
    check_number("The state with which the next rollout goes on", goes_on, 5.0, {}, "It is the last one.")


@replay
def test_a_chunk_from_its_state(ex):
    """The second chunk, with the reference's state."""
    seen = ex.replay(torch.tensor([6.0]), OBS[3:], STARTS[3:])
    check_tensor("What replay returns", seen, like=OBS[3:])
    empty = (
        "The chunk is replayed from an empty memory. The policy had 6 there when it acted, and the ratio "
        "compares what it does now with what it did then."
    )
    before = "That is the state before the step: the policy has not seen obs yet."
    mistakes = [{empty: 1.0, before: 6.0}, {}, {LEAKS: 7.5}]
    for t, right in enumerate([4.0, 5.0, 5.0]):
        check_number(
            f"In the second chunk, what the policy acts on at step {3 + t}",
            seen[t].item(), right, mistakes[t],
            "The chunk begins with the state that was kept for it, 6; then it goes step by step, as collect.",
        )  # fmt: skip


@replay
def test_gradients_flow_within_an_episode_and_no_further(ex):
    obs = OBS.clone().requires_grad_()
    seen = ex.replay(ENTERS, obs, STARTS)
    check(seen.requires_grad, "replay returns something without a gradient: the update cannot learn from it.")
    seen[4].sum().backward()
    reached = obs.grad.reshape(-1).tolist()
    check(
        reached == [0.0, 0.0, 0.25, 0.5, 1.0, 0.0],
        f"The gradient of what the policy acts on at step 4 with respect to each observation is {reached}, "
        "and should be [0.0, 0.0, 0.25, 0.5, 1.0, 0.0]: it reaches back to the start of the episode, step 2.",
    )


@replay
def test_every_chunk_of_a_long_rollout(ex):
    """What the update sees is what the policy acted on, wherever episodes begin; and collect and replay of
    many environments."""
    generator = torch.Generator().manual_seed(0)
    state, obs = torch.randn(5, generator=generator), torch.randn(40, 5, generator=generator)
    starts = torch.rand(40, 5, generator=generator) < 0.2
    seen, states, after = ex.collect(state, obs, starts, 8)
    right = load(9).collect(state, obs, starts, 8)
    names = ("what the policy acted on", "the states of the chunks", "the state that goes on")
    for what, ours, wanted in zip(names, (seen, states, after), right, strict=True):
        check(
            ours.shape == wanted.shape and torch.allclose(ours, wanted, atol=1e-5),
            f"With 5 environments, of what collect returns, {what} is wrong. Do the environments stay apart?",
        )
    for chunk in range(5):
        steps = slice(8 * chunk, 8 * chunk + 8)
        again = ex.replay(right[1][chunk], obs[steps], starts[steps])
        wrong = ((again - right[0][steps]).abs() > 1e-5).nonzero().tolist()
        if wrong:
            t, i = wrong[0]
            begins = ", where an episode starts" if starts[8 * chunk + t, i] else ""
            check(
                False,
                f"Replayed, step {t} of chunk {chunk} of environment {i}{begins}, is not what the policy "
                "acted on: the first ratio would not be 1.",
            )
