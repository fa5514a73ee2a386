"""The rule for repetition: a name that an earlier script has too is that script's text, in the same order,
unless a table says in one sentence why it has its own.

Earlier is as `all_scripts` has it: the four at the top, then variants/ by name. Where the scripts before it
have several texts of the name, the text must be one of these, whichever: a variant with two heads takes a2c's
`Agent` and ppo_continuous's `update`. So every text of a name but the first has one row, no text drifts
unseen, and a fix that is made in one script only fails here until it is made in all that share the text.
"""

import ast
import itertools
import shutil

import pytest

from tests import conftest
from tests.conftest import ROOT, all_scripts, path_of

# {script: {one name or several: why the text is none of those that the scripts before it have}}
OWN = {
    "ppo_discrete": {
        "Args": "other defaults, `mask_actions`, and no `squash` or `log_std_init`",
        "Agent": "the actor puts out logits, an action is one choice or several, and some may be forbidden",
        "check_args": "asks for choices, and has no `squash` to check",
        "train": "draws Gumbel noise for normal noise, asks for masks, and logs no `log_std`",
        "evaluate, evaluate_only": "ask the environment for its masks",
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
        "evaluate, evaluate_only": "have no `--env-kwargs` to pass on",
    },
    "variants.ppo_distributed": {
        "Args": "counts for all ranks, and `timeout`; no `squash`, no `optimizer`, no `break`",
        "update": "works on this rank's rows of each minibatch, and sums the gradients of all ranks",
        "check_args": "takes both kinds of actions",
        "train": "steps its share of the environments, and starts, stops and fails with the other ranks",
    },
    "variants.ppo_imitation": {
        "Args": "demonstrations, cloning, the discriminator and `--record`; no `squash`, no `optimizer`",
        "update": "takes the gradient inside: nothing is compiled",
        "check_args": "takes both kinds of actions, and no timesteps at all where cloning is all",
        "train": "reads demonstrations, clones, and takes its rewards from the discriminator",
    },
    "variants.ppo_memory": {
        "Args": "the memory and its chunks; no `squash`, no `optimizer`",
        "Agent": "like a2c's, with a memory in the place of the second hidden layer",
        "Batch": "holds chunks of steps, and the state from which each is replayed",
        "collect_rollout": "steps the memory, resets it, and keeps the states where chunks begin",
        "update": "replays whole chunks, and with `--recompute-advantages` does their GAE anew",
        "check_args": "takes both kinds of actions, and asks that chunks fit",
        "train": "carries the memory from rollout to rollout, and cuts the rollout into chunks",
        "evaluate": "begins each episode with an empty memory",
    },
    "variants.ppo_pixels": {
        "Args": "the net, the stack of frames and lives; no `optimizer`, no `norm_obs`",
        "Agent": "a convolutional body for both heads, which looks once where it is shared",
        "Rollout": "its observations are images, uint8",
        "collect_rollout": "keeps images as they are, and takes a lost life for a fall if asked",
        "update": "passes each minibatch through the body once",
        "check_args": "takes Discrete actions, and asks that the net fits the images",
        "train": "sets threads, stacks frames, and looks at `next_obs` only where the clock ran out",
        "evaluate, evaluate_only": "stack frames",
    },
    "variants.ppo_robot": {
        "Args": "frames, costs, mirror and controller; no `shared_trunk`",
        "Agent": "Gaussian alone; the actor reads a part of the row, and may be a controller",
        "Memory": "what the lanes are shown, and the actions they executed, outlast a rollout",
        "draw": "normal noise alone",
        "begin_iteration": "clears the robot's sums too",
        "step_lanes": "shows frames, measures how actions change, and takes its cost",
        "collect_rollout": "begins with what was shown last, and measures asymmetry",
        "minibatch_loss": "adds the mirror loss",
        "end_iteration": "writes the robot's metrics, and takes in what actor and critic are shown",
        "check_args": "asks for continuous actions, and for what mirror and controller need",
        "train": "shows the first frames",
        "evaluate": "stacks frames",
    },
    "variants.ppo_seeds": {
        "Args": "several seeds for one; no schedules of clip or entropy, no normalisation, no shared trunk",
        "Agent": "a `forward` that calls any method by name, for `functional_call`",
        "Memory": "an axis of seeds in front of everything",
        "step_lanes, collect_rollout": "sample by all agents, and fold seeds into lanes for the environment",
        "estimate_advantages": "folds seeds into lanes for `compute_gae`",
        "flatten_parameters": "makes one row for each agent",
        "minibatch_loss": "takes one vector of parameters, so that `torch.func.vmap` can map it over a stack",
        "update_minibatch, end_epoch, end_iteration": "clip, step, mask and measure each seed by itself",
        "read_metrics": "reads each seed's lines, and ends a seed that is no longer finite",
        "check_args": "asks for seeds that differ",
        "train": "builds an agent and three streams for each seed, and maps the gradient over the agents",
    },
}
ORDER: dict[str, str] = {}


def definitions(script):
    """{name: source text} of the top-level functions and classes, in the order of the file."""
    source = (conftest.ROOT / path_of(script)).read_text(encoding="utf-8")
    lines = source.splitlines()
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


def names_of_its_own(script):
    """The names that scripts before it have too, each with a text that none of them has."""
    scripts = all_scripts()
    before = [definitions(name) for name in scripts[: scripts.index(script)]]
    return {
        name
        for name, text in definitions(script).items()
        if any(name in other for other in before) and all(other.get(name) != text for other in before)
    }


def listed(script):
    return [name for names in OWN.get(script, {}) for name in names.split(", ")]


@pytest.mark.parametrize("script", all_scripts())
def test_the_same_name_is_the_same_text_or_is_listed(script):
    """Fails with one comment changed in one script's compute_gae, with a table entry that is missing, and
    with one for a text that an earlier script has."""
    assert sorted(listed(script)) == sorted(names_of_its_own(script)), script


@pytest.mark.parametrize("one, other", list(itertools.combinations(all_scripts(), 2)))
def test_the_same_names_come_in_the_same_order(one, other):
    """Fails with two functions swapped in one script, and with a script in ORDER that needs no exception."""
    a, b = definitions(one), definitions(other)
    in_order = [name for name in a if name in b] == [name for name in b if name in a]
    assert in_order or one in ORDER or other in ORDER
    assert not (in_order and one == all_scripts()[0] and other in ORDER), f"ORDER needs no {other}"


def test_a_variant_is_held_like_the_others(tmp_path, monkeypatch):
    """A variant is found, may take each name from any script before it, and needs a row for a text of its
    own. Fails with only the four scripts looked at, and with a text compared to the first script's alone."""
    (tmp_path / "variants").mkdir()
    (tmp_path / "variants/__init__.py").touch()
    for name in conftest.TOP_LEVEL:
        shutil.copy(ROOT / path_of(name), tmp_path)
    theirs = [definitions("a2c")["Agent"], definitions("ppo_discrete")["update"]]
    own = "def compute_gae(rewards):\n    return rewards"
    (tmp_path / "variants/mixed.py").write_text("\n\n\n".join([*theirs, own, "def new():\n    pass"]))
    (tmp_path / "variants/next.py").write_text(f"{own}  # by another way\n\n\n{theirs[0]}")
    monkeypatch.setattr(conftest, "ROOT", tmp_path)
    assert all_scripts() == [*conftest.TOP_LEVEL, "variants.mixed", "variants.next"]
    assert names_of_its_own("variants.mixed") == {"compute_gae"} == names_of_its_own("variants.next")


def test_docs_scripts_shows_the_tables():
    """Fails with a sentence changed in OWN or ORDER and not on the page, with a row that OWN does not have,
    and with the scripts in another order."""
    page = (ROOT / "docs/scripts.md").read_text(encoding="utf-8")
    lines = []
    for script in (script for script in all_scripts() if script in OWN):
        lines += [f"### `{path_of(script)}`", "| its own | why |", "| --- | --- |"]
        lines += [f"| `{'`, `'.join(names.split(', '))}` | {why} |" for names, why in OWN[script].items()]
    assert [line for line in page.splitlines() if line.startswith(("|", "### "))] == lines
    for script, why in ORDER.items():
        assert f"In `{path_of(script)}` {why}." in " ".join(page.split())
