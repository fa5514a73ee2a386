"""The examples of docs/extending.md, as they stand there but for a shorter training."""

import functools
import json
import re
from pathlib import Path

import pytest
import torch

import ppo_continuous as ppo

TEXT = (Path(__file__).parents[1] / "docs/extending.md").read_text()
EXAMPLES = dict(
    zip(
        ("weights", "loss", "reward", "after", "metrics", "stop"),
        re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL),
        strict=True,
    )
)
PLAIN = "import ppo_continuous as ppo\nppo.train(ppo.Args(seed=0))"
SHORT = {"total_timesteps": 3 * 1024, "rerun": False, "eval_episodes": 0}


def run(code, folder, monkeypatch):
    """Run code in `folder` with shorter Args; the metrics and the agent of its checkpoint."""
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        for name in ("Agent", "Run", "ppo_loss", "collect_rollout", "update"):
            patch.setattr(ppo, name, getattr(ppo, name))  # to be put back
        patch.setattr(ppo, "Args", functools.partial(ppo.Args, **SHORT, out="out"))
        exec(code, {"__name__": "example"})
    lines = [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]
    return lines, torch.load(folder / "out/checkpoint.pt", weights_only=True)


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_runs_and_changes_what_it_says(name, tmp_path, monkeypatch):
    """Fails with an assignment to `ppo` left out of its example."""
    plain, changed = tmp_path / "plain", tmp_path / "changed"
    plain.mkdir()
    changed.mkdir()
    before, _ = run(PLAIN, plain, monkeypatch)
    if name == "weights":
        (plain / "out").rename(changed / "pretrained")
    after, checkpoint = run(EXAMPLES[name], changed, monkeypatch)
    if name == "stop":
        assert checkpoint["iteration"] == len(after) < len(before)
    elif name == "metrics":
        assert all(line["weight_norm"] > 0 for line in after)
    elif name == "after":
        assert after[0]["log_std"] == pytest.approx(before[0]["log_std"] - 0.01, abs=1e-5)
    else:
        assert after[0]["loss"] != before[0]["loss"]
