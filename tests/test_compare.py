"""`python -m common.compare RUN...` on made-up run folders: nothing here trains."""

import json
import runpy
import sys

import pytest

from common import compare
from common.compare import main
from tests.test_recording import read

NOISE = "one run is noise"


def make_run(folder, script="a2c", env_id="E-v0", finished=True, evaluation=500.0, **args):
    """A run folder as a script leaves it: two lines of metrics and, when finished, a summary."""
    folder.mkdir(parents=True)
    lines = [{"iteration": k, "global_step": 1024 * k, "episodes": 0} for k in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    args = {"seed": 0, "env_id": env_id, "gamma": 0.99, "clip_ratio": True, "break_": False, **args}
    summary = {
        "script": script, "env_id": env_id, "seed": args["seed"], "args": args,
        "sps": 12345, "global_step": 2048,
        "eval_return_mean": evaluation, "eval_returns": [] if evaluation is None else [evaluation],
        "train_return_mean": 20.0, "value_at_time_limit": None,
    }  # fmt: skip
    if finished:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def output(capsys, *runs):
    """What comparing these prints, which must be a success with nothing on stderr."""
    assert main(["--no-rerun", *(str(run) for run in runs)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def words(text):
    """The text with every run of spaces and line ends as one space, since a long name has its own line."""
    return " ".join(text.split())


def test_runs_equal_in_all_but_the_seed_are_one_row(tmp_path, capsys):
    """Fails with the seed among the flags that are named, and with the environment or the script left out of
    what makes runs alike."""
    for seed in (0, 1, 2):
        make_run(tmp_path / f"plain{seed}", seed=seed)
        make_run(tmp_path / f"gamma{seed}", seed=seed, gamma=0.9)
    make_run(tmp_path / "env", env_id="F-v0")
    make_run(tmp_path / "script", script="ppo")
    rows = words(output(capsys, tmp_path))
    for row in (
        "a2c E-v0 --gamma 0.99 3 500.0",
        "a2c E-v0 --gamma 0.9 3 500.0",
        "a2c F-v0 1 5",
        "ppo E-v0 1 5",
    ):
        assert row in rows
    assert rows.count("12,345") == 4 and "seed " not in rows


def test_only_flags_that_differ_are_named_and_as_one_types_them(tmp_path, capsys):
    """Fails with all flags named, with `--break False`, with a flag compared over runs of other scripts, and
    with one that only some of the runs have left out."""
    make_run(tmp_path / "plain")
    make_run(tmp_path / "unclipped", clip_ratio=False)
    make_run(tmp_path / "broken", break_=True)
    make_run(tmp_path / "newer", squash=True)
    make_run(tmp_path / "other", script="ppo", gamma=0.5)
    rows = words(output(capsys, tmp_path))
    for flags in ("--clip-ratio --no-break", "--no-clip-ratio --no-break", "--clip-ratio --break"):
        assert f"a2c E-v0 {flags} 1 500.0" in rows
    assert "a2c E-v0 --clip-ratio --no-break --squash 1 500.0" in rows
    assert "ppo E-v0 1 500.0" in rows and "gamma" not in rows and "False" not in rows


def test_a_run_a_folder_of_runs_and_a_glob_each_once(tmp_path, capsys, monkeypatch):
    """Fails with runs that are named twice kept twice, with the glob not expanded, and with only the first of
    the arguments read."""
    for seed in (0, 1, 2):
        make_run(tmp_path / f"runs/s{seed}", seed=seed, evaluation=100.0 * seed)
    make_run(tmp_path / "alone", seed=3, evaluation=300.0)
    (tmp_path / "runs/notes").mkdir()
    (tmp_path / "runs/notes.txt").write_text("not a run")
    monkeypatch.chdir(tmp_path)
    for arguments, row in (
        (["runs/s1"], "1 100.0 20.0"),
        (["runs"], "3 100.0 +- 100.0"),
        (["runs/s[02]"], "2 100.0 +- 141.4"),
        (["runs/*"], "3 100.0 +- 100.0"),
        (["runs/", "./runs/s0", "runs/*", "runs"], "3 100.0 +- 100.0"),
        (["alone", "runs"], "4 150.0 +- 129.1"),
        (["*"], "4 150.0 +- 129.1"),
    ):
        assert f"a2c E-v0 {row}" in words(output(capsys, *arguments)), arguments
    found = compare.find_runs(["runs", "runs/s0", "*"])
    assert sorted(map(str, found)) == ["alone", "runs/s0", "runs/s1", "runs/s2"]


def test_a_row_is_the_mean_and_the_spread_over_its_seeds(tmp_path, capsys):
    """The sample's standard deviation, and of what there is. Fails with pstdev, with the runs counted for the
    seeds, with a None taken for 0, and with a mean for the median of steps/s."""
    for seed, value in enumerate((90.0, 100.0, 110.0)):
        make_run(tmp_path / f"s{seed}", seed=seed, evaluation=value)
    make_run(tmp_path / "again", seed=2, evaluation=None)
    path = tmp_path / "s1/summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "value_at_time_limit": 7.25, "sps": 99999}))
    assert "3 100.0 +- 10.0 20.0 +- 0.0 7.2 12,345" in words(output(capsys, tmp_path))


def test_what_no_run_has_is_a_dash(tmp_path, capsys):
    """An --eval-episodes 0 has no score. Fails with the mean of nothing taken."""
    make_run(tmp_path / "one", evaluation=None)
    assert "a2c E-v0 1 - 20.0 - 12,345" in words(output(capsys, tmp_path))


def test_a_run_that_could_not_be_evaluated_is_named(tmp_path, capsys):
    """Fails with the line for every run without a score, and with the rest of its row left out."""
    make_run(tmp_path / "none", evaluation=None)
    path = make_run(tmp_path / "failed", evaluation=None, gamma=0.9) / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eval_returns": None}))
    out = output(capsys, tmp_path)
    assert "a2c E-v0 --gamma 0.9 1 - 20.0 - 12,345" in words(out)
    named = [line for line in out.splitlines() if line.startswith("not evaluated: ")]
    assert named == [f"not evaluated: {path.parent}, which --resume does"]


def test_one_run_is_called_noise_only_where_a_row_has_one_seed(tmp_path, capsys):
    """Nor has one seed, run twice, a spread. Fails with the runs of a row counted in place of its seeds, and
    with `all` rows asked for, not any."""
    make_run(tmp_path / "a0", seed=0)
    make_run(tmp_path / "again", seed=0)
    printed = output(capsys, tmp_path)
    assert printed.count(NOISE) == 1 and "+-" not in printed
    make_run(tmp_path / "a1", seed=1)
    assert NOISE not in output(capsys, tmp_path)
    make_run(tmp_path / "b0", seed=0, gamma=0.9)
    assert output(capsys, tmp_path).count(NOISE) == 1
    make_run(tmp_path / "b1", seed=1, gamma=0.9)
    assert NOISE not in output(capsys, tmp_path)


def test_unfinished_runs_are_listed_and_counted_nowhere(tmp_path, capsys):
    """Fails with them left out, with the first line's step, and where no line has been written yet or the
    last one was cut off."""
    make_run(tmp_path / "done")
    make_run(tmp_path / "done1", seed=1)
    going, new = (make_run(tmp_path / name, finished=False) for name in ("going", "new"))
    with (going / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 3, "global_')
    (new / "metrics.jsonl").write_text("")
    out = output(capsys, tmp_path)
    assert out.splitlines()[-2:] == [
        f"unfinished: {going}, 2,048 steps so far",
        f"unfinished: {new}, 0 steps so far",
    ]
    assert out.count("unfinished: ") == 2 and "a2c E-v0 2 500.0" in words(out) and NOISE not in out
    assert output(capsys, going) == f"unfinished: {going}, 2,048 steps so far\n"


@pytest.mark.parametrize("argument", ["", "nowhere", "no*", "notes.txt"])
def test_nothing_there_is_one_sentence_and_exit_2(tmp_path, capsys, monkeypatch, argument):
    """As `python -m` has it. Fails with the sentence on stdout, with exit 0, and with a table of no rows."""
    (tmp_path / "notes.txt").write_text("not a run")
    monkeypatch.delitem(__import__("sys").modules, "common.compare")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["compare", str(tmp_path / argument)])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("common.compare", run_name="__main__")
    printed = capsys.readouterr()
    assert stop.value.code == 2 and printed.out == ""
    assert printed.err.startswith("no run there: ") and printed.err.count("\n") == 1 and printed.err.isascii()
    assert len(printed.err) <= 80
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("length", [1, 30, 100])
def test_lines_fit_80_columns_and_are_ascii(tmp_path, capsys, monkeypatch, length):
    """Only a name on a line of its own may be longer. Fails with every name in the first column, with
    headings over no column, and with a plus-minus sign."""
    for seed in (0, 1):
        make_run(tmp_path / f"p{seed}", "ppo", "Pendulum-v1", seed=seed, evaluation=-1000.0 - 50 * seed)
    make_run(tmp_path / "q", "ppo", "E-v0", env_kwargs="x" * length)
    make_run(tmp_path / "r", "ppo", "E-v0")
    make_run(tmp_path / "going", finished=False)
    monkeypatch.chdir(tmp_path)
    out = output(capsys, ".")
    lines = out.splitlines()
    assert out.isascii() and len(lines) == (6 if length == 1 else 7)
    names = [line for line in lines if line.endswith("x")]
    assert names == ([] if length == 1 else [f"ppo E-v0 --env-kwargs {'x' * length}"])
    assert all(len(line) <= 80 for line in lines if line not in names)
    ends = {len(line) for line in lines if line.endswith((" 12,345", " steps/s"))}
    assert len(ends) == 1, "the columns do not line up"


def test_the_room_for_a_name_is_what_80_columns_leave(tmp_path, capsys):
    """Fails with the room one too wide or one too narrow."""
    for extra, lines in ((0, 1), (1, 2)):
        folder = tmp_path / str(extra)
        make_run(folder / "r", script="s", env_id="E" * (27 + extra))
        table = [line for line in output(capsys, folder).splitlines() if not line.startswith((NOISE, "run "))]
        assert len(table) == lines and max(map(len, table)) <= 80


def test_a_run_is_counted_once_by_whatever_path(tmp_path, capsys, monkeypatch):
    """Fails with the paths compared as they were written."""
    make_run(tmp_path / "one")
    monkeypatch.chdir(tmp_path)
    assert NOISE in output(capsys, "one", tmp_path / "one", "../" + tmp_path.name + "/one")


def test_a_run_that_went_on_is_unfinished(tmp_path, capsys):
    """Extended by --total-timesteps and cut: the old summary is not its score. Fails without the check."""
    folder = make_run(tmp_path / "one")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"iteration": 3, "global_step": 3072, "episodes": 0}) + "\n")
    printed = output(capsys, folder)
    assert "unfinished" in printed and "3,072 steps" in printed


def make_curve(folder, returns, **args):
    """A finished run whose metrics are these episodic returns, one an iteration."""
    make_run(folder, **args)
    lines = [
        {"iteration": k, "global_step": 1024 * k, "episodes": 1, "episodic_return": score, "approx_kl": None}
        for k, score in enumerate(returns, start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "global_step": lines[-1]["global_step"]}))


def curves(path):
    """{entity: [(step, value), ...]} of the overlay, without the point at 0 that only sets the ticks."""
    found = {}
    for entity, components in read(path).items():
        for name, rows in components.items():
            if name.endswith("Scalars:scalars"):
                found[entity] = [(step, value[0]) for step, value in sorted(rows) if step > 0]
    return found


def test_the_overlay_has_the_mean_and_the_spread_of_each_group(tmp_path, capsys, monkeypatch):
    """Fails with the spread of one run drawn, with a None counted as 0, with the population's deviation, and
    with the groups' curves mixed up."""
    pytest.importorskip("rerun")
    make_curve(tmp_path / "runs/a0", [10.0, None, 40.0], seed=0)
    make_curve(tmp_path / "runs/a1", [30.0, 50.0, 40.0], seed=1)
    make_curve(tmp_path / "runs/b0", [7.0, 8.0], seed=0, clip_ratio=False)
    monkeypatch.chdir(tmp_path)
    assert main(["runs", "--out", "over/lay.rrd"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("overlay  python -m rerun over/lay.rrd")
    found = curves(tmp_path / "over/lay.rrd")
    a, b = (f"/episodic_return/a2c\\ E-v0\\ {flag}" for flag in ("--clip-ratio", "--no-clip-ratio"))
    assert set(found) == {f"{a}/mean", f"{a}/below", f"{a}/above", f"{b}/mean"}
    assert found[f"{a}/mean"] == [(1024, 20.0), (2048, 50.0), (3072, 40.0)]
    assert found[f"{a}/above"] == [(1024, pytest.approx(20 + 200**0.5)), (3072, 40.0)]
    assert found[f"{a}/below"] == [(1024, pytest.approx(20 - 200**0.5)), (3072, 40.0)]
    assert found[f"{b}/mean"] == [(1024, 7.0), (2048, 8.0)]


def test_the_overlay_opens_laid_out(tmp_path):
    """Fails without the blueprint sent, and with a plot of what no run has."""
    pytest.importorskip("rerun")
    make_curve(tmp_path / "a0", [10.0, 20.0])
    assert main([str(tmp_path), "--out", str(tmp_path / "o.rrd")]) == 0
    layout = read(tmp_path / "o.rrd", blueprint=True)
    components = [item for parts in layout.values() for item in parts.items()]
    origins = [value for name, rows in components if "origin" in name for _, (value,) in rows]
    assert origins == ["/episodic_return"]


def test_an_overlay_of_nothing_is_no_traceback(tmp_path, capsys):
    """A finished run whose metrics were emptied. Fails with the last line of no lines asked for."""
    pytest.importorskip("rerun")
    make_curve(tmp_path / "a0", [10.0, 20.0])
    (tmp_path / "a0/metrics.jsonl").write_text("")
    assert main([str(tmp_path), "--out", str(tmp_path / "o.rrd")]) == 0
    assert "a2c E-v0" in capsys.readouterr().out


def test_the_overlay_is_by_default_a_fresh_file_under_runs(tmp_path, capsys, monkeypatch):
    """Twice within one second. Fails with the second over the first."""
    pytest.importorskip("rerun")
    make_curve(tmp_path / "runs/a0", [10.0, 20.0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare.time, "strftime", lambda form: form.replace("%Y%m%d-%H%M%S", "now"))
    for name in ("compare_now", "compare_now-2", "compare_now-3"):
        assert main(["runs"]) == 0
        assert f"runs/{name}.rrd" in capsys.readouterr().out and (tmp_path / f"runs/{name}.rrd").exists()
    assert main(["runs", "--no-rerun"]) == 0
    assert len(list((tmp_path / "runs").glob("*.rrd"))) == 3 and "overlay" not in capsys.readouterr().out


def test_an_out_that_is_there_is_refused_and_kept(tmp_path, capsys):
    """Fails with the file written over."""
    make_curve(tmp_path / "a0", [10.0, 20.0])
    (tmp_path / "mine").write_text("mine")
    assert main([str(tmp_path), "--out", str(tmp_path / "mine")]) == 2
    assert "is there already: name another file" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "mine"


def test_an_out_that_cannot_be_written_is_one_line_after_the_table(tmp_path, capsys):
    """Fails with a traceback, and with exit 0 for a file that was asked for and is not there."""
    pytest.importorskip("rerun")
    make_curve(tmp_path / "a0", [10.0, 20.0])
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path), "--out", str(tmp_path / "file/o.rrd")]) == 1
    printed = capsys.readouterr()
    assert "a2c E-v0" in printed.out
    assert printed.err.startswith("no overlay: ") and printed.err.count("\n") == 1


def test_without_rerun_the_table_stays(tmp_path, capsys, monkeypatch):
    """Fails with the import at the top of compare.py."""
    make_curve(tmp_path / "a0", [10.0, 20.0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "rerun", None)
    monkeypatch.delitem(sys.modules, "common.recording", raising=False)
    assert main(["a0"]) == 0
    printed = capsys.readouterr()
    assert "a2c E-v0" in printed.out and printed.err.startswith("no overlay: rerun is not installed")
