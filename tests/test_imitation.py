"""variants/ppo_imitation.py and common/demonstrations.py: what the learned reward is, what the discriminator
is shown, what cloning reaches, and which files are refused."""

import json
import math
import shlex

import numpy as np
import pytest
import torch

import ppo_discrete
import variants.ppo_imitation as script
from common.cli import Refusal
from common.demonstrations import Demonstrations, read, record, scripted, write
from common.envs import make_env
from common.envs.experts import EXPERTS
from common.recording import shown_plots
from common.seeding import RandomStream
from tests.conftest import load, metrics, tiny_args
from tests.test_rollout import watch
from tests.test_run import cut, resumed


def args_for(out, **changes):
    return tiny_args(script, out, **{"eval_episodes": 0, "total_timesteps": 3 * 2 * 32, **changes})


# The reward and the discriminator


def test_the_learned_rewards_are_those_of_their_papers():
    """Against D itself in float64, and finite where 1 - D rounds to 0. Fails with log D for -log(1 - D), with
    the sign of the logit lost, and with log(1 - sigmoid(logit))."""
    logit = torch.linspace(-20, 20, 41, dtype=torch.float64)
    D = torch.sigmoid(logit)
    torch.testing.assert_close(script.learned_reward(logit, "gail"), -torch.log(1 - D), rtol=0, atol=1e-6)
    expected = torch.log(D) - torch.log(1 - D)
    torch.testing.assert_close(script.learned_reward(logit, "logit"), expected, rtol=0, atol=1e-6)
    assert script.learned_reward(torch.tensor(200.0), "gail") == 200
    assert (script.learned_reward(logit, "gail") > 0).all()


def trained_discriminator(expert, policy, updates=300):
    torch.manual_seed(0)
    discriminator = script.Discriminator(expert)
    optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
    draw = RandomStream(0, "discriminator")
    return discriminator, script.update_discriminator(discriminator, optimizer, expert, policy, draw, updates)


def test_the_discriminator_tells_apart_what_differs_and_nothing_else():
    """Fails with the labels exchanged, and with halves of other sizes."""
    rows = torch.randn(400, 3, generator=torch.Generator().manual_seed(0))
    other = torch.randn(400, 3, generator=torch.Generator().manual_seed(1))
    discriminator, losses = trained_discriminator(rows + 2.0, rows - 2.0)
    assert losses["discriminator_accuracy"] > 0.98 and losses["discriminator_loss"] < 0.2
    assert discriminator(rows + 2.0).mean() > 0 > discriminator(rows - 2.0).mean()
    discriminator, losses = trained_discriminator(rows, other, updates=50)
    assert losses["discriminator_accuracy"] == pytest.approx(0.5, abs=0.05)
    assert losses["discriminator_loss"] == pytest.approx(math.log(2), abs=0.03)


@pytest.mark.parametrize("many", [5, 1000])
def test_batches_are_half_and_half(monkeypatch, many):
    """However many demonstrations there are. Fails with all of the expert's rows in a batch, and with rows
    beyond the end or always the same."""
    expert, policy = torch.arange(float(many))[:, None].repeat(1, 2), -torch.ones(64, 2)
    seen = []
    monkeypatch.setattr(script.Discriminator, "forward", lambda self, x: seen.append(x) or self.net(x)[:, 0])
    trained_discriminator(expert, policy, updates=2)
    for rows in seen:
        assert len(rows) == 128 and (rows[64:] == -1).all() and (rows[:64] >= 0).all()
    drawn = [set(rows[:64, 0].tolist()) for rows in seen]
    assert drawn[0] != drawn[1] if many > 64 else drawn[0] == set(range(5))


def test_inputs_are_standardised_by_the_demonstrations():
    """Fails with the policy's statistics, and with a division by 0 for a constant."""
    expert = torch.cat([5 + 3 * torch.randn(1000, 2), torch.ones(1000, 1)], 1)
    discriminator = script.Discriminator(expert)
    inputs = []
    discriminator.net[0].forward = lambda x: inputs.append(x) or torch.zeros(*x.shape[:-1], 32)
    discriminator(expert)
    torch.testing.assert_close(inputs[0].mean(0), torch.zeros(3), rtol=0, atol=1e-4)
    torch.testing.assert_close(inputs[0].std(0), torch.tensor([1.0, 1.0, 0.0]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "CartPole-v1"])
def test_what_is_judged_is_the_action_that_was_run(tmp_path, monkeypatch, env_id):
    """Within the bounds on both sides, or one-hot, and the very ones that the environments were given. Fails
    with the sampled action, which a wide Gaussian puts outside."""
    calls, rollouts = watch(monkeypatch, script, "judged"), watch(monkeypatch, script, "collect_rollout")
    agent = script.train(args_for(tmp_path, env_id=env_id, log_std_init=2.0, num_minibatches=2))
    expert, *policy = (result for _, result, _ in calls)
    rollout = rollouts[0][1][0]
    if agent.discrete:
        assert torch.equal(policy[0][..., -2:], torch.eye(2)[rollout.action])
        assert set(expert[:, -2:].sum(1).tolist()) == {1.0}
    else:
        assert rollout.action.abs().max() > 2.5
        assert torch.equal(policy[0][..., -1:], torch.as_tensor(agent.env_action(rollout.action)))
        assert expert[:, -1].abs().max() <= 2 and policy[0][..., -1].abs().max() == 2


@pytest.mark.parametrize("kind", ["gail", "logit", "env"])
def test_the_reward_is_the_old_discriminators_and_the_score_the_environments(tmp_path, monkeypatch, kind):
    """The rollout is judged before the discriminator learns from it. Fails with the discriminator's step
    first, and with the learned reward shown as a return."""
    order, states = [], []
    update, step = script.update, script.update_discriminator

    def updating(*arguments):
        order.append("policy")
        return update(*arguments)

    def stepping(discriminator, *arguments):
        order.append("discriminator")
        states.append({name: x.clone() for name, x in discriminator.state_dict().items()})
        return step(discriminator, *arguments)

    monkeypatch.setattr(script, "update", updating)
    monkeypatch.setattr(script, "update_discriminator", stepping)
    gae, rollouts = watch(monkeypatch, script, "compute_gae"), watch(monkeypatch, script, "collect_rollout")
    calls = watch(monkeypatch, script, "judged")
    script.train(args_for(tmp_path, reward=kind, num_envs=1, num_steps=200, total_timesteps=400))
    assert order == ["policy", "discriminator"] * 2
    for i, line in enumerate(metrics(tmp_path)):
        (rollout, finished), rewards = rollouts[i][1], gae[i][0][0]
        discriminator = script.Discriminator(calls[0][1])
        discriminator.load_state_dict(states[i])
        with torch.no_grad():
            learned = script.learned_reward(discriminator(calls[1 + i][1]), kind)
        assert torch.equal(rewards, rollout.reward if kind == "env" else learned)
        assert line["episodic_return"] == finished[0][0] and line["episodic_return"] < -100
        assert line["learned_reward"] == pytest.approx(rewards.mean().item())


def test_the_discriminators_curves_are_shown(tmp_path):
    """Fails with a metric that the recording does not lay out."""
    script.train(args_for(tmp_path, total_timesteps=64))
    curves = {"learned_reward", "discriminator_accuracy", "discriminator_loss"}
    assert curves <= set(shown_plots(set(metrics(tmp_path)[0])))


# Cloning


@pytest.mark.parametrize("env_id, error", [("CartPoleContinuous-v0", 0.1), ("CartPole-v1", 0.1)])
def test_cloning_reaches_the_experts_actions_where_the_expert_was(tmp_path, env_id, error):
    """Mean error of the action, or share of wrong ones. Fails with the critic trained for the actor, and with
    gradients that add up."""
    agent = script.train(args_for(tmp_path, env_id=env_id, pretrain_epochs=40, total_timesteps=0))
    demos, _ = scripted(env_id, "{}", 0, 5)
    with torch.no_grad():
        action = agent.best(demos.obs)
    assert (action - demos.action).abs().float().mean() < error
    if not agent.discrete:
        assert (agent.log_std == 0).all()  # back where it began


def test_the_standard_deviation_has_a_floor_while_cloning(tmp_path, monkeypatch):
    """Fails with a maximum of the likelihood at a standard deviation of nothing."""
    least = []
    original = script.Agent.log_prob_entropy
    monkeypatch.setattr(
        script.Agent,
        "log_prob_entropy",
        lambda self, *x: least.append(self.log_std.min().item()) or original(self, *x),
    )
    flags = {"env_id": "CartPoleContinuous-v0", "pretrain_epochs": 20, "log_std_init": -0.75}
    agent = script.train(args_for(tmp_path, total_timesteps=0, **flags))
    assert min(least) == -1.0 and agent.log_std.tolist() == [-0.75]


def test_cloning_alone_leaves_a_whole_run(tmp_path, capsys):
    """No iteration, an evaluation and a checkpoint that plays it again. Fails with a summary of the last line
    of no metrics."""
    flags = {"pretrain_epochs": 1, "total_timesteps": 0, "eval_episodes": 2}
    script.train(args_for(tmp_path, **flags))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["global_step"] == summary["iterations"] == 0 and len(summary["eval_returns"]) == 2
    saved = load(tmp_path)["args"]
    script.evaluate_only(script.Args(**saved, eval_episodes=2, eval_only=str(tmp_path)))
    assert json.loads((tmp_path / "eval.json").read_text())["eval_returns"] == summary["eval_returns"]
    script.train(resumed(script, tmp_path, eval_episodes=0))
    assert "is finished" in capsys.readouterr().out


def test_broken_demonstrations_have_the_same_actions_elsewhere(tmp_path, monkeypatch):
    """Fails with --break-demos without effect, and with observations that move along."""
    seen = {}
    for broken in (False, True):
        calls = watch(monkeypatch, script, "judged")
        script.train(args_for(tmp_path / str(broken), break_demos=broken, total_timesteps=64))
        seen[broken] = calls[0][1]
        monkeypatch.undo()
    assert torch.equal(seen[True][:, :3], seen[False][:, :3])
    assert not torch.equal(seen[True][:, 3], seen[False][:, 3])
    assert torch.equal(seen[True][:, 3].sort()[0], seen[False][:, 3].sort()[0])


# Demonstrations


@pytest.mark.parametrize("env_id", EXPERTS)
def test_the_scripted_experts_are_experts(env_id):
    """Fails with a sign turned in one of them."""
    demos, returns = scripted(env_id, "{}", 1, 20)
    assert demos.starts.sum() == 20
    mean = sum(returns) / 20
    assert mean > -160 if env_id == "Pendulum-v1" else mean == 500


@pytest.mark.parametrize("module", [script, ppo_discrete], ids=["scripted", "run"])
def test_what_is_recorded_is_read_again(tmp_path, monkeypatch, capsys, module):
    """Every step's action leads from its obs to the next. Fails with the action before it is clipped, with
    starts one step late, and with the episode's last step left out."""
    monkeypatch.chdir(tmp_path)
    if module is script:
        env_id, run = "Pendulum-v1", "scripted"
        path = tmp_path / "demos.npz"
    else:
        env_id, run = "CartPole-v1", str(tmp_path / "run")
        module.train(tiny_args(module, tmp_path / "run", eval_episodes=0))
        path = tmp_path / "run/demos.npz"
    record(run, 3, env_id, "{}", 7)
    assert f"{len(np.load(path)['obs']):,} steps" in capsys.readouterr().out
    with make_env(env_id, "{}", 7, stream="demo") as env:
        demos = read(str(path), env, 3)
        for obs, action, start in zip(*demos, strict=True):
            if start:
                env.reset()
            assert np.array_equal(env.obs, obs.numpy())
            _, _, terminated, truncated, _ = env.step(action.numpy())
        assert terminated or truncated
        assert len(read(str(path), env, 1).obs) < len(demos.obs) and read(str(path), env, 1).starts.sum() == 1


def a_file(path, **changes):
    rows = {
        "obs": np.zeros((6, 3), np.float32),
        "action": np.zeros((6, 1), np.float32),
        "starts": np.arange(6) % 3 == 0,
    }
    np.savez(path, **{name: x for name, x in {**rows, **changes}.items() if x is not None})
    return str(path)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"obs": np.zeros((6, 4), np.float32)}, r"has obs \[6, 4\], and Pendulum-v1 observes \[n, 3\]"),
        ({"action": np.zeros((6, 2), np.float32)}, r"has action \[6, 2\] .* needs \[6, 1\] and \[6\]"),
        ({"starts": np.ones(5, bool)}, r"starts \[5\]"),
        ({"starts": None}, "it needs obs, action and starts"),
        ({"obs": np.full((6, 3), np.nan, np.float32)}, "holds NaN or infinity"),
        ({"action": np.full((6, 1), 2.5, np.float32)}, "holds actions that are outside those of Pendulum-v1"),
        ({"starts": np.zeros(6, bool)}, "its first step is no episode's first"),
        (
            {"obs": np.zeros((0, 3), np.float32), "action": np.zeros((0, 1)), "starts": np.zeros(0, bool)},
            "first",
        ),
        ({"starts": np.arange(6) == 0}, "holds 1 episodes: give --demo-episodes 1 or fewer"),
        ({"obs": np.array([None] * 6)}, "cannot be read as an .npz"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_in_one_sentence(tmp_path, changes, sentence):
    """Fails with each check left out."""
    path = a_file(tmp_path / "demos.npz", **changes)
    with pytest.raises(Refusal, match=sentence):
        script.train(args_for(tmp_path / "run", demos=path, demo_episodes=2))
    assert not (tmp_path / "run").exists()


def test_what_is_no_file_of_demonstrations_is_refused(tmp_path):
    """Fails with a traceback for text, and for a file that is not there."""
    (tmp_path / "text.npz").write_text("hello")
    for name in ("text.npz", "nowhere.npz"):
        with pytest.raises(Refusal, match=r"cannot be read as an \.npz"):
            script.train(args_for(tmp_path / "run", demos=str(tmp_path / name)))
    with pytest.raises(Refusal, match="--env-id Acrobot-v1 has no scripted expert, only Pendulum-v1"):
        script.train(args_for(tmp_path / "run", env_id="Acrobot-v1"))
    with pytest.raises(Refusal, match=r"--record .* has no checkpoint\.pt"):
        record(str(tmp_path), 1, "Pendulum-v1", "{}", 0)
    script.train(args_for(tmp_path / "imitated"))
    with pytest.raises(Refusal, match="--record takes a run of ppo_continuous, ppo_discrete, a2c"):
        record(str(tmp_path / "imitated"), 1, "Pendulum-v1", "{}", 0)


def test_discrete_actions_are_checked_too(tmp_path):
    """Fails with an index beyond the last action."""
    demos = Demonstrations(
        torch.zeros(6, 4), torch.tensor([0, 1, 2, 0, 1, 0]), torch.ones(6, dtype=torch.bool)
    )
    write(tmp_path / "demos.npz", demos)
    flags = {"env_id": "CartPole-v1", "demos": str(tmp_path / "demos.npz"), "demo_episodes": 6}
    with pytest.raises(Refusal, match="outside those of CartPole-v1"):
        script.train(args_for(tmp_path / "run", **flags))


# A run


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"pretrain_epochs": 2, "env_id": "CartPole-v1"},
        {"norm_obs": True, "norm_reward": True, "reward": "logit"},
    ],
    ids=shlex.join,
)
def test_cut_and_resumed_is_uninterrupted(tmp_path, flags):
    """With the discriminator and its optimizer. Fails with either left out of `state`, with the draws of the
    expert's rows, and with cloning done once more."""
    script.train(args_for(tmp_path / "whole", **flags))
    assert cut(script, args_for(tmp_path / "cut", **flags), at=2) == 130
    script.train(resumed(script, tmp_path / "cut", eval_episodes=0))
    one, other = ((tmp_path / name / "checkpoint.pt").read_bytes() for name in ("cut", "whole"))
    assert one == other


def test_a_run_does_not_go_on_with_other_demonstrations(tmp_path):
    """Fails with a resumed run whose discriminator is shown what it was not standardised for."""
    path = tmp_path / "demos.npz"
    write(path, scripted("Pendulum-v1", "{}", 0, 5)[0])
    assert cut(script, args_for(tmp_path / "run", demos=str(path)), at=2) == 130
    write(path, scripted("Pendulum-v1", "{}", 1, 5)[0])
    with pytest.raises(Exception, match=r"demos\.npz is not what it was when the run began"):
        script.train(resumed(script, tmp_path / "run"))


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"total_timesteps": 0}, "--total-timesteps 0 is cloning alone: give --pretrain-epochs 1 or more"),
        ({"total_timesteps": 63}, "--total-timesteps 63 is less than one rollout: give 64 or more"),
        ({"demo_episodes": 0}, "--demo-episodes 0"),
        ({"pretrain_epochs": -1}, "--pretrain-epochs -1"),
        ({"discriminator_updates": -1}, "--discriminator-updates -1"),
        ({"num_minibatches": 3}, "--num-minibatches 3 does not divide 64 rows"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, changes, sentence):
    """Fails with the check left out."""
    with pytest.raises(Refusal, match=sentence):
        script.train(args_for(tmp_path, **changes))


def test_a_frozen_discriminator_stays_as_it_began(tmp_path):
    """Fails with --discriminator-updates 0 without effect."""
    script.train(args_for(tmp_path, discriminator_updates=0, checkpoint_every=1))
    state = load(tmp_path)["state"]
    assert metrics(tmp_path)[-1]["discriminator_loss"] is None
    assert state["discriminator_optimizer"]["state"] == {}
