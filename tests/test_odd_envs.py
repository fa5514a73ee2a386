"""An environment is a stranger: what is odd about it and legal changes nothing, and what goes wrong in it is
said with what stays of the run."""

import json
import signal

import pytest
import torch

import ppo_continuous
from common.cli import EnvironmentFailed, Refusal
from common.envs import FlatEnv, make_env
from tests import odd_envs
from tests.conftest import load, tiny_args
from tests.envs_for_tests import has_discrete_actions
from tests.odd_envs import ALIKE, OPEN


@pytest.fixture(autouse=True)
def nothing_stays_open():
    OPEN.clear()
    odd_envs.Raises.resets = 0
    yield
    assert OPEN == []


def odd_args(script, out, name="Point", **changes):
    kwargs = {"discrete": has_discrete_actions(script), **changes.pop("env_kwargs", {})}
    return tiny_args(script, out, env_id=f"Odd{name}-v0", env_kwargs=json.dumps(kwargs), **changes)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """What the agent holds after training on the plain environment. One script shows it for all: what returns
    from an environment is FlatEnv's to take; what each script does itself, closing, is tested below."""
    OPEN.clear()
    folder = tmp_path_factory.mktemp("plain")
    ppo_continuous.train(odd_args(ppo_continuous, folder, eval_episodes=0))
    return load(folder)["state"]["agent"]


@pytest.mark.parametrize("odd", ALIKE, ids=lambda cls: cls.__name__)
def test_what_is_odd_and_legal_trains_to_the_same_weights(plain, odd, tmp_path, capsys):
    """Fails, each for an environment of its own: with what was returned kept and not copied; with torch given
    another byte order or a negative stride; with seeds of 32 bits; with an array taken for a truth value;
    with the environment's copy of an action kept for the replay; and (nothing_stays_open) with one not closed
    or closed twice."""
    ppo_continuous.train(odd_args(ppo_continuous, tmp_path, odd.__name__, eval_episodes=1))
    for name, weight in load(tmp_path)["state"]["agent"].items():
        assert torch.equal(weight, plain[name]), name
    assert "closing" not in capsys.readouterr().out


@pytest.mark.parametrize("odd", ["SharedBuffer", "OtherBytes"])
def test_an_odd_environment_comes_back_by_replay(odd, tmp_path, capsys):
    """Fails with the raw observation kept as it was returned."""
    script = ppo_continuous
    script.train(odd_args(script, tmp_path / "whole", odd))
    script.train(odd_args(script, tmp_path / "cut", odd, total_timesteps=3 * 64, anneal_lr=False))
    capsys.readouterr()
    script.train(script.Args(resume=str(tmp_path / "cut"), **{
        k: v for k, v in vars(odd_args(script, None, odd, total_timesteps=4 * 64, anneal_lr=False)).items()
        if k not in ("resume", "out")
    }))  # fmt: skip
    assert "did not come back" not in capsys.readouterr().out


def test_one_instance_at_a_time_is_enough(script, tmp_path):
    """Fails with the environment that the flags are checked on left open, and with the training's left open
    during the evaluation."""
    args = odd_args(script, tmp_path, "OneAtATime", num_envs=1, num_steps=64)
    agent = script.train(args)
    assert len(script.evaluate(agent, args)[0]) == 2
    script.evaluate_only(script.Args(**{**vars(args), "out": None, "eval_only": str(tmp_path)}))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("squash", [False, True])
def test_actions_lie_in_the_space_in_its_own_dtype(dtype, squash, tmp_path):
    """Fails with bounds of float32, which are those of another space."""
    args = tiny_args(
        ppo_continuous, tmp_path, env_id="OddStrictBounds-v0", env_kwargs=json.dumps({"dtype": dtype}),
        squash=squash, log_std_init=1.0,
    )  # fmt: skip
    ppo_continuous.train(args)


@pytest.mark.parametrize(
    ("name", "said"), [("TwoRewards", r"a reward of shape \[2\]"), ("TooFew", "2 numbers as an observation")]
)
def test_what_a_script_cannot_take_is_said(script, name, said, tmp_path):
    """Fails with NumPy's own words about it."""
    with pytest.raises((Refusal, EnvironmentFailed), match=rf"--env-id Odd{name}-v0 returned {said}"):
        script.train(odd_args(script, tmp_path, name))


@pytest.mark.parametrize("at", [{"step": 3, "episode": 5}, {"step": 0, "episode": 5}])
def test_an_environment_that_raises_is_named(script, at, tmp_path):
    """Fails with the error passed on as it is, and with the checkpoint gone."""
    with pytest.raises(EnvironmentFailed) as stop:
        script.train(odd_args(script, tmp_path, "Raises", env_kwargs=at, eval_episodes=0))
    where = "step, step 3 of episode" if at["step"] else "reset, episode"
    assert f"raised in {where}" in str(stop.value) and "OSError: the simulator is gone" in str(stop.value)
    assert "environment " in str(stop.value) and (tmp_path / "checkpoint.pt").exists()


def test_all_are_closed_when_a_run_is_stopped(script, tmp_path, monkeypatch):
    """Fails (nothing_stays_open) without the closing in `finally`: both by Ctrl-C and by Ctrl-C twice."""
    step = odd_envs.Point.step

    def interrupted(self, action):
        if self.t == 5:
            signal.raise_signal(signal.SIGINT)
        return step(self, action)

    monkeypatch.setattr(odd_envs.Point, "step", interrupted)
    with pytest.raises(SystemExit) as stop:
        script.train(odd_args(script, tmp_path))
    assert stop.value.code == 130


def test_an_error_in_closing_costs_a_line_and_no_result(script, tmp_path, capsys):
    """Fails with the error let through: the training would be done and its summary not written."""
    script.train(odd_args(script, tmp_path, "CloseRaises"))
    assert json.loads((tmp_path / "summary.json").read_text())["eval_episodes"] == 2
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("closing ")]
    assert set(lines) == {"closing an environment raised OSError: the port is gone"}


def test_a_refused_kind_is_closed_too(tmp_path, monkeypatch):
    """Fails (nothing_stays_open) with the environment left open where FlatEnv refuses its spaces."""

    def refuse(self, *_):
        raise Refusal("no")

    monkeypatch.setattr(FlatEnv, "_check_observation", refuse)
    with pytest.raises(Refusal):
        make_env("OddPoint-v0")


def test_an_environment_that_cannot_render_is_evaluated_unrendered(script, tmp_path, capsys):
    """Fails with the refusal to be made with render_mode passed on, and with two lines of warning."""
    env = make_env("OddNoRenderArgument-v0", json.dumps({"discrete": False}), render=True)
    assert "unexpected keyword argument 'render_mode'" in env.unrendered
    env.close()
    script.train(odd_args(script, tmp_path, "NoRenderArgument", rerun=True))
    assert json.loads((tmp_path / "summary.json").read_text())["eval_episodes"] == 2
    lines = [line for line in capsys.readouterr().out.splitlines() if "not filmed" in line]
    assert len(lines) == 1 and "render_mode" in lines[0]
