"""The CPU capture emulator: what a CUDA graph could hold replays bit for bit, and what it could not is
caught.

"Broken" below means broken in the function under test; each is what real code has done on its way to a CUDA
graph.
"""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from ppo_continuous import compute_gae
from tests.capture_emulator import CaptureError, capture, snapshot


def replays_as_eager(function, state, change, replays=20):
    """Whether `function` captured and replayed leaves the bytes that calling it leaves, replay by replay.

    `change(state, i)` writes the inputs of call i. `state` is a dict; the eager run has a deep copy of it.
    """
    eager = copy.deepcopy(state)
    before = snapshot(state)
    tape = capture(function, state, state=state)
    assert snapshot(state) == before, "recording left its marks"
    for i in range(replays):
        change(state, i)
        tape.replay()
        change(eager, i)
        function(eager)
        if snapshot(state) != snapshot(eager):
            return False
    return True


def fill(name):
    """A `change` that draws state[name] anew for each call."""

    def change(state, i):
        generator = torch.Generator().manual_seed(i)
        state[name].copy_(torch.rand(state[name].shape, generator=generator))

    return change


# ---- What a graph can hold


def test_a_rollout_replays():
    """Steps in a Python loop, resets by torch.where, writes into slices of buffers."""

    def rollout(s):
        for t in range(5):
            s["obs"][t] = s["now"]
            action = torch.tanh(s["now"] @ s["weight"] + s["noise"][t])
            new = s["now"] * 0.9 + action
            s["steps"].add_(1)
            done = (new.abs().sum(-1) > 2.0) | (s["steps"] >= 3)
            s["done"][t] = done
            s["now"].copy_(torch.where(done.unsqueeze(1), torch.zeros_like(new), new))
            s["steps"].mul_(~done)

    torch.manual_seed(0)
    state = {"now": torch.randn(6, 3), "weight": torch.randn(3, 3), "noise": torch.zeros(5, 6, 3)}
    state |= {"obs": torch.zeros(5, 6, 3), "done": torch.zeros(5, 6, dtype=torch.bool)}
    state |= {"steps": torch.zeros(6, dtype=torch.int64)}
    assert replays_as_eager(rollout, state, fill("noise"))
    assert state["done"].any() and not state["done"].all()


def test_compute_gae_replays():
    def gae(s):
        advantages, returns = compute_gae(
            s["reward"], s["value"], s["next_value"], s["terminated"], s["truncated"], 0.99, 0.95
        )
        s["advantages"].copy_(advantages)
        s["returns"].copy_(returns)

    torch.manual_seed(0)
    floats = {name: torch.randn(9, 4) for name in ("reward", "value", "next_value", "advantages", "returns")}
    flags = {name: torch.rand(9, 4) < 0.2 for name in ("terminated", "truncated")}
    assert replays_as_eager(gae, {**floats, **flags}, fill("reward"))


class Learner(dict):
    """A network, fused Adam and rows to learn from, as captured updates have them: the optimizer warmed
    up."""

    def __init__(self, lr=None):
        torch.manual_seed(0)
        self["net"] = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 2))
        self["lr"] = torch.tensor(1e-2)
        lr = self["lr"] if lr is None else lr
        self["adam"] = torch.optim.Adam(self["net"].parameters(), lr=lr, fused=True, capturable=True)
        self["rows"], self["index"] = torch.randn(40, 3), torch.arange(8)
        self["loss"] = torch.zeros(())
        update(self)

    def __deepcopy__(self, memo):
        twin = type(self)(self["adam"].param_groups[0]["lr"] if "float_lr" in self else None)
        for ours, theirs in zip(self["net"].parameters(), twin["net"].parameters(), strict=True):
            theirs.data.copy_(ours.data)
        return twin


def update(s):
    """Gather, forward, backward, clip, Adam: one minibatch."""
    rows = s["rows"].index_select(0, s["index"])
    output = s["net"](rows)
    low, high = output.split(1, dim=1)
    spread, _ = torch.var_mean(low, dim=0)
    best, _ = torch.max(output, dim=1)
    log_prob = output.log_softmax(-1).gather(-1, (rows[:, :1] > 0).long()).squeeze(-1)
    loss = (best - rows[:, 0]).pow(2).mean() + 0.1 * spread.sum() - log_prob.mean() + high.abs().mean()
    s["adam"].zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s["net"].parameters(), 0.5)
    s["adam"].step()
    s["loss"].copy_(loss.detach())


def shuffle_and_anneal(s, i):
    s["index"].copy_(torch.randperm(40, generator=torch.Generator().manual_seed(i))[:8])
    s["lr"].fill_(1e-2 * (1 - i / 20))


def test_an_update_with_backward_and_fused_adam_replays():
    assert replays_as_eager(update, Learner(), shuffle_and_anneal)


def test_gradients_that_are_kept_between_calls_replay():
    """zero_grad(set_to_none=False), and one flat gradient whose views the parameters hold, as in
    flatten_parameters."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4))
    weight.grad = torch.zeros(4)
    state = {"weight": weight, "x": torch.zeros(5, 4)}

    def step(s):
        s["weight"].grad.zero_()
        torch.tanh(s["x"] @ s["weight"]).sum().backward()
        with torch.no_grad():
            s["weight"].sub_(s["weight"].grad * 0.1)

    twin = nn.Parameter(weight.detach().clone())
    twin.grad = torch.zeros(4)
    eager = {"weight": twin, "x": state["x"].clone()}
    tape = capture(step, state, state=state)
    assert not weight.grad.any()
    for i in range(20):
        fill("x")(state, i)
        tape.replay()
        fill("x")(eager, i)
        step(eager)
        assert snapshot(state) == snapshot(eager) and torch.equal(weight.grad, twin.grad)


def test_autograd_grad_views_and_factories_replay():
    def step(s):
        x = s["x"].view(2, 6).t()
        (gradient,) = torch.autograd.grad((x @ s["weight"]).square().sum(), s["weight"])
        scale = torch.full((2,), 0.5) * torch.ones(2).cumsum(0)
        buffer = torch.empty(2, 2)
        buffer[0], buffer[1] = gradient, scale
        s["weight"].data.sub_(buffer.prod(0) * 1e-2)
        s["sum"][:, 0] += 2.0
        s["sum"][0, 1] = 3.0

    torch.manual_seed(0)
    state = {"x": torch.zeros(12), "weight": nn.Parameter(torch.randn(2)), "sum": torch.zeros(3, 2)}
    assert replays_as_eager(step, state, fill("x"))


def test_what_the_function_returns_is_written_by_every_replay():
    x = torch.zeros(3)
    tape = capture(lambda: (x + 1, [x * 2]), state=[x])
    assert tape.result[0].isnan().all(), "a capture executes nothing"
    for i in range(3):
        x.fill_(i)
        tape.replay()
        assert tape.result[0].tolist() == [i + 1] * 3 and tape.result[1][0].tolist() == [2 * i] * 3


# ---- What it cannot hold, and what each refusal says

x, mask, generator = torch.randn(6, 3), torch.arange(6) < 2, torch.Generator()
dropped = [torch.ones(6, 3)]


def python_if():
    return x + 1 if x.sum() > 0 else x


def item_assignment():
    x[mask] = 0.0


REFUSED = {
    "item": (
        lambda: x * x.norm().item(),
        "waits for the device: keep the number in a tensor, and choose with",
    ),
    "float": (lambda: float(x.sum()), "asked for, by .item(), float(), int()"),
    "if": (python_if, "an `if`"),
    "tolist": (lambda: x.tolist(), "Tensor.tolist() waits for the device"),
    "numpy": (lambda: x.numpy(), "Tensor.numpy() waits for the device"),
    "cpu": (lambda: x.cpu(), "Tensor.cpu() waits for the device"),
    "equal": (lambda: torch.equal(x, x), "equal returns a Python value"),
    "allclose": (lambda: torch.allclose(x, x), "allclose returns a Python value"),
    "mask": (lambda: x[mask].mean(), "indexing with a mask waits for the device to count the rows"),
    "mask assignment": (item_assignment, "indexing with a mask waits"),
    "nonzero": (lambda: x.nonzero(), "shape of what nonzero returns depends on the numbers"),
    "masked_select": (lambda: x.masked_select(x > 0), "masked_select returns depends on the numbers"),
    "unique": (lambda: x.unique(), "depends on the numbers"),
    "repeat_interleave": (lambda: x.repeat_interleave(mask.long(), 0), "depends on the numbers"),
    "masked_fill": (
        lambda: x.masked_fill(x > 0, x[0, 0]),
        "waits for the device inside its kernel: use torch.wh",
    ),
    "randn": (lambda: x + torch.randn(6, 3), "randn draws random numbers: draw them before the replay"),
    "rand_like": (lambda: torch.rand_like(x), "draws random numbers"),
    "normal_": (lambda: x.normal_(), "draws random numbers"),
    "generator": (lambda: torch.randn(3, generator=generator), "draws random numbers"),
    "randperm": (lambda: x[torch.randperm(6)], "draws random numbers"),
    "multinomial": (lambda: torch.multinomial(x.abs(), 1), "draws random numbers"),
    "dropout": (lambda: torch.dropout(x, 0.5, train=True), "draws random numbers"),
    "torch.tensor": (lambda: x * torch.tensor(0.5), "torch.tensor(...) copies a Python number to the device"),
    "as_tensor": (
        lambda: x * torch.as_tensor([1.0, 2.0, 3.0]),
        "torch.as_tensor(...) copies a Python number",
    ),
    "from_numpy": (
        lambda: x + torch.from_numpy(mask_array),
        "reads a tensor float32[3] that the function neither",
    ),
    "dropped temporary": (
        lambda: x + dropped[0],
        "reads a tensor float32[6, 3] that the function neither made",
    ),
}
mask_array = torch.ones(3).numpy()


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    function, sentence = REFUSED[name]
    before = x.clone()
    with pytest.raises(CaptureError) as refusal:
        capture(function, state=[x, mask])
    assert sentence in str(refusal.value)
    assert torch.equal(x, before), "a refused capture left its marks"


def test_refused_in_backward():
    """The refusal passes through the autograd engine as it is."""

    class Syncs(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            return gradient * gradient.sum().item()

    weight = nn.Parameter(torch.ones(3))
    with pytest.raises(CaptureError, match="a tensor's number is asked for"):
        capture(lambda: Syncs.apply(weight).sum().backward(), state=[weight])


def test_a_gradient_left_over_from_outside_is_seen():
    """A gradient is state of its tensor, so accumulating into it replays; that of a tensor that is not given
    is foreign memory."""
    weight, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    weight.grad, other.grad = torch.zeros(3), torch.zeros(3)
    tape = capture(lambda: (weight * 2).sum().backward(), state=[weight])
    tape.replay()
    tape.replay()
    assert weight.grad.tolist() == [4.0] * 3
    with pytest.raises(CaptureError, match="neither made nor was given as state"):
        capture(lambda: other.grad.add_(1), state=[weight])


@dataclass
class Counter:
    count: torch.Tensor
    module: nn.Module


def test_state_that_is_rebound_is_named():
    def in_a_dict(s):
        s["lr"] = s["lr"] * 0.5

    def in_a_dataclass(s):
        s.count = s.count + 1

    def in_a_module(s):
        s.module.weight.data = s.module.weight.data * 0.5

    for function, state, name in (
        (in_a_dict, {"lr": torch.ones(())}, r"state\['lr'\]"),
        (in_a_dataclass, Counter(torch.zeros(()), nn.Linear(1, 1)), r"state\.count"),
        (in_a_module, Counter(torch.zeros(()), nn.Linear(1, 1)), r"state\.module\.weight"),
    ):
        with pytest.raises(CaptureError, match=f"another tensor in the place of {name}.*copy_"):
            capture(lambda f=function, s=state: f(s), state=state)


def test_state_that_is_rebound_between_replays_is_named():
    state = {"x": torch.zeros(2)}
    tape = capture(lambda: state["x"].add_(1), state=state)
    tape.replay()
    state["x"] = torch.zeros(2)
    with pytest.raises(CaptureError, match=r"since the capture something .* in the place of state\['x'\]"):
        tape.replay()


# ---- What only the bytes show


def test_a_baked_in_python_number_shows_in_the_bytes():
    """The learning rate as a Python float that changes from call to call: the tape keeps the first."""
    lr = {"lr": 0.1}

    def step(s):
        s["weight"].sub_(lr["lr"] * s["x"])

    def change(s, i):
        lr["lr"] = 0.1 * 0.9**i
        fill("x")(s, i)

    assert not replays_as_eager(step, {"weight": torch.zeros(3), "x": torch.zeros(3)}, change)
    lr["lr"] = 0.1
    assert replays_as_eager(step, {"weight": torch.zeros(3), "x": torch.zeros(3)}, fill("x"))


def test_adam_with_a_python_learning_rate_shows_in_the_bytes():
    class Floating(Learner):
        def __init__(self, lr=1e-2):
            super().__init__(1e-2)
            self["float_lr"] = None

    def anneal(s, i):
        s["adam"].param_groups[0]["lr"] = 1e-2 * (1 - i / 20)

    assert not replays_as_eager(update, Floating(), anneal)
    assert replays_as_eager(update, Floating(), lambda s, i: None)


def test_state_that_is_rebound_out_of_sight_shows_in_the_bytes():
    """An attribute of an object that `state` does not reach into: only its tensor was given."""

    class Holder:
        weight = torch.ones(3)

    def step():
        Holder.weight = Holder.weight * 0.5
        return Holder.weight

    first = Holder.weight
    tape = capture(step, state=[first])
    for _ in range(3):
        tape.replay()
    replayed, Holder.weight = tape.result.clone(), first
    for _ in range(3):
        step()
    assert replayed.tolist() == [0.5] * 3 and Holder.weight.tolist() == [0.125] * 3


def test_an_optimizer_that_was_not_warmed_up_is_named():
    """Adam makes its moments at its first step: captured, every replay would make them anew."""
    learner = Learner()
    learner["adam"].state.clear()
    with pytest.raises(CaptureError, match=r"state\[0\]\['step'\] did not exist .* as a warm-up"):
        capture(lambda: update(learner), state=learner)


def test_adam_whose_step_count_is_a_host_number_is_refused():
    """Without fused or capturable, Adam keeps its step count on the CPU, made by torch.tensor at its first
    step, and asks for it by .item() at every other."""
    weight = nn.Parameter(torch.ones(3))
    adam = torch.optim.Adam([weight], foreach=False)

    def step():
        adam.zero_grad()
        weight.square().sum().backward()
        adam.step()

    with pytest.raises(CaptureError, match=r"torch.tensor\(...\) copies"):
        capture(step, state=[weight, adam])
    step()
    with pytest.raises(CaptureError, match="number is asked for"):
        capture(step, state=[weight, adam])
