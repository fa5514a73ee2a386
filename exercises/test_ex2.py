"""Checks of exercise 2: that the prediction came first, and that the conclusion follows from the table."""

import numpy as np
import pytest

from exercises import Blank
from exercises.ablation import (
    ANSWERS,
    ARMS,
    SEEDS,
    answer,
    bootstrap_interval,
    differences,
    missing,
    read,
    table,
)
from exercises.checks import check

COMMAND = "python -m exercises.ex2_predict_ablation"
CHOICES = ", ".join(f'"{choice}"' for choice in ANSWERS)


@pytest.mark.about("PREDICTION")
def test_prediction_is_written(ex):
    if ex.PREDICTION is None:
        raise Blank
    check(ex.PREDICTION in ANSWERS, f"PREDICTION is {ex.PREDICTION!r}, and should be one of {CHOICES}.")


def results_of(ex):
    """The learner's results, complete; waiting where they are not there yet."""
    results = read(ex.RESULTS)
    if ex.PREDICTION is None or not results:
        raise Blank(f"run {COMMAND}")
    if todo := missing(results):
        raise Blank(f"{len(todo)} of {len(SEEDS) * len(ARMS)} runs are missing: run {COMMAND}")
    return results


@pytest.mark.about("PREDICTION")
def test_prediction_came_first(ex):
    results = results_of(ex)
    check(
        ex.PREDICTION == results["prediction"],
        f"PREDICTION is {ex.PREDICTION!r} now, but {results['prediction']!r} was recorded before the "
        "first run. Put it back: a prediction that is changed after the fact predicts nothing. (To "
        f"start again, delete exercises/{ex.RESULTS.name}.)",
    )


@pytest.mark.about("CONCLUSION")
def test_conclusion_follows_from_the_table(ex):
    results = results_of(ex)
    if ex.CONCLUSION is None:
        raise Blank("write CONCLUSION from the table of your runs")
    check(ex.CONCLUSION in ANSWERS, f"CONCLUSION is {ex.CONCLUSION!r}, and should be one of {CHOICES}.")
    right = answer(results)
    check(
        ex.CONCLUSION == right,
        f"CONCLUSION is {ex.CONCLUSION!r}: {ANSWERS[ex.CONCLUSION]}. Your table does not say so:\n"
        + "\n".join(table(results))
        + f"\n{reason(results, ex.CONCLUSION)}",
    )


def reason(results, claim):
    """Why a conclusion does not follow."""
    difference = differences(results)
    low, high = bootstrap_interval(difference)
    lower = [seed for seed, change in zip(SEEDS, difference, strict=True) if change <= 0]
    if claim == "always":
        return f"On seed {lower[0]} the run with it did not score higher."
    if not lower:
        return "On every seed the run with it scored higher, and there is a stronger word for that."
    if low <= 0 <= high:
        return (
            "The interval holds 0: other seeds could as well have had the mean difference on the other side."
        )
    return f"The interval lies {'above' if low > 0 else 'below'} 0."


@pytest.mark.about("UPSETS")
def test_upsets(ex):
    results = results_of(ex)
    if ex.UPSETS is None:
        raise Blank("write UPSETS from the table of your runs")
    difference = differences(results)
    right = int((np.sign(difference) == -np.sign(difference.mean())).sum()) if difference.mean() else 0
    check(
        ex.UPSETS == right,
        f"UPSETS is {ex.UPSETS!r}. The mean difference is {difference.mean():+.1f}; count the seeds whose "
        "difference "
        "has the other sign:\n" + "\n".join(table(results)),
    )
