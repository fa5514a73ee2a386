"""Seeds and random streams: no two parts of a run, and no two runs, share what they draw."""

import itertools
import signal

import numpy as np
import pytest
import torch

from common.seeding import STREAMS, RandomStream, derive_seed, episode_seed, initial_weights
from tests.conftest import load, of_ppo, tiny_args


def test_neighbouring_seeds_share_no_episode():
    """Fails with seed + 1000 * index + episode, and with every episode hashed into 31 bits (6 meet)."""
    keys = itertools.product(range(20), range(16), range(500))
    seeds = [episode_seed(seed, "env", index, episode) for seed, index, episode in keys]
    assert len(set(seeds)) == 20 * 16 * 500


def test_no_stream_or_index_repeats_another():
    """Fails with the stream left out of the key, and with an index of one number taken for that of two."""
    seeds = [
        derive_seed(seed, stream, *index)
        for seed in range(20)
        for stream in STREAMS
        for index in [(), *((i,) for i in range(20)), *itertools.product(range(5), repeat=2)]
    ]
    assert len(set(seeds)) == 20 * len(STREAMS) * (1 + 20 + 25)


def test_derived_seeds_stay_what_they_are():
    """Fails with any other derivation: a saved run could not be repeated. And with 32 bits: ints of 31,
    since np.random.seed and many simulators take no more."""
    assert derive_seed(0, "env", 0) == 1188727675
    assert derive_seed(7, "minibatch") == 1915825222
    assert episode_seed(0, "env", 0, 3) == derive_seed(0, "env", 0) + 3
    assert episode_seed(0, "env", 0, 2**31) == derive_seed(0, "env", 0)
    seeds = [derive_seed(seed, "init") for seed in range(200)]
    assert all(type(seed) is int and 0 <= seed < 2**31 for seed in seeds)
    assert max(seeds) > 2**30 and np.bitwise_or.reduce(seeds) == 2**31 - 1


def draws(stream):
    return torch.cat([stream.normal(3, 2).flatten(), stream.uniform(5), stream.permutation(7).float()])


def test_a_stream_repeats_itself_and_no_other():
    """Fails with one generator for all of them, and with a seed that does not depend on the stream's name."""
    assert torch.equal(draws(RandomStream(1, "action")), draws(RandomStream(1, "action")))
    for seed, name in ((1, "minibatch"), (2, "action")):
        assert not torch.equal(draws(RandomStream(1, "action")), draws(RandomStream(seed, name)))
    first, second = RandomStream(1, "action"), RandomStream(1, "minibatch")
    alone = draws(RandomStream(1, "action"))
    draws(second)  # whatever another stream, or torch's own generator, draws in between
    torch.rand(10)
    assert torch.equal(draws(first), alone)


def test_a_stream_goes_on_where_it_was_saved():
    """Fails with nothing restored."""
    stream, restored = RandomStream(1, "action"), RandomStream(2, "minibatch")
    draws(stream)
    restored.load_state_dict(stream.state_dict())
    assert torch.equal(draws(stream), draws(restored))


def test_draws_are_what_their_names_say():
    """Fails with uniform for normal."""
    stream = RandomStream(0, "action")
    normal, uniform = stream.normal(10_000, 2), stream.uniform(10_000, 2)
    assert normal.shape == uniform.shape == (10_000, 2) and normal.dtype == uniform.dtype == torch.float32
    assert abs(normal.mean()) < 0.03 and abs(normal.std() - 1) < 0.03
    assert 0 <= uniform.min() < 0.01 and 0.99 < uniform.max() < 1
    assert stream.permutation(100).sort().values.tolist() == list(range(100))


def test_initial_weights_follow_the_seed_and_leave_the_global_generator_alone():
    """Fails with torch.manual_seed in place of the fork, and with a fork that is not seeded."""
    before = torch.get_rng_state()

    def weights(seed):
        with initial_weights(seed):
            return torch.nn.Linear(3, 3).weight

    first = weights(0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    assert torch.equal(weights(0), first) and not torch.equal(weights(1), first)
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), initial_weights(0):
        torch.rand(1)
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), before)


def test_training_and_evaluation_leave_global_generators_threads_and_handlers_alone(script, tmp_path):
    """Fails with initial weights from torch.manual_seed, and with `train` not decorated."""
    threads = torch.get_num_threads()
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    states = torch.get_rng_state(), np.random.get_state()[1].copy()
    torch.set_num_threads(2)
    try:
        script.train(tiny_args(script, tmp_path))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert torch.equal(torch.get_rng_state(), states[0]) and (np.random.get_state()[1] == states[1]).all()


@of_ppo
def test_parts_of_a_run_draw_from_streams_of_their_own(script, tmp_path):
    """Fails with one generator for actions and minibatch order: twice the epochs would then change the second
    iteration's actions, and so what each environment's first episodes are."""
    runs = {"plain": {}, "epochs": {"update_epochs": 8}, "eval": {"eval_episodes": 0}}
    for name, changes in runs.items():
        args = tiny_args(script, tmp_path / name, **{"total_timesteps": 128, "learning_rate": 0.0, **changes})
        torch.manual_seed(len(name))  # what the rest of the process draws is of no account
        script.train(args)
    plain, epochs, evaluated = (load(tmp_path / name)["state"] for name in runs)
    for name, weight in plain["agent"].items():
        assert torch.equal(weight, epochs["agent"][name]) and torch.equal(weight, evaluated["agent"][name])
    for name in ("env_0", "env_1", "action_noise"):
        for key, value in plain[name].items():
            for other in (epochs, evaluated):
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[name][key])), (name, key)
    assert not torch.equal(plain["minibatch_order"]["state"], epochs["minibatch_order"]["state"])


def test_evaluation_plays_the_same_episodes_for_every_seed(script, tmp_path):
    """Fails with the run's seed in the evaluation's environment: two policies could then not be compared."""
    args = tiny_args(script, tmp_path, eval_episodes=3)
    agent = script.train(args)
    scores = script.evaluate(agent, args)
    args.seed = 1
    torch.manual_seed(5)
    assert script.evaluate(agent, args) == scores and len(set(scores[0])) > 1
