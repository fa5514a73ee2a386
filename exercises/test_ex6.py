"""Checks of exercise 6: the merge in numbers, then a policy that is evaluated, saved and restored."""

import io

import pytest
import torch

from exercises.checks import Wrong, check, check_number, check_tensor, load

merge = pytest.mark.about("merge")
evaluation = pytest.mark.about("evaluation_action")
saving = pytest.mark.about("checkpoint")


def column(*numbers):
    return torch.tensor(numbers, dtype=torch.float64).reshape(-1, 1)


def merged(ex, *batches):
    """The mean, variance and count after merging batches one after the other into nothing."""
    mean, var, count = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64), 0
    for batch in batches:
        result = ex.merge(mean, var, count, batch)
        check(isinstance(result, tuple) and len(result) == 3, "merge should return (mean, var, count).")
        check_tensor("The mean that merge returns", result[0], like=mean)
        check_tensor("The variance that merge returns", result[1], like=var)
        mean, var, count = result
    return mean.item(), var.item(), int(count)


@merge
def test_the_first_batch(ex):
    mean, var, count = merged(ex, column(1, 3))
    what = "After the first batch, [1, 3],"
    check_number(f"{what} the count", count, 2, {})
    check_number(f"{what} the mean", mean, 2, {"The mean of the past still counts: its count was 0.": 1})
    mistakes = {
        "That is the unbiased variance; here it is the mean of the squared distances.": 2,
        "That is the sum of the squared distances, not yet divided by the count.": 2,
    }
    check_number(f"{what} the variance", var, 1, mistakes)


@merge
def test_batches_of_unequal_size(ex):
    mean, var, count = merged(ex, column(0, 0, 0, 0, 0, 0), column(4, 8))
    what = "After the batches [0, 0, 0, 0, 0, 0] and [4, 8]"
    check_number(f"{what} the count", count, 8, {})
    halfway = "That is halfway between the two batches' means: six rows weigh more than two."
    check_number(f"{what} the mean", mean, 1.5, {halfway: 3}, "It is the mean of the eight rows, 12 / 8.")
    apart = "The distance between the two batches is missing: they spread wide though each is narrow."
    mistakes = {apart: 1, "That is the variance of the last batch alone.": 4}
    check_number(f"{what} the variance", var, 7.75, mistakes, "It is that of the eight rows.")


@merge
def test_many_batches(ex):
    """Whatever the cuts, the statistics are those of all rows; far from zero too, where sums of squares lose
    their digits."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(200, 3, generator=generator, dtype=torch.float64) * torch.tensor([1.0, 5.0, 0.1]) + 1e4
    mean, var, count = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64), 0
    for batch in rows.split([1, 50, 9, 100, 40]):
        mean, var, count = ex.merge(mean, var, count, batch)
    right_mean, right_var = rows.mean(0), rows.var(0, unbiased=False)
    what = "After five batches of three features the"
    exact = torch.allclose(mean, right_mean, rtol=1e-9)
    check(exact, f"{what} mean is {mean.tolist()}, and should be {right_mean.tolist()}.")
    exact = torch.allclose(var, right_var, rtol=1e-5)
    check(exact, f"{what} variance is {var.tolist()}, and should be {right_var.tolist()}.")


def reference_policy():
    """A policy and its statistics, whatever the learner's merge does."""
    return load(6).trained()


def own(ex, statistics):
    """The same statistics, in the learner's class."""
    return ex.Statistics(statistics.mean.clone(), statistics.var.clone(), statistics.count)


@evaluation
def test_evaluation_leaves_the_statistics_alone(ex):
    policy, right = reference_policy()
    statistics = own(ex, right)
    obs = torch.tensor([0.5, -0.2, 0.05, 0.3])
    with torch.no_grad():
        first = ex.evaluation_action(policy, statistics, obs)
        expected = policy(right.normalise(obs))
        check_tensor("The action", first, like=expected)
        if not torch.allclose(first, expected):
            raw = torch.allclose(first, policy(obs))
            moved = statistics.count != right.count
            check(
                not raw, "The policy was given the observation as it is. It understands only normalised ones."
            )
            check(not moved, taken_in(right.count, statistics.count))
            wanted = f"{expected.item():.4f}: the policy's own, for the normalised observation"
            raise Wrong(f"The action is {first.item():.4f}, and should be {wanted}.")
        for _ in range(300):
            ex.evaluation_action(policy, statistics, torch.zeros(4))
        again = ex.evaluation_action(policy, statistics, obs)
    check(statistics.count == right.count, taken_in(right.count, statistics.count))
    check(
        torch.equal(again, first),
        f"The same observation got the action {first.item():.4f} before an evaluation and "
        f"{again.item():.4f} after it. Something of the policy or its statistics has changed.",
    )


def taken_in(before, after):
    return (
        f"The statistics held {before} rows before evaluating, and hold {after} now. Evaluation must not "
        "take anything in: it would change the policy that it measures, and the second evaluation would "
        "measure another."
    )


@evaluation
def test_evaluation_scores(ex):
    policy, statistics = reference_policy()
    scores = ex.evaluate(policy, own(ex, statistics))
    check(
        scores == [500.0] * 3, f"A policy that balances the pole scored {scores} in `evaluate`, and not 500."
    )


@saving
def test_saved_and_restored(ex):
    """Through a real file's bytes, as `weights_only` allows them."""
    policy, statistics = reference_policy()
    saved = ex.checkpoint(policy, own(ex, statistics))
    check(isinstance(saved, dict), f"checkpoint returned a {type(saved).__name__}, and should return a dict.")
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    try:
        loaded = torch.load(file, weights_only=True)
    except Exception:
        raise Wrong(
            "What checkpoint returned cannot be loaded with weights_only=True, which takes dicts, "
            "lists, tensors and numbers, but no objects of your own: save the fields of the statistics."
        ) from None
    restored = ex.restore(loaded)
    check(isinstance(restored, tuple) and len(restored) == 2, "restore should return (policy, statistics).")
    new_policy, new_statistics = restored
    same = torch.equal(new_policy.weight, policy.weight) and torch.equal(new_policy.bias, policy.bias)
    check(same, "The restored policy has other weights than the saved one.")
    scores = ex.evaluate(new_policy, new_statistics)
    mean_kept = torch.equal(new_statistics.mean, statistics.mean)
    var_kept = torch.equal(new_statistics.var, statistics.var)
    check(
        mean_kept and var_kept,
        f"The restored policy scores {scores}; it scored 500 before it was saved. Its weights are the "
        f"same to the bit, but its {'variance' if mean_kept else 'mean'} was lost on the way.",
    )
    check(
        new_statistics.count == statistics.count,
        "The count was lost: whoever goes on training would weigh the next batch as if it were all "
        "there ever was.",
    )
    check(scores == [500.0] * 3, f"The restored policy scores {scores}; it scored 500 before it was saved.")


@merge
def test_the_whole_way(ex):
    """Statistics from the learner's own merge; with them 500, and without them next to nothing."""
    policy, statistics = ex.trained()
    scores = ex.evaluate(*ex.restore(ex.checkpoint(policy, statistics)))
    check(scores == [500.0] * 3, f"With statistics from your merge the policy scores {scores}, and not 500.")
    without = ex.evaluate(policy, ex.lost())
    check(max(without) < 250, f"Without its statistics the policy scores {without}: does it use them at all?")
