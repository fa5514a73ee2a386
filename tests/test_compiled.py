"""--compile: what a run hands to torch.compile, what it ends in, and what it refuses."""

import dataclasses
import importlib

import pytest
import torch

from common.cli import Refusal, saved_args
from tests.conftest import all_scripts, interrupt, load, of_ppo, tiny_args

COMPILES = [name for name in all_scripts() if hasattr(importlib.import_module(name).Args, "compile")]
each = pytest.mark.parametrize("script", COMPILES, indirect=True)


def weights(folder):
    return torch.cat([x.flatten() for x in load(folder)["state"]["agent"].values()])


@of_ppo
@pytest.mark.parametrize("flags", [{}, {"shared_trunk": True, "norm_obs": True, "clip_vloss": True}], ids=str)
def test_forward_backward_and_clip_are_one_graph(script, monkeypatch, tmp_path, flags):
    """Of one shape, in the whole run, and it computes what the script does. Fails with a diagnostic read on
    the way, with the diagnostics not detached, with backward() left out of the graph, and with the learning
    rate in it, which changes."""
    graphs, compile = [], torch.compile

    def recording(function, **options):
        def backend(graph, inputs):
            graphs.append({node.target for node in graph.graph.nodes})
            return graph.forward

        return compile(function, dynamic=options["dynamic"], backend=backend)

    torch.compiler.reset()
    script.train(tiny_args(script, tmp_path / "eager", **flags))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", recording)
        script.train(tiny_args(script, tmp_path / "traced", compile=True, **flags))
    (graph,) = graphs
    assert torch.autograd.grad in graph and "clamp" in graph
    torch.testing.assert_close(weights(tmp_path / "traced"), weights(tmp_path / "eager"))


@pytest.mark.slow
@of_ppo
def test_compiled_runs_are_the_same_bytes(script, tmp_path):
    """Among themselves, a resumed one too, and close to eager ones. Fails with the flag without effect."""
    script.train(tiny_args(script, tmp_path / "eager"))
    for name in ("one", "two"):
        script.train(tiny_args(script, tmp_path / name, compile=True))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        interrupt(patch, script, "collect_rollout", 3)
        script.train(tiny_args(script, tmp_path / "cut", compile=True))
    script.train(saved_args(script.Args, load(tmp_path / "cut"), resume=str(tmp_path / "cut")))
    one, *others = (tmp_path / name / "checkpoint.pt" for name in ("one", "two", "cut"))
    assert all(other.read_bytes() == one.read_bytes() for other in others)
    assert not torch.equal(weights(tmp_path / "one"), weights(tmp_path / "eager"))
    torch.testing.assert_close(weights(tmp_path / "one"), weights(tmp_path / "eager"), rtol=1e-3, atol=1e-4)


@each
def test_without_a_compiler_compiling_is_refused(script, monkeypatch, tmp_path):
    """Before the folder is made. Fails with torch left to find out, in the first iteration."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(Refusal, match=r"^--compile needs a C\+\+ compiler: install g\+\+ or leave it out$"):
        script.train(script.Args(compile=True, out=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


@of_ppo
def test_a_compiled_runs_policy_is_played_without_a_compiler(script, monkeypatch, tmp_path):
    """Fails with the compiler asked for by an evaluation, which compiles nothing."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    args = tiny_args(script, tmp_path / "run", compile=True)
    script.train(args)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    script.evaluate_only(dataclasses.replace(args, eval_only=str(tmp_path / "run"), out=None))
    assert (tmp_path / "run" / "eval.json").exists()


@of_ppo
def test_torch_is_told_to_trace_backward_for_the_run_alone(script, monkeypatch, tmp_path):
    """Fails with the setting not made, and with it left on for the caller."""
    config, told = torch._dynamo.config, []

    def compile(function, **options):
        told.append(config.trace_autograd_ops)
        return function

    monkeypatch.setattr(torch, "compile", compile)
    script.train(tiny_args(script, tmp_path, compile=True))
    assert told == [True] and not config.trace_autograd_ops
