"""The learning results: statistics, the folder of runs, and tables that say what results.json holds."""

import json
import re
import subprocess
import sys
import time
import types

import gymnasium as gym
import numpy as np
import pytest
import torch

from common.envs import make_env
from common.envs.batched import BATCHED_ENVS, make_batched_env
from tests.benchmarks import growth, peers, speed
from tests.benchmarks import results as R

TINY = R.Recipe("ppo_discrete.py --total-timesteps 256 --num-envs 2 --num-steps 32 --num-minibatches 2", 2)


@pytest.fixture
def workshop(tmp_path, monkeypatch):
    """results.py with one small recipe and its files in a folder of its own."""
    monkeypatch.setattr(R, "RECIPES", {"tiny": TINY})
    monkeypatch.setattr(R, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(R, "folder_of", lambda recipe: tmp_path / recipe)
    return tmp_path


def test_the_interquartile_mean():
    """Where the middle half is whole samples, and where it has parts: of five, the middle 2.5 are the third
    and three quarters of its neighbours. Fails with the mean, and with whole samples only."""
    assert R.interquartile_mean(np.array([100.0, 1, 2, -50])) == 1.5
    assert R.interquartile_mean(np.array([0.0, 1, 2, 6, 100])) == pytest.approx((0.75 + 2 + 0.75 * 6) / 2.5)
    assert R.interquartile_mean(np.array([7.0])) == 7.0


def test_the_bootstrap_interval():
    """Near the normal interval for 100 scores, and the same each time. Fails with a 90% interval."""
    scores = np.random.default_rng(1).uniform(0, 1, 100)
    low, high = R.bootstrap_interval(scores)
    assert (low, high) == R.bootstrap_interval(scores)
    # The variance of a 25% trimmed mean of n uniforms is near 1 / (6 n).
    assert high - low == pytest.approx(2 * 1.96 * (1 / 600) ** 0.5, rel=0.05)
    assert low < R.interquartile_mean(scores) < high
    assert R.bootstrap_interval(np.full(5, 500.0)) == (500.0, 500.0)


def test_an_interval_needs_five_seeds():
    """Fails with an interval of four."""
    assert R.with_interval([1.0, 2.0, 3.0, 4.0], 1) == "2.5"
    assert R.with_interval([500.0] * 5) == "500 [500, 500]"


def test_the_training_curve_is_the_mean_over_episodes():
    """Fails with the mean of the iterations' means, with a part of the run left out, and with 0 for none."""
    lines = [
        {"global_step": 100, "episodes": 0, "episodic_return": None},
        {"global_step": 4950, "episodes": 3, "episodic_return": 10.0},
        {"global_step": 5000, "episodes": 1, "episodic_return": 30.0},
    ]
    assert R.curve(lines, 5000) == [None] * 49 + [15.0]
    assert R.curve([{**line, "global_step": 100} for line in lines], 5000)[0] == 15.0


def test_steps_to_a_threshold():
    """Fails with the start of the part that reaches it, and with never taken for the start."""
    curve = [None, -300.0, -200.0, -100.0] + [None] * 46
    assert R.steps_to(curve, -200.0, 5000) == 300.0
    assert R.steps_to(curve, 0.0, 5000) == 5000.0


@pytest.mark.slow
def test_a_recipe_is_trained_stored_and_kept(workshop, capsys):
    """Fails with a finished run trained again, and with the rows of other seeds lost."""
    R.run([("tiny", 1)], 1)
    R.run([("tiny", 0), ("tiny", 1)], 2)
    stored = json.loads((workshop / "results.json").read_text())
    assert set(stored) == {"tiny"} and stored["tiny"]["command"] == TINY.command
    assert [row["seed"] for row in stored["tiny"]["runs"]] == [0, 1]
    row = stored["tiny"]["runs"][0]
    assert len(row["eval_returns"]) == 100 and len(row["curve"]) == R.CURVE_POINTS
    assert row["eval_return_mean"] == pytest.approx(np.mean(row["eval_returns"]))
    assert row["trained"].startswith(R.machine())
    (workshop / "tiny/seed1/trained.txt").write_text("elsewhere")  # and not here
    (workshop / "tiny/seed1/checkpoint.pt").unlink()  # what is finished needs no checkpoint
    R.run([("tiny", 1)], 1)
    again = json.loads((workshop / "results.json").read_text())["tiny"]["runs"]
    assert again == [stored["tiny"]["runs"][0], {**stored["tiny"]["runs"][1], "trained": "elsewhere"}]
    assert capsys.readouterr().out.count("tiny  seed") == 4


@pytest.mark.slow
def test_an_interrupted_run_is_resumed(workshop):
    """A folder with a checkpoint and no summary, or one without an evaluation, goes on there. Fails with
    --out again, which is refused, and with a run taken for finished that was cut in its evaluation."""
    row = R.run_seed("tiny", 0)
    path = workshop / "tiny/seed0/summary.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "eval_return_mean": None, "eval_returns": None})
    )
    assert R.run_seed("tiny", 0) == row
    path.unlink()
    assert {**R.run_seed("tiny", 0), "train_seconds": 0} == {**row, "train_seconds": 0}


@pytest.mark.slow
def test_a_run_that_fails_says_why(workshop, monkeypatch):
    """Fails with the script's sentence lost."""
    monkeypatch.setitem(R.RECIPES, "tiny", R.Recipe("ppo_discrete.py --num-minibatches 7"))
    with pytest.raises(RuntimeError, match=r"tiny, seed 3: .*--num-minibatches 7 does not divide"):
        R.run_seed("tiny", 3)


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [(KeyboardInterrupt(), 130, "stopped and saved"), (RuntimeError("why"), 1, "why")],
)
def test_what_stops_is_said_in_one_line(workshop, monkeypatch, capsys, raised, status, said):
    """And what was done is stored. Fails with a traceback, and with exit 0."""
    row = {"seed": 0, "eval_return_mean": 1.0}

    def train(recipe, seed):
        if seed == 1:
            while not (workshop / "results.json").exists():
                time.sleep(0.01)
            raise raised
        return row

    monkeypatch.setattr(R, "run_seed", train)
    with pytest.raises(SystemExit) as stop:
        R.run([("tiny", seed) for seed in range(3)], 1)
    assert stop.value.code == status
    assert capsys.readouterr().err == f"{said}\nrun the same command again to go on\n"
    assert json.loads((workshop / "results.json").read_text())["tiny"]["runs"][0] == row


def test_a_failed_evaluation_is_no_result(workshop):
    """A sentence with the command that shows why. Fails with null stored as a score."""
    folder = workshop / "tiny/seed0"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text('{"seed": 0, "eval_return_mean": null, "eval_returns": []}')
    said = "tiny, seed 0: no result, since its evaluation failed: python ppo_discrete.py --eval-only "
    with pytest.raises(RuntimeError, match=re.escape(f"{said}{folder} says why; without")):
        R.run_seed("tiny", 0)


def test_a_recipe_may_be_a_variants(workshop, monkeypatch):
    """`python -m variants.NAME`: how it is started, its defaults, and its row in a table of its own. Fails
    with the first word of a command taken for the script, and with all recipes in one table."""
    variant = types.ModuleType("variants.ppo_memory")
    variant.Args = lambda: types.SimpleNamespace(env_id="Blind-v0", total_timesteps=300_000)
    monkeypatch.setitem(sys.modules, "variants", types.ModuleType("variants"))
    monkeypatch.setitem(sys.modules, "variants.ppo_memory", variant)
    start = "-m variants.ppo_memory"
    memory = {"gru": start, "none": f"{start} --memory none"}
    memory = {name: R.Recipe(command, 1, table="memory") for name, command in memory.items()}
    monkeypatch.setattr(R, "RECIPES", {"tiny": TINY, **memory, "apart": TINY._replace(table="")})
    assert R.tables() == {"results": ["tiny"], "memory": ["gru", "none"]}
    assert R.setting(f"{start} --env-id Walk-v0", "env_id") == "Walk-v0"
    row = {"seed": 0, "eval_return_mean": 400.0, "train_return_mean": 200.0}
    stored = {name: {"command": recipe.command, "runs": [row]} for name, recipe in R.RECIPES.items()}
    lines = R.results_table(stored, "memory", every_seed=False)
    assert lines[2:] == [
        f"| {name} | Blind-v0 | `variants.ppo_memory` | 300k | 200 | 1 | 400 | 400 | 400 |" for name in memory
    ]
    started = []

    def fails(words, **how):
        started.extend(words[1:])
        return subprocess.CompletedProcess(words, 1, "", "enough seen")

    monkeypatch.setattr(subprocess, "run", fails)
    with pytest.raises(RuntimeError, match="none, seed 3: enough seen"):
        R.run_seed("none", 3)
    assert started[:6] == ["-m", "variants.ppo_memory", "--memory", "none", "--seed", "3"]


def test_the_blocks_of_a_page_are_written_anew():
    """Each where it stands, the rest as it is. Fails with the text between two blocks lost, and with the end
    of a block lost."""
    page = "a\n<!-- one -->\nold\n<!-- end -->\nb\n<!-- two -->\n<!-- end -->\n<!-- a remark -->\n"
    written = R.with_blocks(page, {"one": ["1", "2"], "two": ["3"], "three": ["4"]})
    assert written == (
        "a\n<!-- one -->\n1\n2\n<!-- end -->\nb\n<!-- two -->\n3\n<!-- end -->\n<!-- a remark -->\n"
    )


@pytest.mark.parametrize("changed, mark", [("variants/new.py", "+"), ("README.md", ""), (None, "")])
def test_the_commit_says_where_a_script_was_changed(tmp_path, monkeypatch, changed, mark):
    """Fails with a variant's change unseen, and with one in the README taken for one in a script."""
    (tmp_path / "variants").mkdir()
    for name in ("README.md", "variants/new.py"):
        (tmp_path / name).write_text("as it was\n")
    words = ["-c", "user.name=a", "-c", "user.email=b"]
    for command in (["init", "-q"], ["add", "."], [*words, "commit", "-qm", "all"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    if changed:
        (tmp_path / changed).write_text("changed\n")
    monkeypatch.setattr(R, "ROOT", tmp_path)
    assert re.fullmatch(rf"[0-9a-f]{{7,}}{re.escape(mark)}", R.commit())


def test_a_changed_command_has_another_folder(monkeypatch):
    """Fails with the results of one command line taken for those of another."""
    before = R.folder_of("discrete")
    monkeypatch.setitem(R.RECIPES, "discrete", R.Recipe("ppo_discrete.py --gamma 0.9"))
    assert R.folder_of("discrete") != before and R.folder_of("discrete").parent == before.parent


def test_the_report_and_the_pages_say_what_was_measured():
    """Fails with a number changed by hand, with results.json changed and no report written, and with a block
    that no page shows or two do."""
    stored = json.loads(R.RESULTS.read_text())
    assert R.REPORT.read_text().splitlines() == "\n".join(R.report_lines(stored)).splitlines()
    blocks, pages = R.blocks(stored), [page.read_text() for page in R.pages()]
    assert [R.with_blocks(page, blocks) for page in pages] == pages
    assert sorted(re.findall(r"<!-- (?!end)(\w+) -->", "".join(pages))) == sorted(blocks)


def test_what_the_pages_say_in_words_was_measured():
    """Fails with a count or a value in their sentences that results.json or speed.json does not have."""
    stored = json.loads(R.RESULTS.read_text())
    words = " ".join(" ".join(page.read_text() for page in R.pages()).split())
    runs = {name: stored[f"continuous {name}".strip()]["runs"] for name in ("", *R.TRICKS, *R.BUGS)}
    below = {name: sum(run["eval_return_mean"] < 500 for run in rows) for name, rows in runs.items()}
    assert (below["--no-clip-ratio"], below["--clip-vloss"], below["--max-grad-norm 0"]) == (7, 3, 3)
    assert "as on 7 seeds of 10" in words and words.count("three cart-poles of ten end below 500") == 2
    assert below["--break"] == 0 and "while the score is 500 on all ten seeds" in words
    limit = {
        name: R.interquartile_mean(np.array([r["value_at_time_limit"] for r in runs[name]]))
        for name in ("", "--clip-vloss", "--break")
    }
    assert [round(float(value)) for value in limit.values()] == [100, 81, 84]
    assert "V@limit 81 for 100" in words and "with `--break` it stays at 84" in words
    rows = json.loads(R.SPEED.read_text())["rows"]
    rows = [row for row in rows if row["script"] in ("ppo_continuous", "ppo_discrete", "a2c")]
    eager, compiled = (
        sorted(row["rate"] / row["sb3_rate"] for row in rows if ("--compile" in row["what"]) == compile)
        for compile in (False, True)
    )
    said = f"take {eager[0]:.1f} to {eager[-1]:.1f} times as many steps a second as Stable-Baselines3"
    assert f"The single-machine scripts {said} with the same settings" in words
    assert f"{compiled[0]:.1f} to {compiled[-1]:.1f} times with `--compile`" in words


def test_what_the_pages_say_of_the_variants_was_measured():
    """Fails with a recipe trained to another end than the sentences about it."""
    stored = json.loads(R.RESULTS.read_text())
    words = " ".join(" ".join(page.read_text() for page in R.pages()).split())

    def mean(name, key="eval_return_mean"):
        return np.mean([run[key] for run in stored[name]["runs"]])

    memories = [mean(f"memory {name}") for name in ("gru", "lstm", "transformer", "mamba")]
    assert min(memories) > 470 and round(mean("memory none")) == 44
    assert "(all over 470 of 500, without memory 44)" in words
    assert [run["eval_return_mean"] for run in stored["two frames"]["runs"]] == [500.0] * 5
    assert mean("one frame") < 50 and "two pictures on five seeds of five" in words
    assert min(mean(f"{name} break") for name in ("memory", "repeat first")) in (1.0, 500.0)
    slower = mean("memory stale", "train_return_mean") / mean("memory gru", "train_return_mean")
    lost = sum(run["eval_return_mean"] < 450 for run in stored["memory stale"]["runs"])
    assert round(slower, 1) == 0.5 and lost == 1
    assert "learns half as fast, and one seed of three is lost" in words
    layouts = [mean(f"{name} advantages") for name in ("minibatch", "rollout")]
    assert round(layouts[0] - layouts[1]) == 20 and "ended 20 points higher" in words
    assert mean("repeat 32 mamba") < 0.5 and "Mamba does not learn to hold the cue for 32 steps" in words
    assert mean("gail frozen") < -1000 < mean("clone 5") < mean("gail shuffled") < mean("gail")


def test_results_are_complete():
    """Every recipe on the seeds it names, from 0, each evaluated 100 times, with the command it has now,
    and no lower than it promises."""
    stored = json.loads(R.RESULTS.read_text())
    for name, recipe in R.RECIPES.items():
        assert stored[name]["command"] == recipe.command, name
        assert [run["seed"] for run in stored[name]["runs"]] == list(range(recipe.seeds)), name
        assert {len(run["eval_returns"]) for run in stored[name]["runs"]} == {100}, name
        scores = [run["eval_return_mean"] for run in stored[name]["runs"]]
        assert np.mean(scores) >= recipe.least_mean and min(scores) >= recipe.least_seed, name


@pytest.mark.parametrize("base", ["continuous", "discrete"])
def test_the_scores_in_the_help_are_those_measured(base):
    """Fails with a score left as it was when the defaults changed, and with a trick whose help names none."""
    stored, text = json.loads(R.RESULTS.read_text()), (R.ROOT / f"ppo_{base}.py").read_text()
    for flag in R.TRICKS:
        field, _, value = flag.removeprefix("--").removeprefix("no-").partition(" ")
        help_text = re.search(rf"^    {field.replace('-', '_')}_?: .*# (.*)$", text, re.M)[1]
        named = re.search(r"score (\d+)$", help_text)
        if flag == "--norm-reward":  # it says what becomes of V instead
            continue
        runs = stored[f"{base} {flag}"]["runs"]
        assert int(named[1]) == round(np.mean([run["eval_return_mean"] for run in runs])), flag
        how = f"at {float(value):g}" if value else "off" if flag.startswith("--no-") else "on"
        assert f"; {how}: score" in help_text, flag


PEERS = [
    {"script": "ppo_discrete", "what": "4 x 128", "rate": 9000.4, "sb3": 5000.0, "cleanrl": 4000.0},
    {"script": "ppo_gpu_batched", "what": "1,024 x 32", "rate": 2e5, "compile": 31.2, "purejaxrl": 3e5}
    | {"purejaxrl_compile": 5.4},
]
GROWTH = [
    {"factor": "num_envs", "value": 8, "ppo_discrete": 9000.0, "ppo_gpu_batched": 4000.0},
    {"factor": "num_envs", "value": 4096, "ppo_gpu_batched": 90000.0},
]


def test_the_speed_page_has_the_peers_and_the_growth():
    """Each with its own machine, date and commit. Fails with a cell in another's column, and with a part
    shown that was not measured."""
    stored = {
        name: part for name, part in json.loads(R.SPEED.read_text()).items() if name not in speed.TITLES
    }
    plain = speed.speed_section(stored)
    where = {"machine": "M", "date": "D"}
    stored["peers"] = {**where, "commit": "one", "rows": PEERS}
    stored["growth"] = {**where, "commit": "two", "rows": GROWTH}
    lines = speed.speed_section(stored)
    assert lines[: len(plain)] == plain and not any(title in plain for title in speed.TITLES.values())
    assert [line for line in lines[len(plain) :] if line] == [
        speed.TITLES["peers"],
        "M; D, commit one.",
        "| script and setting | steps/s | SB3 | CleanRL | PureJaxRL |",
        "| --- | --- | --- | --- | --- |",
        "| `ppo_discrete.py`, 4 x 128 | 9,000 | 5,000 | 4,000 | - |",
        "| `ppo_gpu_batched.py`, 1,024 x 32 | 200,000 (31 s) | - | - | 300,000 (5 s) |",
        speed.TITLES["growth"],
        "M; D, commit two.",
        "| size | value | `ppo_discrete.py` | `ppo_gpu_batched.py` |",
        "| --- | --- | --- | --- |",
        "| `num_envs` | 8 | 9,000 | 4,000 |",
        "| `num_envs` | 4,096 | - | 90,000 |",
    ]


def test_what_is_not_measured_this_time_is_kept(tmp_path, monkeypatch):
    """Fails with a plain run that loses the peers, and with a part that is not replaced."""
    monkeypatch.setattr(speed, "SPEED", tmp_path / "speed.json")
    speed.SPEED.write_text('{"date": "before", "peers": 1, "growth": 2}')
    speed.store({"date": "now", "growth": 3})
    assert json.loads(speed.SPEED.read_text()) == {"date": "now", "peers": 1, "growth": 3}


@pytest.mark.parametrize("path", peers.CHANGES)
def test_a_checkout_of_another_version_is_refused(tmp_path, path):
    """In one sentence with the line that is not there. Fails with a change left out, with one made where the
    text stands twice, and with a missing script told by a traceback."""
    folder, changes = tmp_path, peers.CHANGES[path]
    name = path.split("/")[0]
    with pytest.raises(SystemExit, match=f"^--{name} {folder} has no {path}: give the top folder"):
        peers.changed_text(folder, path)
    (folder / path).parent.mkdir()
    (folder / path).write_text("".join(change.old for change in changes))
    assert peers.changed_text(folder, path) == "".join(change.new for change in changes)
    for missing in changes:
        for times in (0, 2):
            parts = (change.old * (times if change is missing else 1) for change in changes)
            (folder / path).write_text("".join(parts))
            with pytest.raises(SystemExit, match=re.escape(f"{missing.old.strip()!r} does not stand there")):
                peers.changed_text(folder, path)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--peers"], "--peers needs a checkout to measure: give --cleanrl DIR, --purejaxrl DIR or both"),
        (["--cleanrl", "x"], "--cleanrl and --purejaxrl go with --peers: add it"),
        (["--peers", "--purejaxrl", "x"], "PureJaxRL needs a_jax_that_is_not: pip install a_jax_that_is_not"),
    ],
)
def test_peers_are_refused_without_a_checkout_or_a_package(monkeypatch, flags, said):
    """Fails with hours of measuring before the refusal, and with a traceback."""
    monkeypatch.setitem(peers.PACKAGES, "purejaxrl", ("a_jax_that_is_not",))
    monkeypatch.setattr(speed, "compare", lambda *how: pytest.fail("it was measured"))
    monkeypatch.setattr("sys.argv", ["speed", *flags])
    with pytest.raises(SystemExit) as stop:
        speed.main()
    assert stop.value.code == said


@pytest.mark.parametrize("width", [4, 7])
def test_the_padded_cart_poles_step(width):
    """The same cart-pole, seen with zeros after it, and gone afterwards. Fails with another width than the
    space says, with zeros before it, and with an id that stays."""
    with growth.padded_envs(width) as env_id:
        env, batched = make_env(env_id), make_batched_env(env_id, 3)
        plain = make_env("CartPole-v1")
        assert env.obs_dim == batched.obs_dim == width
        batched.reset(torch.rand(3, batched.reset_noise_dim))
        obs, expected = env.reset()[0], plain.reset()[0]
        for seen in (obs, batched.obs()[0].numpy()):
            assert seen.shape == (width,) and not seen[4:].any()
        np.testing.assert_array_equal(obs[:4], expected)
        np.testing.assert_array_equal(env.step(1)[0][:4], plain.step(1)[0])
        next_obs = batched.step(torch.ones(3, dtype=torch.int64), torch.rand(3, 4))[0]
        assert next_obs.shape == (3, width) and next_obs[:, :4].all() and not next_obs[:, 4:].any()
    assert env_id not in gym.registry and env_id not in BATCHED_ENVS


def test_growth_measures_one_factor_at_a_time(monkeypatch):
    """Fails with a base that is measured again, and with a script asked for more than its most."""
    asked = []
    monkeypatch.setattr(
        growth, "rate", lambda script, quick, **flags: float(asked.append((script, flags)) or 1)
    )
    rows = growth.measure(quick=True)
    assert [(row["factor"], row["value"]) for row in rows] == [
        (factor, value) for factor, values in growth.FACTORS.items() for value in values
    ]
    assert len(asked) == len({str(one) for one in asked}) and all(len(flags) <= 1 for _, flags in asked)
    assert [row["value"] for row in rows if "ppo_discrete" not in row] == [1024, 4096]
    assert ("ppo_discrete", {"num_envs": 8}) not in asked and ("ppo_discrete", {}) in asked


def test_both_scripts_train_on_the_padded_cart_pole():
    """Fails with a size that a script is not given."""
    for script in growth.MOST:
        assert growth.rate(script, quick=True, obs_dim=9, num_envs=4) > 0
