"""What only a GPU can show: `pytest -m gpu tests/test_gpu.py`, with torch, numpy, pytest, gymnasium, tyro."""

import json
import time

import pytest
import torch

import ppo_gpu_batched as script

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
SMALL = {"num_envs": 256, "num_steps": 16, "total_timesteps": 20 * 4096, "eval_episodes": 0, "rerun": False}


def train(out, **flags):
    script.train(script.Args(**{**SMALL, "device": "cuda", **flags, "out": str(out)}))
    return json.loads((out / "summary.json").read_text())


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"env_id": "CartPoleContinuous-v0", "norm_obs": True, "norm_reward": True},
        {"env_id": "Pendulum-v1", "adaptive_kl": 0.01, "anneal_lr": False, "target_kl": 0.02},
    ],
)
def test_captured_and_eager_runs_write_the_same_bytes(tmp_path, flags):
    """Fails with a number of the schedule computed in Python."""
    assert train(tmp_path / "captured", **flags)["captured"] is True
    assert train(tmp_path / "eager", cuda_graph=False, **flags)["captured"] is False
    captured, eager = (tmp_path / name / "checkpoint.pt" for name in ("captured", "eager"))
    assert captured.read_bytes() == eager.read_bytes()


@pytest.mark.parametrize("cuda_graph", [True, False])
def test_nothing_in_an_iteration_waits_for_the_device(monkeypatch, tmp_path, cuda_graph):
    """From the draws to the reading of the metrics. Fails with an `.item()` in any of its functions."""

    def switch(name, mode):
        original = getattr(script, name)

        def switched(*args, **kwargs):
            torch.cuda.set_sync_debug_mode(mode)
            return original(*args, **kwargs)

        monkeypatch.setattr(script, name, switched)

    switch("draw", "error")
    switch("capture", "default")
    switch("read_metrics", "default")
    try:
        train(tmp_path, log_every=1, cuda_graph=cuda_graph)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_speed_is_printed(tmp_path, capsys):
    """Figures, no bounds: captured and eager at 4,096 environments, captured at 32,768."""
    lines = []
    for num_envs, cuda_graph in ((4096, True), (4096, False), (32768, True)):
        steps = 60 * num_envs * 32
        flags = {"num_envs": num_envs, "num_steps": 32, "total_timesteps": steps, "checkpoint_every": 1000}
        start = time.perf_counter()
        summary = train(tmp_path / f"{num_envs}{cuda_graph}", cuda_graph=cuda_graph, **flags)
        metrics = (tmp_path / f"{num_envs}{cuda_graph}" / "metrics.jsonl").read_text().splitlines()
        tenth, last = json.loads(metrics[9]), json.loads(metrics[-1])
        rate = (last["global_step"] - tenth["global_step"]) / (last["seconds"] - tenth["seconds"])
        how = "captured" if summary["captured"] else "eager"
        seconds = time.perf_counter() - start
        lines.append(f"{num_envs} envs {how}: {rate:,.0f} steps/s, {seconds:.1f} s in all")
    with capsys.disabled():
        print(f"\n{torch.cuda.get_device_name()}\n" + "\n".join(lines))
