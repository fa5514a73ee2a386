"""common/export.py: the file of a policy does what the policy does in an evaluation."""

import importlib
import re
import sys

import numpy as np
import pytest
import torch

from common.cli import CannotWrite, Refusal
from common.envs import make_env
from common.export import export, load, main
from tests.conftest import ROOT, tiny_args

extras = pytest.mark.extras  # the extra `export`
PROBES = "tests.envs_for_tests"


def trained(script, folder, **changes):
    module = importlib.import_module(script)
    return module.train(tiny_args(module, folder, **{"eval_episodes": 0, "total_timesteps": 128, **changes}))


def session_of(folder):
    import onnxruntime

    export(str(folder), folder / "policy.onnx")
    return onnxruntime.InferenceSession(str(folder / "policy.onnx"))


@extras
@pytest.mark.parametrize(
    "script, changes",
    [
        ("ppo_continuous", {"norm_obs": True, "log_std_init": 1.0}),
        ("ppo_continuous", {"squash": True, "env_id": "Pendulum-v1"}),
        ("ppo_discrete", {"norm_obs": True}),
        ("ppo_discrete", {"env_id": f"{PROBES}:ProbeSpaces-v0", "env_kwargs": '{"action": "multidiscrete"}'}),
        ("ppo_discrete", {"env_id": f"{PROBES}:ProbeMasked-v0", "mask_actions": True}),
        ("a2c", {"env_id": "Pendulum-v1"}),
        ("ppo_gpu_batched", {"env_id": "Pendulum-v1", "norm_obs": True}),
        ("variants.ppo_imitation", {"env_id": "CartPole-v1"}),
        (
            "variants.ppo_robot",
            {"env_id": "CartPoleContinuousNoVelocity-v0", "frame_stack": 2, "action_history": 1},
        ),
        ("variants.ppo_robot", {"env_id": "SetPoint-v0", "actor": "pid", "norm_obs": True, "base_gain": 0.1}),
        ("variants.ppo_pixels", {"frame_stack": 2}),
    ],
)
def test_the_file_acts_as_the_policy_does(tmp_path, capsys, script, changes):
    """1,000 observations at once, most of them wild. Fails with the clip, the squashing, the normalisation or
    the mask left out."""
    agent = trained(script, tmp_path, **changes)
    for p in agent.parameters():  # so that actions differ, and many lie outside of the bounds
        p.data += 0.5 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    checkpoint["state"]["agent"] = agent.state_dict()
    torch.save(checkpoint, tmp_path / "checkpoint.pt")
    session = session_of(tmp_path)
    assert "policy.onnx: obs -> action" in capsys.readouterr().out
    (obs_like,) = load(str(tmp_path))[1]
    generator = torch.Generator().manual_seed(1)
    obs = 3 * torch.randn(1000, *obs_like.shape[1:], generator=generator)
    if obs_like.dtype == torch.uint8:
        obs = (obs.abs() * 80).clamp(max=255).to(torch.uint8)
    if "mask_actions" in changes:
        obs[:, -4:] = (torch.arange(4) % 2).float()
    (action,) = session.run(["action"], {"obs": obs.numpy()})
    with torch.no_grad():
        expected = agent.env_action(agent.best(obs))
    assert action.shape == expected.shape and np.abs(action - expected).max() <= 1e-5
    assert len(np.unique(expected)) > 1


@extras
@pytest.mark.parametrize("memory", ["none", "gru", "lstm", "transformer", "mamba"])
def test_a_memory_goes_in_and_comes_out(tmp_path, memory):
    """40 steps of an episode, the state handed on. Fails with a state that is not given back, and with the
    critic's for the actor's."""
    agent = trained("variants.ppo_memory", tmp_path, memory=memory, memory_size=8, bptt_length=8)
    session = session_of(tmp_path)
    names = [x.name for x in session.get_inputs()[1:]]
    assert names == [f"state_{i}" for i in range(len(agent.initial(1)[0]))]
    _, (_, *zeros) = load(str(tmp_path))
    held, state = [x.numpy() for x in zeros], agent.initial(1)[:1]
    no_start, generator = torch.zeros(1, dtype=torch.bool), torch.Generator().manual_seed(0)
    for _ in range(40):
        obs = torch.randn(1, 2, generator=generator)
        with torch.no_grad():
            output, state = agent.step(state, obs, no_start)
        action, *held = session.run(None, {"obs": obs.numpy(), **dict(zip(names, held, strict=True))})
        assert action.tolist() == agent.best(output).tolist()
        for one, other in zip(held, state[0], strict=True):
            np.testing.assert_allclose(one, other.numpy(), rtol=0, atol=1e-5)


@extras
def test_the_lines_of_the_readme_drive_an_environment(tmp_path, monkeypatch, capsys):
    """The score is that of the policy in the same episode. Fails with other names of inputs or outputs."""
    agent = trained("ppo_discrete", tmp_path / "run", total_timesteps=4096)
    monkeypatch.chdir(tmp_path)
    main([str(tmp_path / "run")])
    capsys.readouterr()
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    exec(block, {})
    with make_env("CartPole-v1") as env:
        obs, _ = env.env.reset(seed=0)
        score, done = 0.0, False
        while not done:
            with torch.no_grad():
                action = agent.best(torch.tensor(obs[None]))
            obs, reward, terminated, truncated, _ = env.env.step(int(action))
            score, done = score + reward, terminated or truncated
    assert float(capsys.readouterr().out) == score


@extras
def test_a_file_that_cannot_be_written_is_said(tmp_path):
    """Fails with a traceback."""
    trained("ppo_discrete", tmp_path)
    with pytest.raises(CannotWrite, match="nothing was exported"):
        export(str(tmp_path), tmp_path / "nowhere" / "policy.onnx")


def test_without_the_extra_or_a_run_it_is_one_sentence(tmp_path, monkeypatch, capsys):
    """Fails with an ImportError, and with a traceback for a folder without a run."""
    monkeypatch.setattr("common.export.PACKAGES", ("no_such_package",))
    with pytest.raises(Refusal, match=r'no_such_package must be installed: pip install -e "\.\[export\]"'):
        export(str(tmp_path), tmp_path / "policy.onnx")
    monkeypatch.setattr("common.export.PACKAGES", ())
    monkeypatch.setattr(sys, "argv", ["export"])
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path)])
    assert stop.value.code == 2 and "has no checkpoint.pt" in capsys.readouterr().err
