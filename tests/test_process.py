"""A run gives back what it took of its process: torch's settings, signal handlers, and open environments."""

import signal

import pytest
import torch

import ppo_discrete
from common.process import at_exit, on_failure, restores_process
from tests.conftest import load, tiny_args


@pytest.mark.parametrize("fails", [False, True])
def test_restores_process_puts_back_threads_and_handlers(fails):
    """Fails with the restoring lines after the call instead of in `finally`; with the threads, or with one of
    the two signals, left out."""

    def mine(number, frame): ...

    @restores_process
    def function(x, *, y):
        torch.set_num_threads(before + 2)
        signal.signal(signal.SIGINT, lambda *_: None)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return 1 / 0 if fails else x + y

    before = torch.get_num_threads()
    interrupt, terminate = signal.getsignal(signal.SIGINT), signal.signal(signal.SIGTERM, mine)
    try:
        if fails:
            with pytest.raises(ZeroDivisionError):
                function(1, y=2)
        else:
            assert function(1, y=2) == 3
        assert torch.get_num_threads() == before
        assert signal.getsignal(signal.SIGINT) is interrupt and signal.getsignal(signal.SIGTERM) is mine
        assert function.__name__ == "function"
    finally:
        signal.signal(signal.SIGTERM, terminate)


def under(name):
    """A caller's torch setting, as a context."""
    return {
        "no_grad": torch.no_grad(), "inference_mode": torch.inference_mode(),
        "autocast": torch.autocast("cpu", dtype=torch.bfloat16), "device": torch.device("meta"),
    }[name]  # fmt: skip


@pytest.mark.parametrize("name", ["no_grad", "inference_mode", "autocast", "device"])
def test_a_callers_settings_change_nothing(name, tmp_path):
    """Fails with any of the four left as the caller has it: an error about grad_fn, inference tensors or the
    device, and with autocast other weights."""
    script = ppo_discrete
    with under(name):
        script.train(tiny_args(script, tmp_path / "under"))
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        found = grad, inference, torch.is_autocast_enabled("cpu"), torch.empty(0).device.type
    expected = {"no_grad": 0, "inference_mode": 1, "autocast": 2, "device": 3}[name]
    assert found[expected] == [False, True, True, "meta"][expected]
    script.train(tiny_args(script, tmp_path / "plain"))
    files = [(tmp_path / run / "checkpoint.pt").read_bytes() for run in ("under", "plain")]
    assert files[0] == files[1]


def test_a_default_dtype_changes_nothing(script, tmp_path):
    """Fails with the caller's float64 left on, and with float32 left on afterwards."""
    torch.set_default_dtype(torch.float64)
    try:
        script.train(tiny_args(script, tmp_path))
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert load(tmp_path)["state"]["agent"]["actor.1.weight"].dtype == torch.float32


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_opened_is_closed_last_first(fails, capsys):
    """Fails with one that raises keeping the others open, and without `finally`."""
    closed = []

    def close(name):
        closed.append(name)
        if name == "second":
            raise OSError("already gone")

    @restores_process
    def function():
        for name in ("first", "second", "third"):
            at_exit(lambda name=name: close(name))
        return 1 / 0 if fails else 1

    if fails:
        with pytest.raises(ZeroDivisionError):
            function()
    else:
        assert function() == 1
    assert closed == ["third", "second", "first"]
    assert capsys.readouterr().out == "closing an environment raised OSError: already gone\n"
    at_exit(lambda: closed.append("outside"))
    function.__wrapped__ if fails else function()
    assert "outside" not in closed


def test_a_failure_is_explained():
    """Fails with the explanation asked of another call, and with its cause lost."""

    @restores_process
    def function(known):
        on_failure(lambda error: RuntimeError("what stays") if known else None)
        raise KeyError("why")

    with pytest.raises(RuntimeError, match="what stays") as stop:
        function(True)
    assert isinstance(stop.value.__cause__, KeyError)
    with pytest.raises(KeyError, match="why"):
        function(False)
