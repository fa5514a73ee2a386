"""A2C is PPO with one epoch of one minibatch (Huang et al. 2022, arXiv:2205.09123)."""

import pytest
import torch

import a2c
import ppo_continuous
import ppo_discrete

SHARED = {
    "num_envs": 4, "num_steps": 16, "total_timesteps": 20 * 64, "gamma": 0.98, "gae_lambda": 0.9,
    "learning_rate": 3e-3, "ent_coef": 0.01, "vf_coef": 0.25, "max_grad_norm": 0.5, "optimizer": "rmsprop",
    "norm_adv": False, "eval_episodes": 0, "rerun": False, "seed": 3,
}  # fmt: skip
AS_A2C = {"update_epochs": 1, "num_minibatches": 1, "clip_vloss": False}
HEADS = [(ppo_discrete, "CartPole-v1"), (ppo_continuous, "CartPoleContinuous-v0")]


def parameters_after_each_update(monkeypatch, script, **flags):
    """The flat parameters after each iteration's update."""
    history = []
    original = script.update

    def update(agent, parameters, *rest):
        result = original(agent, parameters, *rest)
        history.append(parameters.detach().clone())
        return result

    with monkeypatch.context() as patch:
        patch.setattr(script, "update", update)
        script.train(script.Args(**SHARED, **flags))
    return history


@pytest.mark.parametrize("script, env_id, anneal_lr", [(*HEADS[0], True), (*HEADS[1], False)])
def test_ppo_with_one_epoch_of_one_minibatch_is_a2c(monkeypatch, tmp_path, script, env_id, anneal_lr):
    """Bitwise, with the rows left in order. Fails with the policy term's sign, the 1/2 of the value loss or
    RMSprop's eps changed in one of the two."""
    monkeypatch.setattr(torch, "randperm", lambda n, **_: torch.arange(n))
    flags = {"env_id": env_id, "anneal_lr": anneal_lr}
    ppo = parameters_after_each_update(monkeypatch, script, **flags, **AS_A2C, out=str(tmp_path / "ppo"))
    ours = parameters_after_each_update(monkeypatch, a2c, **flags, out=str(tmp_path / "a2c"))
    assert len(ppo) == len(ours) == 20
    for iteration, (a, b) in enumerate(zip(ppo, ours, strict=True), 1):
        assert torch.equal(a, b), f"iteration {iteration} differs by {(a - b).abs().max()}"


@pytest.mark.parametrize("script, env_id, tolerance", [(*HEADS[0], 1e-6), (*HEADS[1], 1e-5)])
def test_shuffling_the_rows_changes_only_the_rounding(monkeypatch, tmp_path, script, env_id, tolerance):
    """Drawing the order does not move the action noise. A continuous action carries the rounding on into the
    states, hence its wider tolerance. Fails with both drawn from one stream."""
    flags = {"env_id": env_id}
    ppo = parameters_after_each_update(monkeypatch, script, **flags, **AS_A2C, out=str(tmp_path / "ppo"))
    ours = parameters_after_each_update(monkeypatch, a2c, **flags, out=str(tmp_path / "a2c"))
    for a, b in zip(ppo, ours, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("norm_adv", [True, False])
def test_the_loss_is_the_formula(norm_adv):
    """Against the formula written out in float64. Fails with the policy term's sign or a weight changed."""
    torch.manual_seed(0)
    log_prob, entropy, value, advantages, returns = torch.randn(5, 32, dtype=torch.float64)
    args = a2c.Args(norm_adv=norm_adv, vf_coef=0.3, ent_coef=0.02)
    loss, diagnostics = a2c.a2c_loss(log_prob, entropy, value, advantages, returns, args)
    scaled = (advantages - advantages.mean()) / (advantages.std() + 1e-8) if norm_adv else advantages
    policy = -(log_prob * scaled).sum() / 32
    critic = ((value - returns) ** 2).sum() / 64
    assert loss.item() == pytest.approx((policy + 0.3 * critic - 0.02 * entropy.mean()).item(), abs=1e-12)
    assert diagnostics["value_loss"].item() == pytest.approx(critic.item(), abs=1e-12)
