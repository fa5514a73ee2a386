"""variants/ppo_seeds.py and common/seed_runs.py: each seed is alone among its companions, and the folder that
holds them all.

Each docstring ends with what was broken to see the test fail.
"""

import json
import os

import pytest
import torch

import ppo_gpu_batched
import variants.ppo_seeds as script
from common import compare
from common.cli import NonFinite, Refusal, command, command_line, parse_args, saved_args
from common.metrics import read_metrics
from common.seeding import initial_weights
from common.trained import trained_agent
from tests.capture_emulator import emulated
from tests.conftest import interrupt, load, metrics

SMALL = {
    "num_envs": 8, "num_steps": 16, "num_minibatches": 2, "update_epochs": 2, "total_timesteps": 10 * 128,
    "eval_episodes": 0, "rerun": False, "threads": 1, "log_every": 7, "hidden_dim": 16,
}  # fmt: skip
CASES = {
    "plain": {},
    "continuous": {"env_id": "Pendulum-v1"},
    "masked": {"target_kl": 1e-3, "ent_coef": 0.01, "clip_vloss": True, "max_grad_norm": 0.05},
}


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """Writing through to the disk is most of the time of a small run."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


def train(out, seeds=(0, 1, 2), **flags):
    return script.train(script.Args(**{**SMALL, **flags, "seeds": list(seeds), "out": str(out)}))


def checkpoint(folder):
    return (folder / "checkpoint.pt").read_bytes()


def timeless(folder):
    return [{k: v for k, v in line.items() if k not in ("sps", "seconds")} for line in metrics(folder)]


@pytest.mark.parametrize("flags", CASES.values(), ids=CASES)
def test_each_seed_is_the_single_script_with_that_seed(tmp_path, flags):
    """After four iterations the weights agree to 1e-4, and so do the metrics. Fails with a stream or the
    weights of another seed, with advantages normalised, gradients clipped or the KL taken over all seeds,
    with the learning rate not annealed, and with the lanes of two seeds exchanged."""
    size = {**SMALL, **flags, "total_timesteps": 4 * 128, "num_minibatches": 4}
    agents = train(tmp_path / "all", seeds=(5, 3), **size)
    for seed, agent in zip((5, 3), agents, strict=True):
        out = tmp_path / str(seed)
        single = ppo_gpu_batched.train(ppo_gpu_batched.Args(**size, seed=seed, out=str(out)))
        start = torch.nn.utils.parameters_to_vector(fresh(size, seed).parameters())
        ours, theirs = (torch.nn.utils.parameters_to_vector(a.parameters()) for a in (agent, single))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
        assert (theirs - start).abs().max() > 5e-3
        ours, theirs = metrics(tmp_path / "all" / f"seed{seed}"), metrics(out)
        for one, other in zip(ours, theirs, strict=True):
            for key in set(one) - {"sps", "seconds"}:
                expected = other[key] if other[key] is None else pytest.approx(other[key], rel=1e-2, abs=1e-4)
                assert one[key] == expected, key


def fresh(size, seed):
    """The single script's agent before training."""
    args = ppo_gpu_batched.Args(**size)
    with initial_weights(seed):
        return ppo_gpu_batched.Agent(script.make_env(args.env_id), args)


def test_target_kl_masks_each_seed_by_itself(tmp_path):
    """One seed skips two epochs and the other none, by Adam's count of steps, as each does alone. Fails with
    the mean of the seeds' KL compared to --target-kl, and with the mask left on."""
    size = {**SMALL, "target_kl": 3e-4, "update_epochs": 3, "total_timesteps": 4 * 128}
    train(tmp_path / "all", seeds=(5, 3), **size)
    steps = load(tmp_path / "all")["state"]["memory"]["adam_step"].flatten().tolist()
    alone = []
    for seed in (5, 3):
        out = tmp_path / str(seed)
        ppo_gpu_batched.train(ppo_gpu_batched.Args(**size, seed=seed, out=str(out)))
        alone.append(load(out)["state"]["memory"]["adam_step"].item())
    assert steps == alone and alone[0] != alone[1]


@pytest.mark.parametrize("flags", CASES.values(), ids=CASES)
def test_a_seed_is_the_same_bytes_in_any_company(tmp_path, flags):
    """In another row, beside other seeds: its checkpoint and its metrics. Fails with one stream for all
    seeds, with a mean over seeds in the gradient's norm, and with the companions in its checkpoint."""
    train(tmp_path / "one", seeds=(4, 0, 7), **flags)
    train(tmp_path / "other", seeds=(1, 9, 4), **flags)
    assert checkpoint(tmp_path / "one/seed4") == checkpoint(tmp_path / "other/seed4")
    assert timeless(tmp_path / "one/seed4") == timeless(tmp_path / "other/seed4")
    assert checkpoint(tmp_path / "one/seed4") != checkpoint(tmp_path / "one/seed0")


def poison(monkeypatch, name, at, row):
    """In iteration `at` a number of one row becomes NaN, before the iteration's metrics are written."""
    original = script.end_iteration
    calls = []

    def poisoned(parameters, memory):
        calls.append(1)
        if len(calls) == at:
            {"loss": memory.losses, "parameter": parameters, "observation": memory.obs}[name][row] = torch.nan
        original(parameters, memory)

    monkeypatch.setattr(script, "end_iteration", poisoned)


@pytest.mark.parametrize("name", ["loss", "parameter", "observation"])
def test_a_seed_that_is_no_number_ends_alone(monkeypatch, tmp_path, capsys, name):
    """It is named with its iteration and its last good checkpoint stays; the others end in the bytes that
    they have without it, also where the run is resumed. Fails with the check left out for any of the three,
    with a NaN that reaches another row, and with `ended` left out of the checkpoint."""
    train(tmp_path / "clean")
    poison(monkeypatch, name, at=5, row=1)
    interrupt(monkeypatch, script, "prepare", 9)
    with pytest.raises(SystemExit):
        train(tmp_path / "hurt", checkpoint_every=2)
    monkeypatch.undo()
    said = f"seed 1 ends here, iteration 5: the {name} is not finite; the checkpoint of iteration 4 stays"
    assert said in capsys.readouterr().out
    resume(tmp_path / "hurt")
    out = capsys.readouterr().out
    assert "seed 1 has ended" in out and "seed 1 is not among them: iteration 5" in out
    for seed in (0, 2):
        assert checkpoint(tmp_path / f"hurt/seed{seed}") == checkpoint(tmp_path / f"clean/seed{seed}")
        assert timeless(tmp_path / f"hurt/seed{seed}") == timeless(tmp_path / f"clean/seed{seed}")
    assert load(tmp_path / "hurt/seed1")["iteration"] == len(metrics(tmp_path / "hurt/seed1")) == 4
    assert not (tmp_path / "hurt/seed1/summary.json").exists()
    assert all(
        line["seeds"] == ([0, 1, 2] if line["iteration"] < 5 else [0, 2])
        for line in metrics(tmp_path / "hurt")
    )
    assert json.loads((tmp_path / "hurt/summary.json").read_text())["ended"].keys() == {"1"}


def test_when_no_seed_is_left_the_run_stops(monkeypatch, tmp_path, capsys):
    """With exit status 1. Fails with a mean of nothing."""
    poison(monkeypatch, "parameter", at=2, row=slice(None))
    with pytest.raises(NonFinite, match="no seed is left"):
        train(tmp_path, checkpoint_every=1)
    assert load(tmp_path)["iteration"] == 1
    with pytest.raises(SystemExit) as stop, command_line():
        raise NonFinite("no seed is left")
    assert stop.value.code == 1


def resume(folder, **changes):
    free = {"resume": str(folder), "rerun": False, "eval_episodes": 0, "log_every": 7}
    script.train(saved_args(script.Args, load(folder), **{**free, **changes}))


@pytest.mark.parametrize("flags", CASES.values(), ids=CASES)
def test_cut_and_resumed_is_the_same_bytes(monkeypatch, tmp_path, capsys, flags):
    """Cut by Ctrl-C: the line that it prints resumes all seeds. Fails with a lane's episode, a stream or
    Adam's state left out of the checkpoint, and with a seed's metrics not cut back or begun anew."""
    train(tmp_path / "whole", **flags)
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        interrupt(patch, script, "prepare", 5)
        train(tmp_path / "cut", **flags)
    assert stop.value.code == 130 and load(tmp_path / "cut")["iteration"] == 5
    resumes = f"resume   python -m variants.ppo_seeds --resume {tmp_path / 'cut'}"
    assert resumes in capsys.readouterr().out.splitlines()
    for seed in (0, 1, 2):  # what a kill between a line and a checkpoint leaves
        with (tmp_path / f"cut/seed{seed}/metrics.jsonl").open("a") as file:
            file.write('{"iteration": 6}\n{"iter')
    resume(tmp_path / "cut")
    for name in ("", "seed0", "seed1", "seed2"):
        assert checkpoint(tmp_path / "whole" / name) == checkpoint(tmp_path / "cut" / name)
        assert timeless(tmp_path / "whole" / name) == timeless(tmp_path / "cut" / name)


@pytest.mark.parametrize("flags", CASES.values(), ids=CASES)
def test_a_captured_run_ends_in_the_bytes_of_an_eager_one(monkeypatch, tmp_path, flags):
    """Every function of 10 iterations replayed from its tape. Fails with the learning rate taken from `args`
    in the update, with Adam's moments rebound, and with the slot of the metrics a Python number."""
    train(tmp_path / "eager", cuda_graph=False, **flags)
    captured = []
    monkeypatch.setattr(script, "capture", lambda f, _: captured.append(emulated(f)) or captured[-1])
    train(tmp_path / "captured", **flags)
    assert len(captured) == 5 and json.loads((tmp_path / "captured/summary.json").read_text())["captured"]
    for name in ("", "seed1"):
        assert checkpoint(tmp_path / "eager" / name) == checkpoint(tmp_path / "captured" / name)
        assert timeless(tmp_path / "eager" / name) == timeless(tmp_path / "captured" / name)


def test_the_folders_are_runs(tmp_path, monkeypatch, capsys):
    """Compared as one row of three seeds from above or by name, evaluated and exported one by one. Fails with
    the mean taken for a run, with `seeds` among the args of one, and with an evaluation of other weights."""
    monkeypatch.chdir(tmp_path)
    train("runs/all", eval_episodes=2)
    table = capsys.readouterr().out
    for argument in ("runs", "runs/all", "runs/*"):
        assert compare.main([argument, "--no-rerun"]) == 0
        row = capsys.readouterr().out.splitlines()[1].split()
        assert row[:3] == ["ppo_seeds", "CartPole-v1", "3"]
    summaries = [json.loads(open(f"runs/all/seed{s}/summary.json").read()) for s in (0, 1, 2)]
    scores = [summary["eval_return_mean"] for summary in summaries]
    lines = [line.split() for line in table.splitlines()]
    assert ["mean", f"{sum(scores) / 3:.1f}"] in [line[:2] for line in lines]
    middle = (0.25 * min(scores) + sorted(scores)[1] + 0.25 * max(scores)) / 1.5
    assert ["IQM", f"{middle:.1f}"] in [line[:2] for line in lines]
    for seed, summary in enumerate(summaries):
        assert summary["seed"] == summary["args"]["seed"] == seed and "seeds" not in summary["args"]
        folder = f"runs/all/seed{seed}"
        args = saved_args(script.Args, load(folder), eval_only=folder, eval_episodes=2)
        script.evaluate_only(args)
        assert json.loads(open(f"{folder}/eval.json").read())["eval_returns"] == summary["eval_returns"]
    agent, env, _, name = trained_agent("runs/all/seed1", "RUN")
    env.close()
    assert name == "ppo_seeds"
    assert torch.equal(agent.actor[0].weight, load("runs/all/seed1")["state"]["agent"]["actor.0.weight"])


def test_the_metrics_of_the_run_are_means_over_the_seeds(tmp_path):
    """And sums of episodes. Fails with a sum for a mean, and with a seed left out."""
    train(tmp_path)
    of_seeds = [metrics(tmp_path / f"seed{seed}") for seed in (0, 1, 2)]
    for mean, *lines in zip(metrics(tmp_path), *of_seeds, strict=True):
        assert mean["episodes"] == sum(line["episodes"] for line in lines)
        assert mean["entropy"] == pytest.approx(sum(line["entropy"] for line in lines) / 3)
        assert mean["global_step"] == 128 * mean["iteration"] and mean["seeds"] == [0, 1, 2]


def test_the_overlay_of_the_seeds_is_recorded(tmp_path, capsys):
    """Fails with no recording, and with one of its own for each seed."""
    pytest.importorskip("rerun")
    train(tmp_path / "run", rerun=True)
    assert (tmp_path / "run/recording.rrd").read_bytes()[:4] == b"RRF2"
    assert f"overlay  python -m rerun {tmp_path / 'run/recording.rrd'}" in capsys.readouterr().out
    assert not (tmp_path / "run/seed0/recording.rrd").exists()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"seeds": []}, "--seeds takes different numbers of 0 or more: give 0$"),
        ({"seeds": [3, 3, 1]}, "--seeds takes different numbers of 0 or more: give 3 1$"),
        ({"seeds": [-1, 2]}, "--seeds takes different numbers of 0 or more: give 2$"),
        ({"env_id": "Hopper-v5"}, "--env-id Hopper-v5 has no batched form: choose one of .*Pendulum-v1"),
        ({"num_minibatches": 3}, "--num-minibatches 3 does not divide 128 rows: 1 does"),
        ({"num_minibatches": 128}, "--no-norm-adv"),
        ({"total_timesteps": 10}, "--total-timesteps 10 is less than one rollout: give 128"),
        ({"threads": 0}, "--threads 0"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, flags, named):
    """Fails with the check of each left out."""
    with pytest.raises(Refusal, match=named):
        train(tmp_path / "run", **flags)
    assert not (tmp_path / "run").exists()


def test_what_does_not_go_with_the_folder_is_refused(tmp_path):
    """One seed resumed, all evaluated or exported at once, other seeds beside --resume, metrics that are
    gone. Fails with each check left out, which ends in a KeyError or in a wrong mean."""
    train(tmp_path)
    one = tmp_path / "seed1"
    with pytest.raises(
        Refusal, match=f"--resume {one} is one seed of several: give {tmp_path}, which holds all"
    ):
        resume(one)
    several = saved_args(script.Args, load(tmp_path), eval_only=str(tmp_path))
    with pytest.raises(
        Refusal, match=f"--eval-only {tmp_path} holds several seeds, each a run: give .*/seed0"
    ):
        script.evaluate_only(several)
    with pytest.raises(Refusal, match=r"RUN .* holds several seeds"):
        trained_agent(str(tmp_path), "RUN")
    with pytest.raises(Refusal, match="--resume takes --seeds from the saved run"):
        resume(tmp_path, seeds=[0, 1])
    (one / "metrics.jsonl").write_text("")
    with pytest.raises(Refusal, match=r"seed1/metrics\.jsonl does not reach its checkpoint"):
        resume(tmp_path)


def test_the_command_line(tmp_path, monkeypatch, capsys):
    """--seeds takes several numbers and comes back from a checkpoint. Fails with a tuple for the list, which
    a checkpoint gives back as another type, and with `--seed` in the line to ablate."""
    flags = "--no-rerun --seeds 4 2 --total-timesteps 256 --num-envs 8 --num-steps 16 --eval-episodes 1"
    flags += " --threads 1"
    monkeypatch.setattr("sys.argv", ["ppo_seeds.py", *flags.split(), "--out", str(tmp_path / "run")])
    args = parse_args(script.Args, script.SCRIPT, script.__doc__)
    script.train(args)
    out = capsys.readouterr().out
    assert "ppo_seeds  CartPole-v1  2 seeds  cpu" in out
    assert "ablate   python -m variants.ppo_seeds --seeds 4 2 --total-timesteps 256 --num-envs 8" in out
    assert command("ppo_seeds", args).startswith("python -m variants.ppo_seeds --seeds 4 2 --")
    assert all(
        len(line) <= 80 for line in out.splitlines() if "python " not in line and str(tmp_path) not in line
    )
    monkeypatch.setattr("sys.argv", ["ppo_seeds.py", "--resume", str(tmp_path / "run")])
    assert parse_args(script.Args, script.SCRIPT, script.__doc__).seeds == [4, 2]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["ppo_seeds.py", *flags.split()])
    script.train(parse_args(script.Args, script.SCRIPT, script.__doc__))
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("ppo_seeds_CartPole-v1_2seeds_")
    assert [len(read_metrics(folder / name)) for name in ("", "seed4", "seed2")] == [2, 2, 2]


@pytest.mark.slow
def test_a_compiled_run_learns_the_same(tmp_path):
    """To tolerance. Fails with the next observation written by the compiled step: its row interleaves with
    the one that is read, and lands elsewhere."""
    size = {"total_timesteps": 3 * 128}
    eager, compiled = (train(tmp_path / str(c), compile=c, **size) for c in (False, True))
    for one, other in zip(eager.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-3)
