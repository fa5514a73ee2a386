"""PPO with what robots need of it, on environments that are rows of tensors.

To `ppo_gpu_batched.py` it adds the frames that a policy is shown, a critic that is told more, costs that keep
actions smooth, a mirror loss, and a PID controller in the actor's place.

The idea to take away: none of these touches PPO itself. GAE, the clipped surrogate and the update are the
parent's, byte for byte. What robots ask for goes into what is observed, what is paid, and one more term of
the loss. With all of it off, as it is by default, it trains to its parent's weights by the same flags.

    python -m variants.ppo_robot --seed 0                                # run it: Pendulum-v1
    python -m variants.ppo_robot --seed 0 --action-rate-cost 0.1         # smoother, for about the same score
    python -m variants.ppo_robot --seed 0 --mirror-coef 1                # left and right alike
    python -m variants.ppo_robot --env-id SetPoint-v0 --actor pid        # its gains are what is learned
    python -m variants.ppo_robot --env-id CartPoleContinuousNoVelocity-v0 --frame-stack 4
    python -m variants.ppo_robot --env-id Hopper-v5 --num-envs 64        # MuJoCo on all cores: extra mujoco
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor, nn

from common.cli import check, check_ranges, command_line, flag, load_checkpoint, parse_args
from common.envs import FlatEnv, RewardScaling, RunningNorm, make_env
from common.envs.batched import BatchedEnv, make_batched_env
from common.envs.frames import Frames
from common.metrics import report_evaluation, require_finite
from common.process import compiled, restores_process
from common.run_folder import Run
from common.seeding import RandomStream, initial_weights

SCRIPT = Path(__file__).stem
ENDED = ("episodes", "return_sum", "length_sum")  # sums over the episodes that ended in an iteration
AT_LIMIT = ("limits", "limit_value_sum")  # and over those that ended at a time limit
LOSSES = ("loss", "policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac")
SCHEDULED = ("learning_rate", "clip_coef", "ent_coef")
ROBOT = ("action_rate", "action_smoothness", "asymmetry")
METRICS = (*ENDED, *AT_LIMIT, *LOSSES, "diverged", "explained_variance", *SCHEDULED, *ROBOT)


@dataclass
class Args:
    seed: int = 0  # every random stream of the run follows from it
    env_id: str = "Pendulum-v1"  # one of the batched environments in common/envs/, with continuous actions
    actor_words: int | None = None  # words of an observation that the actor sees; default: the environment's
    privileged_critic: bool = True  # the critic sees all words
    frame_stack: int = 1  # frames that are shown, the newest first
    action_history: int = 0  # executed actions in each frame, the newest first
    action_rate_cost: float = 0.0  # taken from the reward for each |a_t - a_(t-1)|^2
    action_smoothness_cost: float = 0.0  # and for each |a_t - 2 a_(t-1) + a_(t-2)|^2
    mirror_coef: float = 0.0  # weight of the mirror loss
    actor: Literal["mlp", "p", "pd", "pid"] = "mlp"  # a network, or a controller whose gains it learns
    base_gain: float = 1.0  # each gain of a controller before training
    total_timesteps: int = 204_800  # environment steps; rounded down to whole rollouts
    num_envs: int = 16  # lanes stepped together
    num_steps: int = 128  # steps of each lane in a rollout
    learning_rate: float = 1e-3  # Adam's step size
    anneal_lr: bool = True  # learning rate falls linearly to 0; turn it off for --adaptive-kl
    adaptive_kl: float | None = None  # learning rate that steers approx_kl to this; see --target-kl
    gamma: float = 0.99  # discount
    gae_lambda: float = 0.9  # 0: one-step TD error; 1: all rewards to the rollout's end, more variance
    num_minibatches: int = 16  # gradient steps an epoch
    update_epochs: int = 10  # passes over each rollout
    norm_adv: bool = True  # advantages to mean 0, std 1 in each minibatch
    clip_coef: float = 0.2  # how far the ratio may move before the surrogate stops paying
    anneal_clip: bool = False  # clip_coef falls linearly to 0
    clip_ratio: bool = True  # the surrogate clip itself
    clip_vloss: bool = False  # clip the value's move too (OpenAI Baselines, not the paper)
    ent_coef: float = 0.0  # weight of the entropy bonus
    anneal_ent: bool = False  # ent_coef falls linearly to 0
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # global gradient-norm clip; 0: off
    target_kl: float | None = None  # mask further epochs once approx_kl passes it; see --adaptive-kl
    hidden_dim: int = 64  # width of both hidden layers
    orthogonal_init: bool = True  # orthogonal weights, zero biases; off: PyTorch's own
    log_std_init: float = 0.0  # initial log standard deviation of a continuous action
    norm_obs: bool = False  # observations to running mean 0, std 1
    norm_reward: bool = True  # rewards (and so V) divided by the running std of the discounted return
    divergence_bound: float = 1e6  # a lane is ended when its observation or reward is not below it
    break_: Annotated[bool, flag(name="break")] = False  # BUG on purpose: a time limit is taken for a fall
    break_reset: bool = False  # BUG on purpose: a time limit bootstraps from the next episode's first obs
    device: str = field(default_factory=lambda: "cuda" if torch.cuda.is_available() else "cpu")  # of it all
    threads: int = 1  # of torch on the CPU; the bytes depend on it. MuJoCo takes all cores, and they do not
    cuda_graph: bool = True  # replay each iteration as CUDA graphs, where the device is CUDA
    compile: bool = False  # fuse the functions of an iteration by torch.compile
    log_every: int = 10  # iterations between reads from the device
    eval_episodes: int = 20  # episodes of the final evaluation; 0: none
    eval_max_steps: int = 10_000  # an evaluation episode that has not ended by then is stopped
    checkpoint_every: int = 10  # iterations between checkpoints
    rerun: bool = True  # write recording.rrd
    watch: bool = False  # open the Rerun viewer and stream to it while training
    out: str | None = None  # the run's folder; default: a fresh one under runs/
    resume: str | None = None  # a run's folder: go on in it
    eval_only: str | None = None  # a run's folder: only evaluate its checkpoint


def layer_init(layer: nn.Linear, gain: float) -> nn.Linear:
    """Orthogonal weights scaled by `gain` (Saxe et al. 2014, arXiv:1312.6120) and zero biases."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def gaussian_log_prob(mean: Tensor, log_std: Tensor, action: Tensor) -> Tensor:
    """log N(action; mean, exp(log_std)^2), summed over the last axis: (..., action_dim) -> (...)."""
    z = (action - mean) * torch.exp(-log_std)
    return (-0.5 * z**2 - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


def gaussian_entropy(log_std: Tensor) -> Tensor:
    """Differential entropy of the diagonal Gaussian in nats: (action_dim,) -> ()."""
    return (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)


def through(net: nn.Sequential, x: Tensor) -> Tensor:
    """net(x), without the checks for hooks: around layers this small they cost as much as the arithmetic."""
    for layer in net:
        x = layer.forward(x)
    return x


class Controller(nn.Module):
    """u = Kp e + Ki (integral of e) + Kd (rate of e), with gains that a network sets by what is observed:
    base_gain * 10^tanh(its output), so base_gain before training and never more than ten times off. Errors
    are taken as they are: normalising integral and error apart would move the point that they settle at. The
    network does not see the integral: a Ki that falls as it grows would undo what it is there for."""

    def __init__(self, lanes: BatchedEnv, frames: Frames, gains: nn.Sequential, args: Args) -> None:
        super().__init__()
        errors, terms = torch.tensor(lanes.errors), ["pid".index(term) for term in args.actor]
        self.register_buffer("words", errors[:, terms], persistent=False)
        shown = torch.ones(frames.stack, frames.frame)
        shown[:, errors[:, 1]] = 0
        self.register_buffer("shown", shown.flatten(), persistent=False)
        self.gains, self.base = gains, args.base_gain

    def forward(self, x: Tensor) -> Tensor:
        """(..., obs_dim) -> (..., action_dim)."""
        gains = self.base * 10 ** through(self.gains, x * self.shown).unflatten(-1, self.words.shape).tanh()
        errors = x.index_select(-1, self.words.flatten()).unflatten(-1, self.words.shape)
        return (gains * errors).sum(-1)


class Agent(nn.Module):
    """Actor and critic: hidden -> hidden -> action_dim, and -> 1. The actor reads the first words of the row
    alone and puts out the mean of a Gaussian whose standard deviation does not depend on the observation."""

    def __init__(self, env: FlatEnv, args: Args) -> None:
        super().__init__()
        lanes = make_batched_env(args.env_id, 1)
        self.frames = Frames(lanes, args)
        self.obs_dim, self.actor_dim = self.frames.obs_dim, self.frames.actor_dim
        self.action_dim, self.mirror_coef = env.action_dim, args.mirror_coef
        init = layer_init if args.orthogonal_init else lambda layer, gain: layer
        width = args.hidden_dim

        def trunk(dim: int) -> list[nn.Module]:
            # A layer: its statistics are saved with the weights, and a forward pass never changes them.
            norm = RunningNorm(dim) if args.norm_obs else nn.Identity()
            first = init(nn.Linear(dim, width), math.sqrt(2))
            second = init(nn.Linear(width, width), math.sqrt(2))
            return [norm, first, nn.Tanh(), second, nn.Tanh()]

        actor_trunk, critic_trunk = trunk(self.actor_dim), trunk(self.obs_dim)
        # The small gain makes the first policy nearly the same in every state.
        outputs = env.action_dim * (1 if args.actor == "mlp" else len(args.actor))
        self.actor = nn.Sequential(*actor_trunk, init(nn.Linear(width, outputs), 0.01))
        if args.actor != "mlp":
            nn.init.zeros_(self.actor[-1].weight)
            nn.init.zeros_(self.actor[-1].bias)
            self.actor = nn.Sequential(Controller(lanes, self.frames, self.actor, args))
        self.critic = nn.Sequential(*critic_trunk, init(nn.Linear(width, 1), 1.0))
        self.norms = [layer for layer in self.modules() if isinstance(layer, RunningNorm)]
        self.log_std = nn.Parameter(torch.full((env.action_dim,), args.log_std_init))
        self.low, self.high = env.low, env.high

    def sample(self, obs: Tensor, noise: Tensor) -> Tensor:
        """An action for each row."""
        return self.best(obs) + self.log_std.exp() * noise

    def best(self, obs: Tensor) -> Tensor:
        """The action an evaluation takes, the mean: for rows (..., obs_dim) or the actor's part of them."""
        return through(self.actor, obs[..., : self.actor_dim])

    def value(self, obs: Tensor) -> Tensor:
        """V(obs): (..., obs_dim) -> (...)."""
        return through(self.critic, obs).squeeze(-1)

    def forward(self, obs: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """log_prob, entropy, value and asymmetry together, for `functional_call`."""
        asymmetry = self.asymmetry(obs) if self.mirror_coef > 0 else 0.0
        return *self.log_prob_entropy(obs, action), self.value(obs), asymmetry

    def env_action(self, action: Tensor) -> np.ndarray:
        """What the environment is given: the vector clipped to its bounds in their own type."""
        return action.cpu().numpy().clip(self.low, self.high)

    def log_prob_entropy(self, obs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of actions (...,), and the entropy of the policy, ()."""
        return gaussian_log_prob(self.best(obs), self.log_std, action), gaussian_entropy(self.log_std)

    def asymmetry(self, obs: Tensor) -> Tensor:
        """The mirror loss (after Yu, Turk and Liu 2018, arXiv:1801.08093): the mean of
        (mu(M_obs s) - M_act mu(s))^2 over rows (..., obs_dim) and actions, (), the second term held fixed."""
        target = self.frames.mirrored_act(self.best(obs).detach())
        return (self.best(self.frames.mirrored_obs(obs)) - target).square().mean()


class Memory(nn.Module):
    """Every tensor that one function of an iteration leaves for the next, at an address that never changes.
    T = num_steps, N = num_envs. What a checkpoint needs of them is in the state_dict."""

    def __init__(self, agent: Agent, env: BatchedEnv, num_parameters: int, args: Args) -> None:
        super().__init__()
        T, N = args.num_steps, args.num_envs
        minibatch = T * N // args.num_minibatches

        def add(*names: str, shape: tuple = (), dtype: torch.dtype | None = None, saved=False) -> None:
            for name in names:
                self.register_buffer(name, torch.zeros(shape, dtype=dtype, device=args.device), saved)

        # What happened, row by row of time.
        add("obs", shape=(T + 1, N, agent.obs_dim))
        add("next_obs", shape=(T, N, agent.obs_dim))
        add("action", shape=(T, N, agent.action_dim))
        add("reward", shape=(T, N))
        add("terminated", "truncated", "sound", shape=(T, N), dtype=torch.bool)
        add("episodic_return", "episodic_length", shape=(N,), saved=True)
        # What the lanes are shown now, and the actions that were executed last, newest first.
        add("shown", shape=(N, agent.obs_dim), saved=True)
        add("past", shape=(N, max(2, args.action_history), agent.action_dim), saved=True)
        # All random numbers of an iteration, drawn before it.
        add("action_noise", shape=(T, N, agent.action_dim))
        add("reset_noise", shape=(T, N, env.reset_noise_dim))
        add("order", shape=(args.update_epochs, args.num_minibatches, minibatch), dtype=torch.int64)
        # The update.
        add("rows", shape=(T * N, agent.obs_dim + agent.action_dim + 4))
        add("index", shape=(minibatch,), dtype=torch.int64)
        add("active", dtype=torch.bool)
        add("adam_step", saved=True)
        add("exp_avg", "exp_avg_sq", shape=(num_parameters,), saved=True)
        # What is scheduled and what is measured.
        add("iteration", *SCHEDULED, saved=True)
        for name in SCHEDULED:
            self.get_buffer(name).fill_(getattr(args, name))
        add("ended", shape=(len(ENDED),))
        add("at_limit", shape=(len(AT_LIMIT),))
        add("losses", "epoch_sum", shape=(len(LOSSES),))
        add("diverged", "explained_variance")
        add("robot", shape=(len(ROBOT),))
        add("metrics", shape=(args.log_every, len(METRICS)))


# The functions of an iteration, in the order in which they run. Each after `draw` reads and writes tensors in
# place and decides nothing by the value of one, so that a CUDA graph replays it exactly.


def draw(memory: Memory, agent: Agent, streams: list[RandomStream]) -> None:
    """All random numbers of one iteration: action noise, reset noise and minibatch order."""
    action, reset, order = (stream.generator for stream in streams)
    memory.action_noise.normal_(generator=action)
    memory.reset_noise.uniform_(generator=reset)
    for epoch in memory.order:
        torch.randperm(epoch.numel(), generator=order, out=epoch.view(-1))


@torch.no_grad()
def begin_iteration(memory: Memory, args: Args) -> None:
    """Count the iteration, set what is annealed for it, and clear its sums."""
    left = 1 - memory.iteration / (args.total_timesteps // (args.num_envs * args.num_steps))
    for name, annealed in zip(SCHEDULED, (args.anneal_lr, args.anneal_clip, args.anneal_ent), strict=True):
        if annealed:
            memory.get_buffer(name).copy_(getattr(args, name) * left)
    memory.iteration.add_(1)
    for total in (memory.ended, memory.at_limit, memory.diverged, memory.robot):
        total.zero_()
    memory.active.fill_(True)


@torch.no_grad()
def step_lanes(agent: Agent, env: BatchedEnv, memory: Memory, args: Args, *row: Tensor) -> None:
    """Step every lane once and write what happened into one row of the rollout. What changes of actions cost
    is taken from the recorded reward, and not from the return that is logged.

    A lane whose observation or reward diverges is ended before anything of it is recorded: terminated, with
    reward 0 and its own obs for next_obs. A NaN is found too, since abs(nan) < bound is false.
    """
    noise, reset_noise, obs, obs_after, next_obs, action, reward, terminated, truncated, sound = row
    action.copy_(agent.sample(obs, noise))
    executed = action.clamp(agent.frames.low, agent.frames.high)
    change = executed - memory.past[:, 0]
    bend = change - (memory.past[:, 0] - memory.past[:, 1])
    past = torch.cat([executed.unsqueeze(1), memory.past[:, :-1]], 1)
    seen, paid, fell, timed_out = env.advance(action)
    shown = agent.frames.after(obs, seen, past)
    sound.copy_((shown.abs() < args.divergence_bound).all(-1) & (paid.abs() < args.divergence_bound))
    next_obs.copy_(torch.where(sound.unsqueeze(-1), shown, obs))
    reward.copy_(torch.where(sound, paid, 0.0))
    terminated.copy_(fell | ~sound)
    truncated.copy_(timed_out)
    done = terminated | truncated
    env.reset_lanes(done, reset_noise)
    obs_after.copy_(torch.where(done.unsqueeze(-1), agent.frames.first(env.obs()), next_obs))
    memory.past.copy_(torch.where(done.reshape(-1, 1, 1), 0.0, past))

    # What there was no action before to differ from is no change.
    rate = torch.where(sound & (memory.episodic_length >= 1), change.square().sum(-1), 0.0)
    smoothness = torch.where(sound & (memory.episodic_length >= 2), bend.square().sum(-1), 0.0)
    memory.robot[:2].add_(torch.stack([rate, smoothness]).sum(1) / memory.reward.numel())
    memory.episodic_return.add_(reward)
    memory.episodic_length.add_(1)
    ended = torch.stack([done, done * memory.episodic_return, done * memory.episodic_length])
    memory.ended.add_(ended.sum(1))  # as ENDED
    memory.diverged.add_((~sound).sum())
    memory.episodic_return.mul_(~done)
    memory.episodic_length.mul_(~done)
    if args.action_rate_cost > 0 or args.action_smoothness_cost > 0:
        reward.sub_(args.action_rate_cost * rate + args.action_smoothness_cost * smoothness)


def collect_rollout(step: Callable, agent: Agent, env: BatchedEnv, memory: Memory, args: Args) -> None:
    """`step` every lane num_steps times, with noise that is drawn already; then measure how far the policy is
    from its mirror image, in states that no update has seen."""
    memory.obs[0].copy_(memory.shown)
    for row in zip(
        memory.action_noise, memory.reset_noise, memory.obs[:-1], memory.obs[1:], memory.next_obs,
        memory.action, memory.reward, memory.terminated, memory.truncated, memory.sound, strict=True,
    ):  # fmt: skip
        step(agent, env, memory, args, *row)
    memory.shown.copy_(memory.obs[-1])
    with torch.no_grad():
        asymmetry = agent.asymmetry(memory.obs[:-1]) if agent.frames.mirrors else math.nan
        memory.robot[2:].fill_(asymmetry)


def compute_gae(
    rewards: Tensor, values: Tensor, next_values: Tensor, terminated: Tensor, truncated: Tensor,
    gamma: float, gae_lambda: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Generalized advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 11 and 16; cut at the
    rollout's end as in PPO, arXiv:1707.06347, eq. 11 and 12). Returns (advantages, returns).

        delta_t = r_t + gamma * V(next_obs_t) - V(obs_t)        A_t = delta_t + gamma * lambda * A_{t+1}

    All tensors are (num_steps, num_envs), flags bool. next_obs is the step's own next observation, before any
    reset. A fall has no future: it drops V(next_obs_t) and A_{t+1}. A time limit drops only A_{t+1}."""
    deltas = rewards + gamma * next_values * ~terminated - values
    carry = gamma * gae_lambda * (~(terminated | truncated)).to(rewards.dtype)
    advantages = torch.empty_like(deltas)
    advantage = torch.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        advantages[t] = advantage = deltas[t] + carry[t] * advantage
    return advantages, advantages + values


@torch.no_grad()
def values_and_log_probs(agent: Agent, memory: Memory) -> tuple[Tensor, Tensor]:
    """V of obs and next_obs, (2 T + 1, N), and the log-probabilities of the actions, (T, N)."""
    values = agent.value(torch.cat([memory.obs, memory.next_obs]))
    return values, agent.log_prob_entropy(memory.obs[:-1], memory.action)[0]


@torch.no_grad()
def estimate_advantages(
    forward: Callable, agent: Agent, reward_scaling: RewardScaling, memory: Memory, args: Args
) -> None:
    """`forward` over the rollout, advantages from it, and all packed into one row for each step, so that
    gathering a minibatch is one call."""
    T, reward, terminated, truncated = args.num_steps, memory.reward, memory.terminated, memory.truncated
    if args.norm_reward:
        reward = reward_scaling(reward, terminated | truncated)
    values, log_prob = forward(agent, memory)
    value, value_after_reset, next_value = values[:T], values[1 : T + 1], values[T + 1 :]
    at_limit = torch.stack([truncated, torch.where(truncated, next_value, 0.0)])
    memory.at_limit.add_(at_limit.sum((1, 2)))
    if args.break_:
        terminated = terminated | truncated
    if args.break_reset:
        next_value = value_after_reset
    advantages, returns = compute_gae(
        reward, value, next_value, terminated, truncated, args.gamma, args.gae_lambda
    )
    residual = (returns - value).var(correction=0)
    memory.explained_variance.copy_(1 - residual / returns.var(correction=0))
    scalars = torch.stack([log_prob, value, advantages, returns], -1)
    actions = memory.action.reshape(T, args.num_envs, -1)
    memory.rows.copy_(torch.cat([memory.obs[:T], actions, scalars], -1).flatten(0, 1))


def ppo_loss(
    log_prob: Tensor, entropy: Tensor, value: Tensor,
    old_log_prob: Tensor, old_value: Tensor, advantages: Tensor, returns: Tensor, args: Args,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """The loss of one minibatch of (rows,), the value loss halved (arXiv:1707.06347, eq. 7 and 9), and its
    diagnostics, all (). Entropy may be () too, as a Gaussian's. The smaller of two surrogates counts, so the
    clip binds only where moving further would *gain*: above 1 + clip_coef if the advantage is positive, below
    1 - clip_coef if it is negative."""
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    log_ratio = log_prob - old_log_prob
    ratio = log_ratio.exp()
    surrogate = ratio * advantages
    if args.clip_ratio:
        clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
        surrogate = torch.min(surrogate, clipped_ratio * advantages)
    squared_error = (value - returns) ** 2
    if args.clip_vloss:
        clipped_value = old_value + (value - old_value).clamp(-args.clip_coef, args.clip_coef)
        squared_error = torch.max(squared_error, (clipped_value - returns) ** 2)
    policy_loss, value_loss, entropy = -surrogate.mean(), 0.5 * squared_error.mean(), entropy.mean()
    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
    with torch.no_grad():
        approx_kl = (log_ratio.expm1() - log_ratio).mean()  # of KL(old || new): joschu.net/blog/kl-approx
        clipfrac = ((ratio - 1).abs() > args.clip_coef).float().mean()
    diagnostics = {"loss": loss, "policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
    return loss, {**diagnostics, "approx_kl": approx_kl, "clipfrac": clipfrac}


def flatten_parameters(agent: Agent) -> nn.Parameter:
    """One vector of all parameters, and of their gradients as its .grad; each parameter becomes a view. To
    clear, clip or step is then one call, not a dozen. Not `zero_grad()`, though: it would drop the views."""
    parameters = list(agent.parameters())
    sizes = [p.numel() for p in parameters]
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in parameters]))
    flat.grad = torch.zeros_like(flat)
    for p, data, grad in zip(parameters, flat.data.split(sizes), flat.grad.split(sizes), strict=True):
        p.data, p.grad = data.view_as(p), grad.view_as(p)
    return flat


def minibatch_loss(weights: dict, agent: Agent, rows: Tensor, memory: Memory, args: Args) -> tuple:
    """The loss of packed rows under `weights`, by name; its diagnostics in the order of LOSSES."""
    columns = [agent.obs_dim, rows.shape[1] - agent.obs_dim - 4, 1, 1, 1, 1]  # as estimate_advantages packs
    obs, action, *old = rows.split(columns, 1)
    log_prob, entropy, value, asymmetry = torch.func.functional_call(agent, weights, (obs, action))
    now = replace(args, clip_coef=memory.clip_coef, ent_coef=memory.ent_coef)  # annealed: tensors
    loss, diagnostics = ppo_loss(log_prob, entropy, value, *(x.squeeze(1) for x in old), now)
    return loss + args.mirror_coef * asymmetry, torch.stack(list(diagnostics.values())).detach()


def minibatch_gradients(agent: Agent, memory: Memory, args: Args) -> tuple[dict[str, Tensor], Tensor]:
    """By torch.func, not backward(): one pure function from weights to gradients, which compiles as a whole.
    On the rows that memory.index names; returns (gradients by name, diagnostics as LOSSES)."""
    rows = memory.rows.index_select(0, memory.index)
    weights = {name: parameter.detach() for name, parameter in agent.named_parameters()}
    differentiate = torch.func.grad_and_value(minibatch_loss, has_aux=True)
    gradients, (_, diagnostics) = differentiate(weights, agent, rows, memory, args)
    return gradients, diagnostics


def update_minibatch(
    differentiate: Callable, agent: Agent, parameters: Tensor, memory: Memory, args: Args
) -> None:
    """One step along what `differentiate` gives, by Adam (Kingma and Ba 2015, arXiv:1412.6980, algorithm 1)
    with all that changes in tensors. Once memory.active is false it leaves them as they were."""
    gradients, diagnostics = differentiate(agent, memory, args)
    # Joined out here: inside, a compiler would write a kernel for each piece.
    gradient = torch.cat([piece.flatten() for piece in gradients.values()])
    memory.epoch_sum.add_(diagnostics)
    if args.max_grad_norm > 0:
        gradient = gradient * (args.max_grad_norm / (gradient.norm() + 1e-6)).clamp(max=1)
    step = memory.adam_step + 1
    mean = memory.exp_avg.lerp(gradient, 1 - 0.9)
    square = memory.exp_avg_sq.lerp(gradient.square(), 1 - 0.999)
    spread = (square / (1 - 0.999**step)).sqrt() + 1e-5
    moved = parameters - memory.learning_rate * mean / (1 - 0.9**step) / spread
    state = (memory.adam_step, memory.exp_avg, memory.exp_avg_sq, parameters)
    for old, new in zip(state, (step, mean, square, moved), strict=True):
        old.copy_(torch.where(memory.active, new, old))


@torch.no_grad()
def end_epoch(memory: Memory, args: Args) -> None:
    """Keep the diagnostics of the last epoch that moved the policy: past target_kl the others of
    the iteration are masked."""
    means = memory.epoch_sum / args.num_minibatches
    memory.losses.copy_(torch.where(memory.active, means, memory.losses))
    memory.epoch_sum.zero_()
    if args.target_kl is not None:
        memory.active.logical_and_(memory.losses[LOSSES.index("approx_kl")] <= args.target_kl)


@torch.no_grad()
def end_iteration(agent: Agent, memory: Memory, args: Args) -> None:
    """Write the iteration's row of metrics; then adapt the learning rate and take in what was sound."""
    scheduled = [memory.get_buffer(name) for name in SCHEDULED]
    alone = torch.stack([memory.diverged, memory.explained_variance, *scheduled])
    row = torch.cat([memory.ended, memory.at_limit, memory.losses, alone, memory.robot])
    slot = (memory.iteration - 1).remainder(args.log_every).long()
    memory.metrics.index_copy_(0, slot.unsqueeze(0), row.unsqueeze(0))
    if args.adaptive_kl is not None:
        kl, rate = memory.losses[LOSSES.index("approx_kl")], memory.learning_rate
        slower = torch.where(kl > 2 * args.adaptive_kl, rate / 1.5, rate)
        adapted = torch.where((kl < args.adaptive_kl / 2) & (kl > 0), rate * 1.5, slower)
        rate.copy_(adapted.clamp(1e-5, 1e-2))
    for norm in agent.norms:
        norm.update(memory.obs[:-1, :, : len(norm.mean)], memory.sound)


def capture(function: Callable[[], None], device: str) -> Callable[[], None]:
    """Record `function` as a CUDA graph. That executes nothing; calling the result executes it."""
    if torch.device(device).type != "cuda":
        raise RuntimeError(f"the device is {device}, not cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph):
        function()
    return graph.replay


def read_metrics(memory: Memory, iterations: range, args: Args) -> list[dict[str, float | None]]:
    """Fetch the metrics of these iterations, at most log_every, from the device: the only wait for it. Raises
    NonFinite where a loss has stopped being a number."""
    table, lines = memory.metrics.tolist(), []
    for iteration in iterations:
        row = dict(zip(METRICS, table[(iteration - 1) % args.log_every], strict=True))
        require_finite(iteration, loss=torch.tensor(row["loss"]))
        episodes, returns, lengths, limits, limit_values = map(row.pop, (*ENDED, *AT_LIMIT))
        lines.append({
            "iteration": iteration,
            "global_step": iteration * args.num_steps * args.num_envs,
            "episodes": int(episodes),
            "episodic_return": returns / episodes if episodes else None,
            "episodic_length": lengths / episodes if episodes else None,
            "value_at_time_limit": limit_values / limits if limits else None,
            **row,
        })  # fmt: skip
    return lines


def check_args(args: Args) -> None:
    """Raise Refusal, before anything has started, for settings that cannot work."""
    check_ranges(args)
    lanes = make_batched_env(args.env_id, 1, args.device)
    frames = Frames(lanes, args)
    mirrored = frames.mirrors or args.mirror_coef == 0
    check(mirrored, f"--mirror-coef: {args.env_id} has no mirror of what its actor sees: leave it at 0")
    errors = [word for words in lanes.errors or () for word in words]
    fits = args.actor == "mlp" or (errors and max(errors) < frames.words)
    check(fits, f"--actor {args.actor}: the actor of {args.env_id} sees no errors to control: give mlp")
    rows, minibatches = args.num_envs * args.num_steps, args.num_minibatches
    fit = math.gcd(rows, minibatches) % rows or 1  # never one row a minibatch
    check(rows % minibatches == 0, f"--num-minibatches {minibatches} does not divide {rows} rows: {fit} does")
    wider = f"--num-steps {2 * args.num_steps} or --no-norm-adv"
    check(rows > minibatches or not args.norm_adv, f"--norm-adv needs 2 rows in a minibatch: give {wider}")
    total = args.total_timesteps
    check(total >= rows, f"--total-timesteps {total} is less than one rollout: give {rows} or more")
    check(not (args.break_ and args.break_reset), "--break and --break-reset: give only one of the two")
    one = not (args.anneal_lr and args.adaptive_kl is not None)
    check(one, "--adaptive-kl and --anneal-lr both set the learning rate: add --no-anneal-lr")


@restores_process
def train(args: Args) -> Agent:
    """Train from args.seed, or go on where args.resume stopped; returns the agent. Raises Refusal (a
    ValueError) for settings that cannot work, NonFinite when a loss or observation stops being a number."""
    check_args(args)
    torch.set_num_threads(args.threads)
    env = make_batched_env(args.env_id, args.num_envs, args.device)
    with initial_weights(args.seed):
        agent = Agent(make_env(args.env_id), args).to(args.device)
    parameters = flatten_parameters(agent).detach()
    memory = Memory(agent, env, parameters.numel(), args)
    reward_scaling = RewardScaling(args.num_envs, args.gamma).to(args.device)
    streams = [RandomStream(args.seed, name, args.device) for name in ("action", "reset", "minibatch")]
    env.reset(memory.reset_noise[0].uniform_(generator=streams[1].generator))
    memory.shown.copy_(agent.frames.first(env.obs()))

    num_iterations = args.total_timesteps // (args.num_steps * args.num_envs)
    fuse = compiled if args.compile else lambda function: function
    functions = [
        partial(begin_iteration, memory, args),
        partial(collect_rollout, fuse(step_lanes), agent, env, memory, args),
        partial(estimate_advantages, fuse(values_and_log_probs), agent, reward_scaling, memory, args),
        partial(update_minibatch, fuse(minibatch_gradients), agent, parameters, memory, args),
        partial(end_epoch, memory, args),
        partial(end_iteration, agent, memory, args),
    ]

    # All that a resumed run needs to end in the same bytes as one that was never cut.
    state = {"agent": agent, "memory": memory, "reward_scaling": reward_scaling, "env": env}
    state |= zip(("action_noise", "reset_noise", "minibatch_order"), streams, strict=True)
    first_iteration = 1  # unless resumed
    run = Run(SCRIPT, args, num_parameters=parameters.numel())
    first_iteration = run.restore(state)
    captured, unread = False, first_iteration

    for iteration in range(first_iteration, num_iterations + 1):
        draw(memory, agent, streams)
        begin, collect, estimate, update, finish_epoch, finish = functions
        begin()
        collect()
        estimate()
        for epoch in memory.order:
            for minibatch in epoch:
                memory.index.copy_(minibatch)
                update()
            finish_epoch()
        finish()

        if iteration == first_iteration and args.cuda_graph:  # it ran eagerly: the warm-up
            try:
                functions = [capture(function, args.device) for function in functions]
                captured = True
            except RuntimeError as error:
                run.say(f"iterations run eagerly, not as CUDA graphs: {str(error).splitlines()[0]}")

        if iteration % args.log_every == 0 or iteration == num_iterations or run.due(iteration):
            lines = read_metrics(memory, range(unread, iteration + 1), args)
            require_finite(iteration, parameter=parameters, observation=memory.obs)
            unread = iteration + 1
            run.log(*lines)
        run.save(iteration, state)
        run.stop_if_asked()

    run.finish(captured=captured)
    run.report(*evaluate(agent, args, run.film))
    return agent


def evaluate(agent: Agent, args: Args, film: Callable | None = None) -> tuple[list[float], int]:
    """Play `eval_episodes` episodes with the best action. Returns the scores and how many episodes were
    stopped at `eval_max_steps`. Seeds are the same for every run, the environment is its own, and no random
    stream of training is drawn from. `film(env)` sees the first episode."""
    env, frames = make_env(args.env_id, stream="eval", render=bool(film)), agent.frames
    scores, stopped = [], 0
    for episode in range(args.eval_episodes):
        seen, _ = env.reset()
        obs = frames.first(torch.tensor(seen[None], device=args.device))
        past = obs.new_zeros(1, args.action_history, agent.action_dim)
        done = False
        while not done and env.episodic_length < args.eval_max_steps:
            if film and episode == 0:
                film(env)
            with torch.no_grad():
                action = agent.best(obs)
            seen, _, terminated, truncated, _ = env.step(agent.env_action(action)[0])
            done = terminated or truncated
            executed = action.clamp(frames.low, frames.high).unsqueeze(1)
            past = torch.cat([executed, past], 1)[:, : args.action_history]
            obs = frames.after(obs, torch.tensor(seen[None], device=args.device), past)
        scores.append(env.episodic_return)
        stopped += not done
    env.close()
    return scores, stopped


@restores_process
def evaluate_only(args: Args) -> None:
    """Evaluate the checkpoint in args.eval_only, print the result and write it to eval.json there."""
    checkpoint = load_checkpoint(args, SCRIPT)
    check(args.eval_episodes > 0, "--eval-only needs --eval-episodes 1 or more")
    check_args(args)
    torch.set_num_threads(args.threads)
    agent = Agent(make_env(args.env_id), args).to(args.device)
    flatten_parameters(agent)  # where a parameter lies in memory decides the last bit of a product
    agent.load_state_dict(checkpoint["state"]["agent"])
    report_evaluation(args, checkpoint, *evaluate(agent, args))


if __name__ == "__main__":
    with command_line():
        args = parse_args(Args, SCRIPT, __doc__)
        evaluate_only(args) if args.eval_only is not None else train(args)
