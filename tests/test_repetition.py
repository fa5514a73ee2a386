"""The rule for repetition: the same name in two scripts means the same text, in the same order, unless the
table says in one sentence why a script has its own."""

import ast
from itertools import combinations

import pytest

from tests.conftest import ROOT

SCRIPTS = ["ppo_continuous", "ppo_discrete", "a2c", "ppo_gpu_batched", "variants/ppo_memory"]
# {script: {name: why its text is not the one that the scripts before it have}}
OWN = {
    "ppo_discrete": {
        "Args": "other defaults, and no `squash` or `log_std_init`",
        "Agent": "the actor puts out logits, an action is an index, and evaluation takes the most probable",
        "check_args": "asks for Discrete actions, and has no `squash` to check",
        "train": "draws Gumbel noise for normal noise, and logs no `log_std`",
    },
    "a2c": {
        "Args": "no epochs, minibatches or clip; RMSprop, shorter rollouts and more environments",
        "Agent": "holds both heads, and picks by the environment's action space",
        "update": "one gradient step on the whole rollout",
        "check_args": "takes both kinds of actions, and has no minibatches to check",
        "train": "keeps no old log-probabilities and no minibatch order",
    },
    "ppo_gpu_batched": {
        "Args": "device, threads, capture, schedules and the divergence guard; no `squash`",
        "Agent": "like a2c's, with one `forward` for `functional_call`",
        "collect_rollout": "steps all lanes at once and writes into tensors that stay where they are",
        "check_args": "asks for an environment that has a batched form",
        "train": "runs an iteration as functions that a CUDA graph can record",
        "evaluate": "has no `--env-kwargs` to pass on",
        "evaluate_only": "has no `--env-kwargs` to pass on",
    },
    "variants/ppo_memory": {
        "Args": "the memory and its chunks; no `squash`, no `optimizer`",
        "Agent": "like a2c's, with a memory in the place of the second hidden layer",
        "Batch": "holds chunks of steps, and the state from which each is replayed",
        "collect_rollout": "steps the memory, resets it, and keeps the states where chunks begin",
        "update": "replays whole chunks, and with `--recompute-advantages` does their GAE anew",
        "check_args": "takes both kinds of actions, and asks that chunks fit",
        "train": "carries the memory from rollout to rollout, and cuts the rollout into chunks",
        "evaluate": "begins each episode with an empty memory",
    },
}
ORDER = {"ppo_gpu_batched": "the functions that are captured stand first"}


def definitions(script):
    """{name: source text} of the top-level functions and classes, in the order of the file."""
    source = (ROOT / f"{script}.py").read_text(encoding="utf-8")
    lines = source.splitlines()
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


@pytest.mark.parametrize("one, other", list(combinations(SCRIPTS, 2)))
def test_the_same_name_is_the_same_text(one, other):
    """Fails with one comment changed in one script's compute_gae, and for a table entry that is missing."""
    a, b = definitions(one), definitions(other)
    for name in a.keys() & b.keys():
        if name not in OWN.get(other, {}) and name not in OWN.get(one, {}):
            assert a[name] == b[name], f"{name} differs between {one}.py and {other}.py"


@pytest.mark.parametrize("one, other", list(combinations(SCRIPTS, 2)))
def test_the_same_names_come_in_the_same_order(one, other):
    """Fails with two functions swapped in one script."""
    if one in ORDER or other in ORDER:
        return
    a, b = definitions(one), definitions(other)
    assert [name for name in a if name in b] == [name for name in b if name in a]


@pytest.mark.parametrize("script", OWN)
def test_the_table_lists_nothing_that_is_the_same(script):
    """Fails for an entry whose text is that of a script before it."""
    before = [definitions(name) for name in SCRIPTS[: SCRIPTS.index(script)]]
    for name in OWN[script]:
        text = definitions(script)[name]
        assert all(text != other.get(name) for other in before), f"{script}.{name} needs no entry"


def test_the_readme_shows_the_table():
    """Fails with a sentence changed in the table and not in the README."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for script, reasons in OWN.items():
        for name, reason in reasons.items():
            assert f"| `{script}.py` | `{name}` | {reason} |" in readme, f"{script}.{name}"
