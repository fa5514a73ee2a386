"""variants/ppo_pixels.py: how images reach the networks, what a stack of frames holds, and what a lost life
ends; and the environments that are seen."""

import json
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch

import variants.ppo_pixels as script
from common.cli import Refusal
from common.envs import make_env
from common.envs.cartpole import CartPoleContinuous
from common.envs.pixels import CartPolePixels
from tests.conftest import load, metrics, tiny_args
from tests.envs_for_tests import Frames
from tests.test_rollout import watch
from tests.test_run import cut, resumed


def frames(frame_stack=1, **kwargs):
    return make_env("ProbeFrames-v0", json.dumps(kwargs), frame_stack=frame_stack)


def args_for(out, env_kwargs=None, **changes):
    if env_kwargs is not None:
        changes = {"env_id": "ProbeFrames-v0", "env_kwargs": json.dumps(env_kwargs), **changes}
    return tiny_args(script, out, **{"eval_episodes": 0, "total_timesteps": 3 * 2 * 32, **changes})


# From an environment to uint8[C, H, W]


@pytest.mark.parametrize("layout, shape", [("HW", (1, 5, 6)), ("HWC", (3, 5, 6)), ("CHW", (3, 5, 6))])
@pytest.mark.parametrize("stack", [1, 2])
def test_channels_come_first_wherever_they_stood(layout, shape, stack):
    """Fails with an axis taken for another, and with the stack behind the channels."""
    env = frames(stack, layout=layout, draw=True)
    obs, _ = env.reset()
    assert env.image_shape == obs.shape == (stack * shape[0], *shape[1:])
    assert obs.dtype == np.uint8 and obs.flags.c_contiguous
    raw = np.array(env.raw_obs).reshape(stack, *env.frame_shape)
    for k in range(stack):
        for y in range(5):
            for x in range(6):
                pixel = raw[k][:, y, x] if layout == "CHW" else raw[k][y, x]
                assert np.array_equal(obs[k * shape[0] : (k + 1) * shape[0], y, x], np.atleast_1d(pixel))


def test_both_channel_orders_give_the_same_output():
    """The same picture as (H, W, C) and as (C, H, W). Fails with a reshape for the transpose."""
    torch.manual_seed(0)
    last, first = (frames(layout=layout, draw=True) for layout in ("HWC", "CHW"))
    image, _ = last.reset()
    first.reset()
    first.unwrapped.show = lambda: last.raw_obs.transpose(2, 0, 1)
    other, *_ = first.step(0)
    agent = script.Agent(last, script.Args(env_id="ProbeFrames-v0"))
    with torch.no_grad():
        one, two = (agent.logits_value(torch.tensor(x[None])) for x in (image, other))
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


@pytest.mark.parametrize("dtype, brightest", [("uint8", 255), ("uint8", 1), ("bool", 1)])
def test_the_brightest_pixel_is_one(monkeypatch, dtype, brightest):
    """Fails with every image divided by 255: a board of zeros and ones would hardly be seen."""
    env = frames(dtype=dtype, brightest=brightest)
    agent = script.Agent(env, script.Args())
    assert env.brightest == brightest
    inputs, first = [], agent.bodies[0][0]
    forward = first.forward
    monkeypatch.setattr(first, "forward", lambda x: inputs.append(x) or forward(x))
    agent.best(torch.full((1, *env.image_shape), brightest, dtype=torch.uint8))
    assert inputs[0].dtype == torch.float32 and (inputs[0] == 1).all()


@pytest.mark.parametrize(
    "make, sentence",
    [
        (
            lambda: make_env("CartPole-v1", frame_stack=1),
            r"observes float32\[4\], and this script takes images",
        ),
        (lambda: frames(dtype="float"), r"observes float32\[5, 6\], and this script takes images of uint8"),
        (lambda: make_env("ProbeSpaces-v0", '{"observation": "dict"}', frame_stack=2), "observes Dict"),
    ],
)
def test_what_is_no_image_is_refused_by_name(make, sentence):
    """Fails with the check of the dtype or of the number of axes left out."""
    with pytest.raises(Refusal, match=sentence):
        make()


def test_an_image_of_which_the_channels_cannot_be_told_is_refused(monkeypatch):
    """Fails with a guess."""
    monkeypatch.setitem(Frames.SHAPES, "cube", (5, 6, 5))
    with pytest.raises(Refusal, match=r"images of \[5, 6, 5\], where the first axis or the last"):
        frames(layout="cube")


def test_an_image_that_is_none_after_all_is_refused():
    """The space says uint8, the environment returns floats. Fails with a cast that cuts 0.5 to 0."""
    env = frames()
    env.unwrapped.show = lambda: np.full((5, 6), 0.5)
    with pytest.raises(Exception, match="returned an image of float64, and its space says uint8"):
        env.reset()


# The stack


def levels(obs):
    """One number a frame, for images of which all pixels are alike."""
    assert all((frame == frame.flat[0]).all() for frame in obs)
    return [int(frame.flat[0]) for frame in obs]


def test_an_episode_begins_with_its_first_frame_in_every_place():
    """The environment writes into one array again and again. Fails with frames of the episode before, with
    zeros, and with frames that are not copied."""
    env = frames(3, length=3)
    shown = [levels(env.reset()[0])]
    for _ in range(2):
        for _ in range(3):
            shown.append(levels(env.step(0)[0]))
        shown.append(levels(env.reset()[0]))
    assert shown[:5] == [[0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3], [3, 3, 3]]
    assert shown[5:] == [[3, 3, 4], [3, 4, 5], [4, 5, 6], [6, 6, 6]]


def test_at_a_time_limit_next_obs_is_that_episodes_stack(tmp_path, monkeypatch):
    """And V there is what the critic makes of it. Fails with next_obs taken after the reset, and with V of
    the next episode's start."""
    rollouts, values = (
        watch(monkeypatch, script, "collect_rollout"),
        watch(monkeypatch, script, "compute_gae"),
    )
    changes = {"frame_stack": 3, "num_envs": 1, "num_steps": 8, "total_timesteps": 8, "learning_rate": 0.0}
    args = args_for(tmp_path, {"max_episode_steps": 4, "length": 99}, num_minibatches=1, **changes)
    agent = script.train(args)
    (rollout, _), (_, _, next_values, _, truncated, *_) = rollouts[0][1], values[0][0]
    assert [levels(x) for x in rollout.next_obs[:, 0].numpy()][2:5] == [[1, 2, 3], [2, 3, 4], [4, 4, 5]]
    assert [levels(x) for x in rollout.obs[:, 0].numpy()][3:6] == [[1, 2, 3], [4, 4, 4], [4, 4, 5]]
    assert truncated[:, 0].tolist() == [False, False, False, True] * 2
    with torch.no_grad():
        expected = agent.value(rollout.next_obs[:, 0])
    torch.testing.assert_close(next_values[:, 0], expected, rtol=0, atol=1e-5)


def test_images_stay_uint8_in_the_rollout_and_in_the_batch(tmp_path, monkeypatch):
    """Fails with a float copy kept of either: four times the memory."""
    rollouts, updates = watch(monkeypatch, script, "collect_rollout"), watch(monkeypatch, script, "update")
    script.train(args_for(tmp_path))
    (rollout, _), batch = rollouts[0][1], updates[0][0][3]
    assert rollout.obs.dtype == rollout.next_obs.dtype == batch.obs.dtype == torch.uint8


# The networks


@pytest.mark.parametrize("layout, net", [("HW", "small"), ("36", "nature")])
def test_every_pixel_reaches_the_first_layer(layout, net):
    """The gradient of a logit and of V by the image is nowhere zero. Fails with a stride that jumps over
    pixels, and with a body cut off before its linear layer."""
    env = frames(layout=layout)
    torch.manual_seed(0)
    agent = script.Agent(env, script.Args())
    assert script.default_net(env) == net
    image = torch.rand(1, *env.image_shape, requires_grad=True)
    logits, value = agent.logits_value(image)
    (logits.sum() + value.sum()).backward()
    height, width = (36, 36) if net == "nature" else (5, 6)  # strides that do not fit leave out the edge
    assert (image.grad[0, :, :height, :width] != 0).all()
    assert all((p.grad != 0).any() for p in agent.bodies[0][0].parameters())


def test_shared_bodies_see_once():
    """Fails with --shared-trunk without effect, and with a pass for each head."""
    env = frames()
    image = torch.zeros(1, *env.image_shape, dtype=torch.uint8)
    for shared_trunk, bodies in ((True, 1), (False, 2)):
        agent = script.Agent(env, script.Args(shared_trunk=shared_trunk))
        seen = []
        for body in agent.bodies:
            linear, forward = body[-2], body[-2].forward
            linear.forward = lambda x, forward=forward, seen=seen: seen.append(x) or forward(x)
        _, value = agent.logits_value(image)
        assert len(agent.bodies) == len(seen) == bodies
        assert torch.equal(value, agent.value(image))


@pytest.mark.parametrize("flags", [{}, {"shared_trunk": False}, {"frame_stack": 2}])
def test_before_the_first_gradient_step_the_policy_is_the_old_one(monkeypatch, tmp_path, flags):
    """Fails with old log-probabilities of other images than the update sees."""
    calls = watch(monkeypatch, script, "ppo_loss")
    args = args_for(tmp_path, learning_rate=1e-2, **flags)
    script.train(args)
    steps = args.num_minibatches * args.update_epochs
    ratios = [((x[0] - x[3]).exp() - 1).abs().max().item() for x, _, _ in calls]
    assert max(ratios[::steps]) < 1e-5 and min(ratios[steps - 1 :: steps]) > 1e-4


@pytest.mark.parametrize(
    "env_kwargs, changes, sentence",
    [
        (
            {},
            {"net": "nature"},
            "ProbeFrames-v0 has images of 5 x 6, and --net nature needs 36 x 36",
        ),
        ({"lives": False}, {"terminal_on_life_loss": True}, "ProbeFrames-v0 has no lives: leave it out"),
        ({}, {"frame_stack": 0}, "--frame-stack"),
        ({}, {"num_minibatches": 3}, "--num-minibatches 3 does not divide 64 rows"),
        (None, {"env_id": "CarRacing-v3"}, "has Box actions, ppo_pixels.py takes Discrete ones"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, env_kwargs, changes, sentence):
    """Fails with the check left out."""
    if changes.get("env_id") == "CarRacing-v3":
        pytest.importorskip("Box2D")
    with pytest.raises(Refusal, match=sentence):
        script.train(args_for(tmp_path, env_kwargs, **changes))


# Lives


@pytest.mark.parametrize("ends", [False, True])
def test_a_lost_life_is_a_fall_only_if_asked(tmp_path, monkeypatch, ends):
    """The game goes on either way, and its return is of the whole game. Fails with a reset at a lost life,
    with returns of a life, and with the flag without effect."""
    rollouts = watch(monkeypatch, script, "collect_rollout")
    changes = {"num_envs": 1, "num_steps": 16, "total_timesteps": 16, "num_minibatches": 1}
    script.train(args_for(tmp_path, {"length": 7}, terminal_on_life_loss=ends, **changes))
    rollout, finished = rollouts[0][1]
    lost = [2, 4, 6, 7, 9, 11, 13, 14, 16] if ends else [7, 14]
    assert (rollout.terminated[:, 0].nonzero()[:, 0] + 1).tolist() == lost
    assert finished == [(7.0, 7), (7.0, 7)]


def test_lives_that_are_told_only_later_are_no_loss():
    """Fails with a comparison to the None of the reset."""
    env = frames()
    info = env.unwrapped.info
    env.unwrapped.info = dict
    env.reset()
    env.unwrapped.info = info
    env.step(0)
    assert env.lives == 3 and not env.life_lost
    env.step(0)
    assert env.lives == 2 and env.life_lost


# A run


@pytest.mark.parametrize("flags", [{}, {"frame_stack": 3, "norm_reward": True, "shared_trunk": False}])
def test_cut_and_resumed_is_uninterrupted(tmp_path, flags):
    """Fails with the frames of the running episode not brought back, and with a part left out of `state`."""
    script.train(args_for(tmp_path / "whole", **flags))
    assert cut(script, args_for(tmp_path / "cut", **flags), at=2) == 130
    script.train(resumed(script, tmp_path / "cut", eval_episodes=0))
    one, other = ((tmp_path / name / "checkpoint.pt").read_bytes() for name in ("cut", "whole"))
    assert one == other


def test_eval_only_repeats_the_evaluation(tmp_path, capsys):
    """Fails with another frame stack in the evaluation."""
    script.train(args_for(tmp_path, env_id="CartPolePixels-v0", frame_stack=2, eval_episodes=2))
    saved = load(tmp_path)["args"]
    script.evaluate_only(script.Args(**saved, eval_episodes=2, eval_only=str(tmp_path)))
    files = [json.loads((tmp_path / name).read_text()) for name in ("summary.json", "eval.json")]
    assert files[0]["eval_returns"] == files[1]["eval_returns"]
    assert len(metrics(tmp_path)) == 3


def test_the_recording_shows_the_image(tmp_path, monkeypatch):
    """Fails with a frame that is not what the environment shows, and with a warning for a picture."""
    import rerun as rr

    images, image = [], rr.Image
    monkeypatch.setattr(rr, "Image", lambda x, *more: images.append(x) or image(x, *more))
    script.train(args_for(tmp_path, rerun=True, eval_episodes=1))
    assert len(images) == 9 and images[0].shape == (200, 100, 3)
    assert {(x[::20, ::20, 0] > 0).sum() for x in images} <= {1, 2}  # ball and paddle, or one over the other
    assert (tmp_path / "recording.rrd").stat().st_size > 1000


def test_an_environment_that_draws_nothing_is_shown_as_it_is_seen():
    """Fails with the newest frame taken for the oldest, and with channels that look alike."""
    env = frames(2, layout="HWC", draw=True)
    env.reset()
    obs, *_ = env.step(0)
    picture = env.render()
    assert picture.shape == (200, 240, 3) and picture.dtype == np.uint8
    expected = (obs[3:] * np.array([85, 170, 255])[:, None, None] / 255).max(0)
    np.testing.assert_allclose(picture[::40, ::40, 0], expected, atol=1)


# The environments


def test_catch_is_caught_by_who_stands_under_the_ball():
    """Every pair of columns, by hand. Fails with a paddle that leaves the board, a reward a step early, and a
    start that is always the same."""
    env, starts = gym.make("Catch-v0", rows=4, columns=3).unwrapped, set()
    for seed in range(60):
        image, _ = env.reset(seed=seed)
        ball, paddle = int(image[0].argmax()), int(image[3].argmax())
        starts.add((ball, paddle))
        rewards, done = [], False
        while not done:
            move = 1 + np.sign(ball - paddle)
            paddle += move - 1
            image, reward, done, _, _ = env.step(move)
            rewards.append(reward)
            assert image.sum() == 255 * (1 + (not (done and ball == paddle)))
            assert image[len(rewards), ball] == image[3, paddle] == 255
        assert rewards == [0, 0, 1]
    assert len(starts) == 9
    env.reset(seed=0)
    missed = [env.step(0 if env.ball else 2)[1] for _ in range(3)]
    assert missed == [0, 0, -1]
    with pytest.raises(Refusal, match="rows is 1"):
        make_env("Catch-v0", '{"rows": 1}', frame_stack=1)


def test_the_pictured_cart_pole_is_the_cart_pole_and_its_picture_tells_it_all():
    """Rewards and ends are those of the cart-pole, and centres of mass in the picture give back position and
    angle. Fails with a picture of the state before, and with the sign of the angle turned."""
    pictured, plain = CartPolePixels(), CartPoleContinuous()
    image, _ = pictured.reset(seed=3)
    plain.reset(seed=3)
    for action in [1, 1, 0, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]:
        image, *rest = pictured.step(action)
        obs, *expected = plain.step(np.array([2.0 * action - 1]))
        assert rest == expected and image.dtype == np.uint8 and image.shape == (40, 60)
        columns = np.arange(60)
        cart = (image[35] * columns).sum() / image[35].sum()
        tip = (image[0] * columns).sum() / image[0].sum()
        assert cart == pytest.approx(29.5 * (1 + obs[0] / 2.5), abs=0.1)
        assert tip - cart == pytest.approx(33 * np.sin(obs[2]), abs=0.2)


# Packages of games


def test_games_that_are_not_installed_are_named_with_their_extra(monkeypatch):
    """Fails with Gymnasium's own words, which name no extra."""
    monkeypatch.setitem(sys.modules, "minatar.gym", None)
    monkeypatch.delitem(gym.registry, "MinAtar/Breakout-v1", raising=False)
    with pytest.raises(Refusal, match=r'MinAtar/Breakout-v1 needs .*pip install -e "\.\[minatar\]"'):
        make_env("MinAtar/Breakout-v1", frame_stack=1)


@pytest.mark.extras
def test_minatar_trains_and_is_shown(tmp_path, capsys):
    """Boards of zeros and ones; the recording costs no warning. Fails with its games not registered."""
    args = args_for(tmp_path, env_id="MinAtar/Breakout-v1", rerun=True, eval_episodes=1)
    agent = script.train(args)
    assert agent.brightest == 1 and agent.bodies[0][0].in_channels == 4
    assert "recording:" not in capsys.readouterr().out


@pytest.mark.extras
def test_pong_trains_two_iterations_and_resumes(tmp_path):
    """84 x 84 in grey, four frames stacked. Fails with Atari's own frames, 210 x 160 in colour."""
    flags = {"env_id": "ALE/Pong-v5", "frame_stack": 4, "num_envs": 1, "num_steps": 16, "num_minibatches": 2}
    args = args_for(tmp_path / "whole", terminal_on_life_loss=True, total_timesteps=32, **flags)
    agent = script.train(args)
    assert agent.bodies[0][0].weight.shape == (32, 4, 8, 8)
    again = args_for(tmp_path / "cut", terminal_on_life_loss=True, total_timesteps=32, **flags)
    assert cut(script, again, at=1) == 130
    script.train(resumed(script, tmp_path / "cut", eval_episodes=0))
    one, other = ((tmp_path / name / "checkpoint.pt").read_bytes() for name in ("cut", "whole"))
    assert one == other
