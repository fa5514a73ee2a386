"""Checks of exercise 5: the rollout cell by cell, the update minibatch by minibatch, then both at work."""

import pytest
import torch
from torch import nn

from exercises import Blank
from exercises.checks import Wrong, check, load
from exercises.scripted import Probe, ScriptedEnv
from ppo_continuous import Batch

rollout = pytest.mark.about("collect_rollout")
update = pytest.mark.about("update")
train = pytest.mark.about("train")


# ---- collect_rollout


class Coded:
    """A policy whose action tells for which observation and with which noise it was asked."""

    def sample(self, obs, noise):
        return 100 * obs[:, :1] + 10 * obs[:, 1:] + noise


def collect(ex):
    """A rollout of 8 steps: one environment falls at its third step, another meets its time limit at its
    second and falls right after, a third goes on throughout. Returns the learner's and the reference's."""
    noise = torch.arange(24.0).reshape(8, 3, 1) / 100
    results = []
    for module in (ex, load(5)):
        envs = [ScriptedEnv((3, "fall")), ScriptedEnv((2, "time-out"), (1, "fall")), ScriptedEnv()]
        results.append(module.collect_rollout(Coded(), envs, noise))
    check(
        results[0] is not None,
        "collect_rollout returned None: its last line should still be `return rollout`.",
    )
    return results


def first_difference(ours, right, field):
    """[t, i] of the first cell of a field that is wrong, with what it is and should be; None where none
    is."""
    a, b = getattr(ours, field), getattr(right, field)
    check(
        a.shape == b.shape, f"rollout.{field} has shape {tuple(a.shape)}, and should have {tuple(b.shape)}."
    )
    for t in range(len(b)):
        for i in range(b.shape[1]):
            if not torch.equal(a[t, i], b[t, i]):
                return t, i, a[t, i].tolist(), b[t, i].tolist()
    return None


def check_cells(ex, field, explain):
    ours, right = collect(ex)
    difference = first_difference(ours, right, field)
    if difference is not None:
        t, i, value, wanted = difference
        ended = bool(t > 0 and (right.terminated | right.truncated)[t - 1, i])
        ends = bool(t < 8 and (right.terminated | right.truncated)[t, i])
        raise Wrong(
            f"rollout.{field}[{t}, {i}] is {value}, and should be {wanted}. (An observation here is "
            "[episode, step].)\n" + explain(value, ended, ends)
        )


@rollout
def test_where_the_environments_stand(ex):
    def explain(value, ended, ends):
        if ended:
            return (
                "The step before ended the episode. obs[t] is where the environment stands at step t, "
                "so here it is the first state after the reset; the episode's last state belongs into "
                "next_obs alone."
            )
        return "obs[t + 1] is where the environment stands after step t: what the step returned, or a reset."

    check_cells(ex, "obs", explain)


@rollout
def test_what_each_step_returned(ex):
    def explain(value, ended, ends):
        if ends and value[1] == 0:
            return (
                "The episode ended at this step, and what you recorded is the first state of the next "
                "one. GAE bootstraps from next_obs: it must be what step() returned, before the reset."
            )
        return "next_obs[t] is what step t returned."

    check_cells(ex, "next_obs", explain)


@rollout
def test_actions_and_rewards(ex):
    check_cells(
        ex,
        "action",
        lambda *_: "The action of step t is chosen for obs[t], with noise[t]: leave it as it is.",
    )
    check_cells(ex, "reward", lambda *_: "It should be what step t of this very environment returned.")


@rollout
def test_how_each_episode_ended(ex):
    ours, right = collect(ex)
    swapped = torch.equal(ours.terminated, right.truncated) and torch.equal(ours.truncated, right.terminated)
    check(
        not swapped,
        "The two flags are swapped: step() returns terminated (a fall) before truncated (a time limit).",
    )
    check_cells(ex, "terminated", lambda *_: "terminated is true at a fall, and only there.")
    check_cells(ex, "truncated", lambda *_: "truncated is true at a time limit, and only there.")


# ---- update

ROWS, EPOCHS, MINIBATCHES, CLIP = 12, 4, 3, 0.2


class Line(nn.Module):
    """An agent with one number for its policy and one for its value."""

    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.5))
        self.weight = nn.Parameter(torch.tensor(0.25))

    def log_prob(self, obs, action):
        return -0.5 * (action[:, 0] - self.slope * obs[:, 0]) ** 2

    def value(self, obs):
        return self.weight * obs[:, 0]


def make_batch(agent):
    generator = torch.Generator().manual_seed(3)
    obs, action = torch.randn(ROWS, 1, generator=generator), torch.randn(ROWS, 1, generator=generator)
    advantages = torch.linspace(-1.5, 1.5, ROWS)  # each row has its own, by which it is recognised
    with torch.no_grad():
        value = agent.value(obs)
        return Batch(obs, action, agent.log_prob(obs, action), value, advantages, value + advantages)


class Record:
    """What a call of the learner's update did: the calls of policy_loss, the steps, the weights at the
    end."""

    def __init__(self, ex, monkeypatch, epochs=EPOCHS, learning_rate=0.3):
        self.calls, self.rows = [], []
        agent = Line()
        self.batch = batch = make_batch(agent)
        optimizer = torch.optim.SGD(agent.parameters(), lr=learning_rate)
        orders = self.permutations()
        self.steps, step = 0, optimizer.step

        def count_step(*args):
            self.steps += 1
            return step(*args)

        def policy_loss(log_prob, old_log_prob, advantages, clip_coef):
            self.calls.append(
                (log_prob.detach().clone(), old_log_prob.detach().clone(), advantages, clip_coef)
            )
            return load(3).policy_loss(log_prob, old_log_prob, advantages, clip_coef)

        optimizer.step = count_step
        with monkeypatch.context() as patch:  # so that exercise 5 can be done before exercise 3
            patch.setattr(ex, "policy_loss", policy_loss)
            ex.update(agent, optimizer, batch, lambda n: next(orders), epochs, MINIBATCHES, CLIP)
        self.weights = torch.stack([agent.slope, agent.weight]).detach()
        check(self.calls, "update never called policy_loss.")
        for _, _, advantages, _ in self.calls:
            distance = (advantages.reshape(-1, 1) - batch.advantages).abs()
            check(
                distance.min(1).values.max() < 1e-6,
                "policy_loss was given advantages that are not those of the batch's rows: pass them as "
                "they are.",
            )
            self.rows.append(distance.argmin(1).tolist())

    def order(self, epoch):
        """The rows in the order in which an epoch, counted from 0, saw them."""
        return [row for rows in self.rows[epoch * MINIBATCHES : (epoch + 1) * MINIBATCHES] for row in rows]

    @staticmethod
    def permutations():
        generator = torch.Generator().manual_seed(1)
        while True:
            yield torch.randperm(ROWS, generator=generator)


def reference_weights(value_coef=0.5, zero_grad=True, epochs=EPOCHS, learning_rate=0.3, sign=1):
    """What the weights come out as, with a mistake or without one."""
    agent = Line()
    batch, orders = make_batch(agent), Record.permutations()
    optimizer = torch.optim.SGD(agent.parameters(), lr=learning_rate)
    for _ in range(epochs):
        for piece in next(orders).chunk(MINIBATCHES):
            rows = Batch._make(x[piece] for x in batch)
            new = agent.log_prob(rows.obs, rows.action)
            loss = sign * load(3).policy_loss(new, rows.log_prob, rows.advantages, CLIP)
            loss = loss + value_coef * ((agent.value(rows.obs) - rows.returns) ** 2).mean()
            if zero_grad:
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return torch.stack([agent.slope, agent.weight]).detach()


@update
def test_each_row_once_an_epoch(ex, monkeypatch):
    record = Record(ex, monkeypatch)
    calls = len(record.calls)
    check(
        calls == EPOCHS * MINIBATCHES,
        f"With update_epochs {EPOCHS} and num_minibatches {MINIBATCHES}, policy_loss was called {calls} "
        f"times, and should be called {EPOCHS * MINIBATCHES} times: once for each minibatch of each epoch.",
    )
    check(
        record.steps == calls, f"optimizer.step() was called {record.steps} times, for {calls} minibatches."
    )
    for epoch in range(EPOCHS):
        seen = sorted(record.order(epoch))
        missing = sorted(set(range(ROWS)) - set(seen))
        check(
            seen == list(range(ROWS)),
            f"Epoch {epoch + 1} should see each of the {ROWS} rows once, and saw rows {seen}: {missing} "
            f"{'is' if len(missing) == 1 else 'are'} missing.",
        )


@update
def test_a_new_order_every_epoch(ex, monkeypatch):
    record = Record(ex, monkeypatch)
    orders = [record.order(epoch) for epoch in range(EPOCHS)]
    check(
        orders[0] != list(range(ROWS)),
        "The rows come in the order of the rollout: draw a permutation for each epoch.",
    )
    check(orders[0] != orders[1], "Every epoch uses the same order: draw the permutation inside of the loop.")


@update
def test_the_ratio_is_one_at_first(ex, monkeypatch):
    record = Record(ex, monkeypatch)
    new, old, _, clip_coef = record.calls[0]
    check(
        clip_coef == CLIP,
        f"policy_loss was given clip_coef {clip_coef}, and should be given update's own, {CLIP}.",
    )
    apart = (new - old).abs().max().item()
    check(
        apart < 1e-6,
        "In the first minibatch the policy is still the one that collected the rollout, so that the new "
        f"and old log-probabilities should agree; they differ by {apart:.3g}. Are they of the same rows?",
    )


@update
def test_and_moves_after_that(ex, monkeypatch):
    record = Record(ex, monkeypatch)
    for i, (new, old, _, _) in enumerate(record.calls[1:], 2):
        right = record.batch.log_prob[record.rows[i - 1]]
        check(
            torch.allclose(old, right, atol=1e-6),
            f"In minibatch {i} the old log-probabilities are not those of the batch. They are fixed when "
            "the rollout is collected: computed anew from the agent, they make every ratio 1, and "
            "nothing is ever clipped.",
        )
        check(
            (new - old).abs().max() > 1e-6,
            f"In minibatch {i} the new log-probabilities still equal the old: they are not computed from "
            "the agent as it is now.",
        )


@update
def test_the_steps_taken(ex, monkeypatch):
    """The weights at the end, from which the rest of the loss shows."""
    ours = Record(ex, monkeypatch).weights
    mistakes = {
        "The gradients of earlier minibatches are still in it: optimizer.zero_grad() comes before "
        "backward().": {"zero_grad": False},
        "The value loss is missing.": {"value_coef": 0.0},
        "The value loss is there in full; it should be 0.5 * mean.": {"value_coef": 1.0},
        "The value loss pushes the wrong way.": {"value_coef": -0.5},
        "The policy moves the wrong way: policy_loss is already negated.": {"sign": -1},
        "The policy loss is missing from what is minimised.": {"sign": 0},
    }
    if torch.allclose(ours, reference_weights(), atol=1e-5):
        return
    for sentence, changes in mistakes.items():
        if torch.allclose(ours, reference_weights(**changes), atol=1e-5):
            raise Wrong(sentence)
    raise Wrong(
        f"The agent's two weights are {ours.tolist()} after the update, and should be "
        f"{reference_weights().tolist()}. The minibatches and ratios are right, so look at the loss, and "
        "at the three lines that take the step."
    )


# ---- All of it


def check_parts(attempt):
    """Say so if what fails below is not exercise 5. A part that is blank is waiting."""
    generator = torch.Generator().manual_seed(0)
    x, y, z = (torch.randn(6, 2, generator=generator) for _ in range(3))
    flags = torch.rand(2, 6, 2, generator=generator) < 0.3
    calls = {
        1: lambda m: torch.stack(m.compute_gae(x, y, z, *flags, 0.9, 0.8)),
        3: lambda m: m.policy_loss(x[0], y[0], z[0], 0.2),
        4: lambda m: m.gaussian_log_prob(x, y[0], z),
    }
    for number, call in calls.items():
        right = call(load(number))
        try:
            ours = call(attempt(number))
            same = ours.shape == right.shape and torch.allclose(ours, right, atol=1e-5)
        except Blank:
            raise Blank(f"do exercise {number} first: it is still blank") from None
        except Exception:  # whatever it is: its own checks say more about it
            same = False
        where = f"pytest exercises/test_ex{number}.py"
        check(same, f"This trains with your exercise {number}, which is not right yet. Run {where}")


@train
def test_the_value_of_the_probe(ex, attempt):
    """The r / (1 - gamma) probe: reward 1 for ever, and a time limit that must not be seen in the value."""
    check_parts(attempt)
    agent = ex.train([Probe(lambda action: 1.0) for _ in range(4)], iterations=60)
    for obs, right, how in (
        ([0.0, 1.0], 10.0, "1 / (1 - 0.9)"),
        ([1.0, 0.0], 9.0, "0 + 0.9 * 10, the state after a reset"),
    ):
        value = agent.value(torch.tensor(obs)).item()
        check(
            abs(value / right - 1) < 0.05,
            f"Trained on a task that pays 1 for ever, V({obs}) is {value:.2f}, and should be within 5% "
            f"of {right:g}, which is {how}. The parts pass by themselves: have you changed `train`?",
        )


@train
def test_the_policy_of_the_probe(ex, attempt):
    """Reward -(action - 1)^2: the mean of the Gaussian has to find 1."""
    check_parts(attempt)
    agent = ex.train([Probe(lambda action: -((action - 1) ** 2)) for _ in range(4)], iterations=60)
    best = agent.actor[1].item()
    check(
        abs(best - 1) < 0.1,
        f"Trained on a task where action 1 is best, the policy's mean is {best:.2f}. The parts pass by "
        "themselves: have you changed `train` or `Agent`?",
    )
