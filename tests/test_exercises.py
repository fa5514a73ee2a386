"""The exercises, as a learner meets them: blanks wait, the references pass, and wrong attempts fail with a
message that helps.

All of it runs on a copy, in one process, with the learner's files (exercises/ex*.py) as they were committed:
an exercise that somebody is in the middle of never turns this red. An attempt is the reference with one
change, so each check is seen to fail for the mistake it is there for.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest

from exercises import ablation, hint
from exercises.checks import exercises

ROOT = Path(__file__).parent.parent
NUMBERS = sorted(exercises())
FILES = {number: exercise.path.name for number, exercise in exercises().items()}


def solution(number):
    return (ROOT / "exercises" / "solutions" / FILES[number]).read_text(encoding="utf-8")


def committed(path, root=ROOT):
    """A file's text as of the last commit, or before it was ever committed as it is; None without a commit to
    look at, where what the learner has changed cannot be told."""

    def git(*words):
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, encoding="utf-8")

    try:
        found = git("show", f"HEAD:./{path}")
        if found.returncode == 0:
            return found.stdout
        ours = git("cat-file", "-e", "HEAD:./ppo_continuous.py").returncode == 0
    except OSError:  # there is no git
        return None
    return (root / path).read_text(encoding="utf-8") if ours else None


def blank(number):
    text = committed(f"exercises/{FILES[number]}")
    if text is None:
        pytest.skip("not in a git checkout: whether these files are as they came cannot be told")
    return text


# ---- Running pytest over jobs: files to put into exercises/, and its arguments

RUNNER = """
import contextlib, io, json, sys
from pathlib import Path
import pytest

sys.dont_write_bytecode = True  # two attempts written within a second would share it
# Looking for unraisable exceptions, pytest collects garbage ten times a run: more than half of a run's time.
OPTIONS = ["-p", "no:cacheprovider", "-p", "no:unraisableexception", "--color=no", "--assert=plain"]
results = []
for files, arguments in json.load(sys.stdin):
    for file, text in files.items():
        (Path("exercises") / file).write_text(text, encoding="utf-8")
    for module in [m for m in sys.modules if m.startswith("exercises.ex")]:
        del sys.modules[module]
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        status = pytest.main([*arguments, *OPTIONS])
    results.append((int(status), output.getvalue()))
print(json.dumps(results))
"""


def run(folder, jobs):
    """[(exit status, output)] of jobs [(files, arguments)], each on what the one before left."""
    shutil.copytree(ROOT / "exercises", folder / "exercises", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "exercises" / "ex2_results.json").unlink(missing_ok=True)  # a learner's own
    (folder / "tests").mkdir()
    for file in ("pyproject.toml", "tests/__init__.py", "tests/capture_emulator.py"):
        shutil.copy(ROOT / file, folder / file)
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        input=json.dumps(jobs), capture_output=True, text=True, encoding="utf-8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def summary(output):
    """{number: the rest of its line} of the summary that ends a run."""
    lines = output[output.index(" exercises =") :].splitlines()
    found = (re.match(r"  (\d)  (\w+) +(.*)", line) for line in lines)
    return {int(m.group(1)): m.group(3) for m in found if m}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{name: (exit status, output)}: a fresh clone, then with exercise 1 filled in, the references, and
    rounds of wrong attempts. A run of pytest costs more than what it runs, so a round has an attempt at each
    exercise; an exercise that has none left holds its reference and is not run."""
    clone = {FILES[number]: committed(f"exercises/{FILES[number]}") for number in NUMBERS}
    jobs = {}
    if None not in clone.values():
        jobs["fresh"] = clone, ["exercises"]
        jobs["one done"] = clone | {FILES[1]: solution(1)}, ["exercises"]
        jobs["only the first"] = {}, ["exercises/test_ex1.py"]
        jobs["five before three"] = (
            clone | {FILES[n]: solution(n) for n in (1, 4, 5)},
            ["exercises/test_ex5.py"],
        )
        broken = solution(3).replace("return -surrogate", "return surrogate")
        jobs["five with a wrong three"] = {FILES[3]: broken}, ["exercises/test_ex5.py"]
        odd = solution(6).replace("return policy, Statistics", "return policy.weight, Statistics")
        jobs["an odd type"] = {FILES[6]: odd}, ["exercises/test_ex6.py"]
    jobs["solutions"] = {}, ["exercises", "--solutions"]
    results = (ROOT / "exercises" / "solutions" / "ex2_results.json").read_text(encoding="utf-8")
    rounds = zip_longest(*([name for name in WRONG if WRONG[name][0] == number] for number in NUMBERS))
    for names in rounds:
        files = {FILES[number]: solution(number) for number in NUMBERS} | {"ex2_results.json": results}
        files |= {FILES[WRONG[name][0]]: attempt(name) for name in names if name}
        jobs[names] = files, [f"exercises/test_ex{WRONG[name][0]}.py" for name in names if name]
    done = run(tmp_path_factory.mktemp("exercises"), list(jobs.values()))
    outputs = dict(zip(jobs, done, strict=True))
    for names in [names for names in jobs if isinstance(names, tuple)]:
        outputs |= dict.fromkeys(filter(None, names), outputs.pop(names))
    return outputs


# ---- Blanks and solutions


@pytest.fixture
def fresh(runs):
    blank(1)
    return runs


def test_a_fresh_clone_waits(fresh):
    """Seen to fail with an exercise whose blank raised NotImplementedError."""
    status, output = fresh["fresh"]
    assert status == 0, output
    lines = summary(output)
    assert sorted(lines) == NUMBERS, output
    for number, line in lines.items():
        assert re.fullmatch(rf"waiting +exercises/{FILES[number]}  \d+ min", line), line
    passed = re.search(r"\d+ (passed|failed|skipped)", output)
    assert not passed, f"a blank should wait, not have {passed.group()}"
    assert "next: exercise 1. Open exercises/ex1_completion_gae.py" in output
    assert "pytest exercises/test_ex1.py" in output


def test_after_the_first_comes_the_second(fresh):
    status, output = fresh["one done"]
    assert status == 0 and summary(output)[1] == "passed"
    assert "next: exercise 2. Open exercises/ex2_predict_ablation.py" in output
    status, output = fresh["only the first"]
    assert status == 0 and list(summary(output)) == [1]
    assert "next: exercise 2. Open exercises/ex2_predict_ablation.py" in output


def test_exercise_5_names_the_exercise_that_it_waits_for(fresh):
    status, output = fresh["five before three"]
    assert status == 0 and summary(output)[5].endswith(
        "9 of 11 checks pass; do exercise 3 first: it is still blank"
    )
    assert "next: exercise 5. Do exercise 3 first: it is still blank, then" in output
    status, output = fresh["five with a wrong three"]
    assert status == 1 and "with your exercise 3, which is not right yet. Run" in output


def test_what_no_check_foresaw_is_still_short(fresh):
    """An error in the checks' own code, over something that the learner's function returned."""
    status, output = fresh["an odd type"]
    (message,) = message_for(6, output)
    assert status == 1 and "could not go on with what this gave it. AttributeError" in " ".join(message)
    assert len(message) <= 4, output


def test_the_solutions_pass(runs):
    status, output = runs["solutions"]
    assert status == 0, output
    assert summary(output) == {number: "passed" for number in NUMBERS}, output


@pytest.mark.parametrize("number", NUMBERS)
def test_a_solution_is_the_exercise_with_its_blanks_filled(number):
    """So that a diff of the two shows the answer and nothing else. What the references need not import is
    gone."""
    lines = [line for line in blank(number).splitlines() if line != "from exercises import Blank"]
    parts = re.split(r"\n *raise Blank\n", "\n".join(lines) + "\n")
    if number == 2:  # its blanks are three constants
        parts = re.split(r"= None", "\n".join(lines) + "\n")
    assert len(parts) > 1
    rest = re.sub(r"\n{3,}", "\n\n", solution(number))
    for part in parts:
        part = re.sub(r"\n{3,}", "\n\n", part).strip()
        assert part in rest, f"exercises/solutions/{FILES[number]} lacks:\n{part}"
        rest = rest[rest.index(part) + len(part) :]


@pytest.mark.parametrize("number", NUMBERS)
def test_an_exercise_says_what_a_learner_needs(number):
    text = blank(number)
    assert text.startswith(f'"""Exercise {number}: ')
    for start in (
        "You will learn: ",
        "Read first: ",
        "Time: about ",
        "# Run:    pytest",
        "# Stuck:  python -m",
    ):
        assert f"\n{start}" in text, start
    assert f"pytest exercises/test_ex{number}.py" in text and f"python -m exercises.hint {number}\n" in text


def test_hints(capsys):
    for number in NUMBERS:
        for step in ("1", "2", "3"):
            assert hint.main([str(number), step]) == 0
            shown = capsys.readouterr().out
            following = (
                f"exercises.hint {number} {int(step) + 1}" if step != "3" else f"solutions/{FILES[number]}"
            )
            assert f"hint {step} of 3" in shown and following in shown
    assert hint.main(["3"]) == 0 and "hint 1 of 3" in capsys.readouterr().out
    for words in ([], ["10"], ["3", "4"], ["three"]):
        assert hint.main(words) == 2 and "N: 1 to 9, STEP: 1 to 3" in capsys.readouterr().err


def test_what_counts_is_what_was_committed(tmp_path):
    """A learner's half-done file is not looked at; one that was never committed is; a folder that is no
    checkout of ours cannot tell."""

    def git(*words):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "ex1.py").write_text("blank")
    git("init")
    assert committed("ex1.py", tmp_path) is None
    (tmp_path / "ppo_continuous.py").write_text("")
    git("add", ".")
    git("commit", "-m", "all")
    (tmp_path / "ex1.py").write_text("half done")
    (tmp_path / "ex9.py").write_text("new")
    assert committed("ex1.py", tmp_path) == "blank" and committed("ex9.py", tmp_path) == "new"


# ---- Exercise 2, which trains


def scores(*differences):
    """Results in which the run with the trick scores 100, and that without so much less."""
    pairs = [*differences, *[0.0] * (len(ablation.SEEDS) - len(differences))]
    with_it = {str(seed): 100.0 for seed in ablation.SEEDS}
    without = {str(seed): 100.0 - d for seed, d in zip(ablation.SEEDS, pairs, strict=True)}
    return {"scores": {"with": with_it, "without": without}}


@pytest.mark.parametrize(
    "differences, right",
    [
        ([5, 9, 1, 4, 3, 7, 2, 6], "always"),
        ([50, 90, -1, 40, 30, 70, 20, 60], "on average"),
        ([-5, -9, -1, -4, -3, -7, -2, -6], "hurts"),
        ([50, -90, 10, -40, 30, -7, 20, 60], "cannot tell"),
        ([], "cannot tell"),
    ],
)
def test_the_answer_follows_from_the_differences(differences, right):
    assert ablation.answer(scores(*differences)) == right


def test_bootstrap_interval_is_that_of_the_mean():
    """For many values it comes to the textbook's mean +- 1.96 standard errors."""
    values = np.random.default_rng(1).normal(3.0, 2.0, 400)
    error = values.std() / 20
    expected = values.mean() - 1.96 * error, values.mean() + 1.96 * error
    assert ablation.bootstrap_interval(values) == pytest.approx(expected, abs=0.2 * error)


@pytest.mark.parametrize("prediction", [None, "yes"])
def test_nothing_runs_before_a_prediction(tmp_path, capsys, monkeypatch, prediction):
    monkeypatch.setattr(ablation, "train", lambda *_: pytest.fail("it trained"))
    assert ablation.run(prediction, tmp_path / "results.json") == 2
    assert 'choose one of "always", "on average"' in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_prediction_is_recorded_first_and_a_stopped_run_goes_on(tmp_path, capsys, monkeypatch):
    path, trained = tmp_path / "results.json", []

    def train(arm, seed):
        assert ablation.read(path)["prediction"] == "always"
        if len(trained) == 5:
            raise RuntimeError("the sixth run failed")
        trained.append((arm, seed))
        return 10.0 * seed + (arm == "with")

    monkeypatch.setattr(ablation, "train", train)
    monkeypatch.setattr(ablation.os, "cpu_count", lambda: 1)
    assert ablation.run("always", path) == 1
    assert "the sixth run failed: what is done is kept" in capsys.readouterr().out
    first, total = len(ablation.missing(ablation.read(path))), len(ablation.SEEDS) * 2
    assert first == total - 5
    trained += [None] * 100  # the sixth works now
    assert ablation.run("hurts", path) == 0
    shown = capsys.readouterr().out
    assert ablation.read(path)["prediction"] == "always" and "prediction   'always', recorded" in shown
    assert f"{first} runs, 1 at a time" in shown and f"{total} of {total}   seed" in shown
    assert "95% bootstrap interval of the mean difference: +1.0 to +1.0" in shown
    assert len(trained) == 100 + total, "a finished run was done again"


@pytest.mark.slow
def test_a_run_of_exercise_2_trains(monkeypatch):
    """The real command, cut to one rollout."""
    monkeypatch.setattr(
        ablation, "SETTINGS", ["--total-timesteps", "1024", "--eval-episodes", "1", "--no-rerun"]
    )
    assert ablation.train("without", 0) > 0


# ---- Wrong attempts: (exercise, what is replaced in its reference, by what, what the message has to say)

FROZEN = "    return policy(statistics.normalise(obs))  # no"

WRONG = {
    "1 masked on done": (1, "~terminated[t] - ", "~(terminated[t] | truncated[t]) - ",
        "time limit is taken for a fall"),
    "1 bootstrapped from a fall": (1, " * ~terminated[t] - ", " - ", "A future is counted after the fall"),
    "1 runs over the time limit": (1, "e * ~(terminated[t] | truncated[t])", "e * ~terminated[t]",
        "A_3, the step that met the time limit, is 1.3125, and should be 1.\nThe sum runs on into the next"),
    "1 runs over the fall": (1, "advantage * ~(terminated[t] | truncated[t])", "advantage * ~truncated[t]",
        "A_1, the fall, is -2.6875, and should be -3.\nThe sum runs on into the next episode"),
    "1 the reset observation": (1, "next_values[t]", "(values[t + 1] if t < 5 else next_values[t])",
        "The value used is that of the next episode's first state"),
    "1 no lambda": (1, "gamma * gae_lambda * adv", "gamma * adv", "A_5 is weighted by 0.5 here"),
    "1 time limit wins": (1, "~terminated[t] - ", "~(terminated[t] & ~truncated[t]) - ",
        "The time limit has won over the fall"),
    "1 returns": (1, "advantages, advantages + values", "advantages, advantages", "returns should be"),
    "1 a typo": (1, "delta + gamma", "dela + gamma", "NameError: name 'dela' is not defined"),
    "2 another prediction": (2, 'PREDICTION = "on average"', 'PREDICTION = "cannot tell"',
        "'on average' was recorded before the first run. Put\nit back"),
    "2 no such answer": (2, 'PREDICTION = "on average"', 'PREDICTION = "yes"', 'should be one of "always"'),
    "2 claims too much": (2, 'CONCLUSION = "cannot tell"', 'CONCLUSION = "on average"',
        "The interval holds 0"),
    "2 claims even more": (2, 'CONCLUSION = "cannot tell"', 'CONCLUSION = "always"',
        "On seed 2 the run with it did not score higher."),
    "2 upsets": (2, "UPSETS = 4", "UPSETS = 6", "count the seeds whose difference has the"),
    "3 clipped on both sides": (3, "(ratio * advantages).minimum(clipped_ratio * advantages)",
        "clipped_ratio * advantages", "The clip binds here, and must not."),
    "3 the smaller ratio": (3, "(ratio * advantages).minimum(clipped_ratio * advantages)",
        "ratio.minimum(clipped_ratio) * advantages",
        "with ratio 0.5 and advantage -1 is 0.5, and should be 0.8"),
    "3 no clip": (3, "(ratio * advantages).minimum(clipped_ratio * advantages)", "ratio * advantages",
        "Nothing is clipped here, and should be."),
    "3 the larger": (3, "advantages).minimum(", "advantages).maximum(",
        "Nothing is clipped here, and should be."),
    "3 sign": (3, "return -surrogate", "return surrogate", "an optimizer makes the loss smaller"),
    "3 upside down": (3, "(log_prob - old_log_prob)", "(old_log_prob - log_prob)", "it is new over old"),
    "3 no exp": (3, "(log_prob - old_log_prob).exp()", "(log_prob - old_log_prob)",
        "the ratio is exp of the"),
    "3 sum": (3, ".mean()", ".sum()", "That is the sum over the rows"),
    "3 0.2 written in": (3, "ratio.clamp(1 - clip_coef, 1 + clip_coef)", "ratio.clamp(0.8, 1.2)",
        "is 0.2 written into the function"),
    "3 no return": (3, "return -surrogate.mean()", "loss = -surrogate.mean()",
        "The loss is None: is there a `return`"),
    "4 not summed": (4, "- 0.5 * LOG_2PI).sum(-1)", "- 0.5 * LOG_2PI)",
        "and should have shape (). Add up the components"),
    "4 mean": (4, "- 0.5 * LOG_2PI).sum(-1)", "- 0.5 * LOG_2PI).mean(-1)",
        "logarithms of densities add up"),
    "4 no log_std": (4, "-0.5 * z**2 - log_std -", "-0.5 * z**2 -", "log_std is missing"),
    "4 log_std for std": (4, "torch.exp(-log_std)", "(1 / log_std)", "is log_std used as if it were std?"),
    "4 naive tanh": (4, "2 * (math.log(2) - pre_tanh - softplus(-2 * pre_tanh))",
        "(1 - torch.tanh(pre_tanh) ** 2).log()", "1 - tanh(u)^2 has become 0 there"),
    "4 no half range": (4, "(log_slope + half_range.log())", "log_slope", "half_range is missing"),
    "4 raw logits": (4, "logits.log_softmax(-1)", "logits", "it is not normalised"),
    "4 softmax": (4, "logits.log_softmax(-1)", "logits.softmax(-1)",
        "That is the probability, not its logarithm"),
    "4 exp overflows": (4, "logits.log_softmax(-1)",
        "(logits.exp() / logits.exp().sum(-1, keepdim=True)).log()",
        "exp overflows"),
    "5 next_obs of the reset": (5, "rollout.obs[t + 1, i] = next_obs",
        "rollout.obs[t + 1, i] = rollout.next_obs[t, i] = next_obs",
        "what you recorded is the first state of the next one"),
    "5 no reset noted": (5, "                next_obs, _ = env.reset()", "                env.reset()",
        "here it is the first state after the reset"),
    "5 no reset": (5, "if terminated or truncated:", "if False:", "an environment whose episode 0 had ended"),
    "5 no reset at the limit": (5, "if terminated or truncated:", "if terminated:",
        "after a fall, and after a time-out as well"),
    "5 flags swapped": (5, "] = terminated, truncated", "] = truncated, terminated",
        "The two flags are swapped"),
    "5 rows left out": (5, "order.chunk(num_minibatches)", "list(order.chunk(num_minibatches))[:-1]",
        "policy_loss was called 8 times"),
    "5 rows drawn": (5, "for piece in order.chunk(num_minibatches):",
        "for piece in order[torch.randint(6, (12,))].chunk(num_minibatches):", "are missing."),
    "5 no shuffle": (5, "permutation(len(batch.returns))", "torch.arange(len(batch.returns))",
        "The rows come in the order of the rollout"),
    "5 old recomputed": (5, "policy_loss(log_prob, minibatch.log_prob,",
        "policy_loss(log_prob, log_prob.detach(),",
        "they make every ratio 1"),
    "5 rows misaligned": (5, "policy_loss(log_prob, minibatch.log_prob,",
        "policy_loss(log_prob, batch.log_prob[: len(piece)],", "Are they of the same rows?"),
    "5 gradients pile up": (5, "            optimizer.zero_grad()\n", "",
        "optimizer.zero_grad() comes before"),
    "5 no value loss": (5, "0.5 * ((value", "0.0 * ((value", "The value loss is missing"),
    "6 mean of means": (6, "(count * mean + n * batch_mean) / total", "(mean + batch_mean) / 2",
        "The mean of the past still counts"),
    "6 halves": (6, "(count * mean + n * batch_mean) / total",
        "((mean + batch_mean) / 2 if count else batch_mean)",
        "six rows weigh more than two"),
    "6 a missing bracket": (6, "    total = count + n\n", "    total = (count + n\n",
        "Python cannot read this"),
    "6 no distance": (6, " + (batch_mean - mean) ** 2 * count * n / total", "",
        "The distance between the two"),
    "6 evaluation takes in": (6, FROZEN, "    statistics.take_in(obs)\n" + FROZEN,
        "Evaluation must not take"),
    "6 raw observation": (6, FROZEN, "    return policy(obs)  # no", "given the observation as it is"),
    "6 weights only": (6, "Statistics(**saved[\"statistics\"])", "lost()", "was lost on the way"),
    "6 object in the file": (6, "\"statistics\": kept}", "\"statistics\": statistics}",
        "weights_only=True, which"),
    "7 sees nothing": (7, "assert abs(timed_out - 1) < 1e-5", "assert timed_out == timed_out",
        "passes on the buggy `advantages`, too"),
    "7 wrong demand": (7, "assert good < 0 < bad", "assert good > 0 > bad",
        "fails on a correct `surrogate_loss`, too"),
    "7 crashes": (7, "targets[0].item() - 4", "targets[0].itm() - 4", "no attribute 'itm'"),
    "7 another bug": (7, "rollout.truncated[0] = True", "rollout.terminated[0] = True",
        "fails on a correct `value_targets`, too"),
    "8 mask": (8, "error, count = torch.where(near, error, 0.0), near.sum()",
        "x, error, count = x[near], error[near], near.sum()", "indexing with a mask"),
    "8 item": (8, "near.sum()  #", "near.sum().item()  #", "a tensor's number is asked for"),
    "8 if": (8, "gradient = gradient * (0.5 / gradient.norm()).clamp(max=1.0)",
        "gradient = gradient * 0.5 / gradient.norm() if gradient.norm() > 0.5 else gradient",
        "an `if`, `while`"),
    "8 rebound": (8, "state.weight.sub_(state.learning_rate * state.momentum)",
        "state.weight = state.weight - state.learning_rate * state.momentum", "in the place of state.weight"),
    "8 baked-in": (8, "state.weight.sub_(state.learning_rate * state.momentum)",
        "global calls\n    rate, calls = 0.5 * (1 - calls % 20 / 20), calls + 1\n"
        "    state.weight.sub_(rate * state.momentum)\n\n\ncalls = 0",
        "state.weight is not what update(state) itself leaves"),
    "8 constant": (8, "(0.5 / gradient.norm())", "(torch.tensor(0.5) / gradient.norm())",
        "torch.tensor(...) copies"),
    "8 no clip": (8, "norm()).clamp(max=1.0)", "norm())", "should be"),
    "9 no reset": (9, "    state = torch.where(starts, 0.0, state)\n", "",
        "What the episode before has left"),
    "9 reset after": (9, "    state = torch.where(starts, 0.0, state)\n    return remember(state, obs)",
        "    return torch.where(starts, 0.0, remember(state, obs))", "Empty it before obs is taken in"),
    "9 all environments": (9, "torch.where(starts, 0.0, state)", "state * (not starts.any())",
        "each environment has its own flag"),
    "9 detached": (9, "0.0, state)\n", "0.0, state).detach()\n", "and should be [0.0, 0.5]"),
    "9 a step late": (9, "obs[t], starts[t]", "obs[t], starts[max(t - 1, 0)]",
        "at step 2 is 9.5, and should be 6. What the episode before has left"),
    "9 a step early": (9, "obs[t], starts[t]", "obs[t], starts[(t + 1) % len(obs)]",
        "The memory is emptied a step early"),
    "9 acts on the state before": (9, "seen.append(state)\n    return torch.stack(seen), ",
        "seen.append(state)\n    seen = [torch.tensor([8.0]), *seen][:-1]\n    return torch.stack(seen), ",
        "the policy has not seen obs yet"),
    "9 the state after": (9, "chunk_states.append(state)",
        "chunk_states.append(step(state, obs[t], starts[t]))", "the step is taken in twice"),
    "9 chunks from nothing": (9, "chunk_states.append(state)", "chunk_states.append(0 * state)",
        "the episode was under way"),
    "9 one state for all": (9, "chunk_states.append(state)",
        "chunk_states.append([*chunk_states, state][0])", "That is the state with which the rollout began"),
    "9 replayed from nothing": (9, "    seen = []\n", "    seen, state = [], 0 * state\n",
        "The chunk is replayed from an empty memory"),
    "9 replayed without resets": (9, "step(state, x, start)", "remember(state, x)",
        "What the episode before has left"),
    "9 replayed one step deep": (9, "step(state, x, start)", "step(state.detach(), x, start)",
        "it reaches back to the start of the episode"),
    "8 loss not left": (8, "state.loss.copy_(", "state.loss.add(", "an update leaves its loss there"),
}  # fmt: skip


def attempt(name):
    """The reference with one change."""
    number, old, new, _ = WRONG[name]
    text = solution(number)
    assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {FILES[number]}"
    return text.replace(old, new)


def message_for(number, output):
    """What a learner reads of a wrong attempt at an exercise: the lines under its failures' headings."""
    body = re.split(r"\n=+ exercises =+\n", output)[0]
    sections = [part.strip().splitlines() for part in re.split(r"\n_+ .* _+\n|\n=+ [A-Z]+ =+", body)[1:]]
    return [lines for lines in sections if lines and lines[0].startswith(f"exercises/{FILES[number]}")]


def test_there_are_two_wrong_attempts_at_each():
    tried = [number for number, *_ in WRONG.values()]
    assert all(tried.count(number) >= 2 for number in NUMBERS)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_attempt_is_told_what_is_wrong(runs, name):
    """Seen to fail with a check that did not check, and with a plain assert in its place."""
    number, _, _, sentence = WRONG[name]
    status, output = runs[name]
    assert status == 1, output
    assert summary(output)[number] == f"failed   python -m exercises.hint {number}", output
    messages = message_for(number, output)
    assert len(messages) == 1, f"one message for exercise {number} should come first:\n{output}"
    text = " ".join(" ".join(messages[0]).split())
    assert " ".join(sentence.split()) in text, text
    assert len(messages[0]) <= 6 or number == 2, "not short:\n" + "\n".join(messages[0])
    assert "Traceback" not in output and "exercises/test_ex" not in text, "our own code shows:\n" + output
