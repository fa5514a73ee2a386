"""What lies where, and how long a script may be: one page each, four at the top, the other variants below."""

import pytest

from tests.conftest import ROOT, TOP_LEVEL, all_scripts, path_of

LINES = {  # at most, of at most 110 columns
    "ppo_continuous": 455,
    "ppo_discrete": 454,
    "a2c": 430,
    "ppo_gpu_batched": 616,
    "variants.ppo_memory": 685,
    "variants.ppo_pixels": 450,
    "variants.ppo_imitation": 556,
    "variants.ppo_robot": 669,
    "variants.ppo_distributed": 460,
    "variants.ppo_seeds": 556,
}


@pytest.mark.parametrize("script", all_scripts())
def test_a_script_keeps_to_its_page(script):
    """Fails with more lines than the script's budget, with a line of 111 columns, and with a variant that has
    no budget."""
    lines = (ROOT / path_of(script)).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= LINES.get(script, 0)
    assert max(map(len, lines)) <= 110


def test_nothing_joins_the_top_level():
    """Fails with a fifth script, a package or a page beside the README at the top; variants/ may hold all
    kinds of scripts, docs/ all kinds of pages."""
    assert {path.name for path in ROOT.glob("*.py")} == {path_of(script) for script in TOP_LEVEL}
    assert {path.name for path in ROOT.glob("*.md")} == {"README.md"}
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages - {"variants"} == {"common", "exercises", "tests"}
