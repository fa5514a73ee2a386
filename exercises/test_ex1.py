"""Checks of exercise 1, from the last step of the rollout to the first, as the sum is built."""

import pytest
import torch

from exercises.checks import check, check_number, check_tensor, load

pytestmark = pytest.mark.about("compute_gae")

# The rollout in the exercise's text, one environment.
REWARDS = torch.ones(6, 1)
VALUES = torch.tensor([2.0, 4.0, 2.0, 4.0, 2.0, 6.0]).reshape(6, 1)
NEXT_VALUES = torch.tensor([4.0, 6.0, 4.0, 8.0, 6.0, 4.0]).reshape(6, 1)
TERMINATED = torch.tensor([False, True, False, False, False, False]).reshape(6, 1)
TRUNCATED = torch.tensor([False, False, False, True, False, False]).reshape(6, 1)


def advantages_of(ex):
    result = ex.compute_gae(REWARDS, VALUES, NEXT_VALUES, TERMINATED, TRUNCATED, 0.5, 0.5)
    check(isinstance(result, tuple), "compute_gae should return (advantages, returns), as its last line did.")
    check_tensor("The first thing returned, the advantages,", result[0], like=REWARDS)
    return result[0][:, 0].tolist()


def test_the_last_step_bootstraps(ex):
    check_number(
        "A_5, the last step of the rollout,",
        advantages_of(ex)[5],
        1 + 0.5 * 4 - 6,
        {"V(next_obs) is missing: the rollout stops here, but the episode goes on, and has a future.": 1 - 6},
        "There is nothing to carry over from step 6, so A_5 = delta_5 = 1 + 0.5 * 4 - 6.",
    )


def test_an_ordinary_step_carries_the_next_one(ex):
    check_number(
        "A_4, an ordinary step,",
        advantages_of(ex)[4],
        1.25,
        {
            "A_5 is missing from it.": 2.0,
            "A_5 counts in full here; it is weighted by gamma * gae_lambda = 0.25.": -1.0,
            "A_5 is weighted by 0.5 here: by gamma or gae_lambda alone, and it takes their product.": 0.5,
        },
        "A_4 = delta_4 + 0.25 * A_5, with delta_4 = 1 + 0.5 * 6 - 2 = 2 and A_5 = -3.",
    )


def test_a_time_limit_has_a_future(ex):
    check_number(
        "A_3, the step that met the time limit,",
        advantages_of(ex)[3],
        1.0,
        {
            "The time limit is taken for a fall: nothing is expected after it. Only the clock ran out "
            "there; what "
            "the task still had to give is V(next_obs) = 8.": -3.0,
            "The sum runs on into the next episode: A_4 belongs to another episode, and has no place in "
            "A_3.": 1.3125,
            "The value used is that of the next episode's first state, V(obs_4) = 2. It should be the "
            "value of this "
            "episode's own last state, V(next_obs_3) = 8.": -2.0,
        },
        "The future counts, through V(next_obs) = 8; the next episode's advantages do not. So A_3 = delta_3.",
    )


def test_a_fall_has_none(ex):
    check_number(
        "A_1, the fall,",
        advantages_of(ex)[1],
        -3.0,
        {
            "A future is counted after the fall: V(next_obs) = 6 is only the critic's opinion of a state "
            "from which "
            "nothing follows. The sum is reward - V(obs).": 0.0,
            "The sum runs on into the next episode: A_2 belongs to another episode, and has no place in "
            "A_1.": -2.6875,
            "A future is counted after the fall, and the sum runs on into the next episode.": 0.3125,
        },
        "Nothing follows a fall, so A_1 is its reward minus V(obs): 1 - 4.",
    )


def test_the_steps_before_them(ex):
    advantages = advantages_of(ex)
    check_number("A_2", advantages[2], 1.25, {}, "A_2 = delta_2 + 0.25 * A_3 = 1 + 0.25 * 1.")
    check_number("A_0", advantages[0], 0.25, {}, "A_0 = delta_0 + 0.25 * A_1 = 1 + 0.25 * -3.")


def test_a_step_with_both_flags_is_a_fall(ex):
    both = torch.ones(1, 1, dtype=torch.bool)
    one = torch.ones(1, 1)
    advantages, _ = ex.compute_gae(one, 4 * one, 8 * one, both, both, 0.5, 0.5)
    check_number(
        "A of a step that is terminated and truncated at once, with reward 1, V(obs) 4 and V(next_obs) 8,",
        advantages.item(),
        -3.0,
        {"The time limit has won over the fall. The pole lies on the ground: there is no future.": 1.0},
        "It is a fall like any other: 1 - 4.",
    )


def test_many_environments(ex):
    """Against the reference, in float64, on rollouts where every combination of flags occurs."""
    generator = torch.Generator().manual_seed(0)
    shape = (40, 7)
    rewards, values, next_values = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    terminated, truncated = (torch.rand(shape, generator=generator) < 0.2 for _ in range(2))
    arguments = (rewards, values, next_values, terminated, truncated, 0.9, 0.8)
    advantages, returns = ex.compute_gae(*(x.clone() if torch.is_tensor(x) else x for x in arguments))
    right, right_returns = load(1).compute_gae(*arguments)
    check_tensor("advantages", advantages, like=right)
    wrong = ((advantages - right).abs() > 1e-9).nonzero().tolist()
    if wrong:
        t, i = wrong[-1]
        flags = f"terminated {bool(terminated[t, i])}, truncated {bool(truncated[t, i])}"
        check(False, f"With 7 environments, A[{t}, {i}] is wrong ({flags}). Do the environments stay apart?")
    check(
        torch.equal(returns, right_returns), "returns should be advantages + values, as the last line has it."
    )
