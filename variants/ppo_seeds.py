"""PPO on several seeds at once: one process, one environment of seeds x lanes, one stack of networks.

A result is a mean over seeds, and small networks leave a machine waiting for its next call: four seeds side
by side cost less than four runs. The idea to take away: write the loss of one network, and let
`torch.func.vmap` map it and its gradient over a stack. All else has one more axis in front, over which
nothing is ever summed, so that each seed learns what it would have learned alone in `ppo_gpu_batched.py`.

    python -m variants.ppo_seeds --seeds 0 1 2 3               # run it: CartPole-v1, four times
    python -m variants.ppo_seeds --no-clip-ratio               # ablate it
    python -m variants.ppo_seeds --resume runs/NAME            # go on after Ctrl-C, to the same bytes
    python -m variants.ppo_seeds --eval-only runs/NAME/seed0   # play the saved policy of one seed
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from gymnasium.spaces import Discrete
from torch import Tensor, nn

from common.cli import check, check_ranges, command_line, load_checkpoint, parse_args
from common.envs import FlatEnv, make_env
from common.envs.batched import BATCHED_ENVS, BatchedEnv, make_batched_env
from common.metrics import report_evaluation
from common.process import compiled, restores_process
from common.seed_runs import SeedRuns
from common.seeding import RandomStream, initial_weights

SCRIPT = Path(__file__).stem
ENDED = ("episodes", "return_sum", "length_sum")  # sums over the episodes that ended in an iteration
AT_LIMIT = ("limits", "limit_value_sum")  # and over those that ended at a time limit
LOSSES = ("loss", "policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac")
FINITE = ("finite_loss", "finite_parameter", "finite_observation")
METRICS = (*ENDED, *AT_LIMIT, *LOSSES, "explained_variance", "learning_rate", *FINITE)


@dataclass
class Args:
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2, 3])  # each a run of its own, all at once
    env_id: str = "CartPole-v1"  # one of the batched environments in common/envs/batched.py
    total_timesteps: int = 800_000  # environment steps of each seed; rounded down to whole rollouts
    num_envs: int = 256  # lanes of each seed, stepped together
    num_steps: int = 32  # steps of each lane in a rollout
    learning_rate: float = 4e-3  # Adam's step size
    anneal_lr: bool = True  # learning rate falls linearly to 0
    gamma: float = 0.99  # discount
    gae_lambda: float = 0.9  # 0: one-step TD error; 1: all rewards to the rollout's end, more variance
    num_minibatches: int = 4  # gradient steps an epoch
    update_epochs: int = 4  # passes over each rollout
    norm_adv: bool = True  # advantages to mean 0, std 1 in each minibatch of a seed
    clip_coef: float = 0.2  # how far the ratio may move before the surrogate stops paying
    clip_ratio: bool = True  # the surrogate clip itself
    clip_vloss: bool = False  # clip the value's move too (OpenAI Baselines, not the paper)
    ent_coef: float = 0.0  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # gradient-norm clip of each seed; 0: off
    target_kl: float | None = None  # mask a seed's further epochs once its approx_kl passes it
    hidden_dim: int = 64  # width of both hidden layers
    device: str = field(default_factory=lambda: "cuda" if torch.cuda.is_available() else "cpu")  # of it all
    threads: int = field(default_factory=lambda: os.cpu_count() or 1)  # on the CPU; the bytes depend on it
    cuda_graph: bool = True  # replay each iteration as CUDA graphs, where the device is CUDA
    compile: bool = False  # fuse the functions of an iteration by torch.compile
    log_every: int = 10  # iterations between reads from the device
    eval_episodes: int = 20  # episodes of each seed's final evaluation; 0: none
    eval_max_steps: int = 10_000  # an evaluation episode that has not ended by then is stopped
    checkpoint_every: int = 10  # iterations between checkpoints
    rerun: bool = True  # write recording.rrd, the seeds' curves overlaid
    out: str | None = None  # the run's folder, with one in it for each seed; default: fresh, under runs/
    resume: str | None = None  # a run's folder: go on in it
    eval_only: str | None = None  # the folder of one seed: only evaluate its checkpoint


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


def categorical_log_prob(logits: Tensor, action: Tensor) -> Tensor:
    """log softmax(logits)[action]: (..., actions) and int64 (...) -> (...)."""
    return logits.log_softmax(-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)


def categorical_entropy(logits: Tensor) -> Tensor:
    """Entropy of softmax(logits) in nats: (..., actions) -> (...)."""
    log_probs = logits.log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


class Agent(nn.Module):
    """Actor and critic of one seed. The actor's outputs are logits, or the mean of a Gaussian."""

    def __init__(self, env: FlatEnv, args: Args) -> None:
        super().__init__()
        self.obs_dim, self.action_dim, width = env.obs_dim, env.action_dim, args.hidden_dim

        def trunk() -> list[nn.Module]:
            first = layer_init(nn.Linear(env.obs_dim, width), math.sqrt(2))
            second = layer_init(nn.Linear(width, width), math.sqrt(2))
            return [first, nn.Tanh(), second, nn.Tanh()]

        actor_trunk, critic_trunk = trunk(), trunk()
        self.actor = nn.Sequential(*actor_trunk, layer_init(nn.Linear(width, env.action_dim), 0.01))
        self.critic = nn.Sequential(*critic_trunk, layer_init(nn.Linear(width, 1), 1.0))
        self.discrete = isinstance(env.action_space, Discrete)
        if not self.discrete:
            self.log_std = nn.Parameter(torch.zeros(env.action_dim))
            self.low, self.high = env.low, env.high

    def sample(self, obs: Tensor, noise: Tensor) -> Tensor:
        """An action for each row. With Gumbel noise, the largest sum is a draw from softmax(logits)."""
        if self.discrete:
            return (self.actor(obs) + noise).argmax(-1)
        return self.actor(obs) + self.log_std.exp() * noise

    def best(self, obs: Tensor) -> Tensor:
        """The action an evaluation takes: the most probable, or the mean."""
        return self.actor(obs).argmax(-1) if self.discrete else self.actor(obs)

    def value(self, obs: Tensor) -> Tensor:
        """V(obs): (..., obs_dim) -> (...)."""
        return self.critic(obs).squeeze(-1)

    def forward(self, method: str, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """One of the methods by name: `functional_call` calls no other than `forward`."""
        return getattr(self, method)(*inputs)

    def env_action(self, action: Tensor) -> np.ndarray:
        """What the environment is given: the index, or the vector clipped to its bounds in their own type."""
        action = action.cpu().numpy()
        return action if self.discrete else action.clip(self.low, self.high)

    def log_prob_entropy(self, obs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of actions (...,) and the entropy of the policy, (...,) or for the Gaussian ()."""
        output = self.actor(obs)
        if self.discrete:
            return categorical_log_prob(output, action), categorical_entropy(output)
        return gaussian_log_prob(output, self.log_std, action), gaussian_entropy(self.log_std)


def call(method: str, agent: Agent, parameters: Tensor, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
    """agent.method(*inputs) with `parameters`, (P,), in the place of its own."""
    own = dict(agent.named_parameters())
    pieces = parameters.split([p.numel() for p in own.values()])
    given = {name: piece.view_as(own[name]) for name, piece in zip(own, pieces, strict=True)}
    return torch.func.functional_call(agent, given, (method, *inputs))


def call_all(method: str, agent: Agent, parameters: Tensor, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
    """`call` of each row of parameters, (S, P), on its own row of each input: (S, ...) -> (S, ...)."""
    return torch.func.vmap(partial(call, method, agent))(parameters, *inputs)


class Memory(nn.Module):
    """Every tensor that one function of an iteration leaves for the next, at an address that never changes.
    S = len(seeds), T = num_steps, N = num_envs. What a checkpoint needs of them is in the state_dict."""

    def __init__(self, agent: Agent, env: BatchedEnv, num_parameters: int, args: Args) -> None:
        super().__init__()
        S, T, N = len(args.seeds), args.num_steps, args.num_envs
        minibatch = T * N // args.num_minibatches
        action_shape = () if agent.discrete else (agent.action_dim,)

        def add(*names: str, shape: tuple = (), dtype: torch.dtype | None = None, saved=False) -> None:
            for name in names:
                tensor = torch.zeros((S, *shape), dtype=dtype, device=args.device)
                self.register_buffer(name, tensor, saved)

        add("obs", shape=(T + 1, N, env.obs_dim))
        add("next_obs", shape=(T, N, env.obs_dim))
        add("action", shape=(T, N, *action_shape), dtype=torch.int64 if agent.discrete else None)
        add("reward", shape=(T, N))
        add("terminated", "truncated", shape=(T, N), dtype=torch.bool)
        add("episodic_return", "episodic_length", shape=(N,), saved=True)
        add("action_noise", shape=(T, N, agent.action_dim))
        add("reset_noise", shape=(T, N, env.reset_noise_dim))
        add("order", shape=(args.update_epochs, args.num_minibatches, minibatch), dtype=torch.int64)
        add("rows", shape=(T * N, env.obs_dim + math.prod(action_shape) + 4))
        add("index", shape=(minibatch,), dtype=torch.int64)
        add("active", "alive", shape=(1,), dtype=torch.bool, saved=True)
        self.alive.fill_(True)
        add("learning_rate", "adam_step", shape=(1,), saved=True)
        add("exp_avg", "exp_avg_sq", shape=(num_parameters,), saved=True)
        add("ended", shape=(len(ENDED),))
        add("at_limit", shape=(len(AT_LIMIT),))
        add("losses", "epoch_sum", shape=(len(LOSSES),))
        add("explained_variance", shape=(1,))
        add("metrics", shape=(args.log_every, len(METRICS)))
        add("slot", dtype=torch.int64)


# The functions of an iteration, in the order in which they run. Each after `prepare` reads and writes tensors
# in place and decides nothing by the value of one, so that a CUDA graph replays it exactly.


def prepare(iteration: int, memory: Memory, agent: Agent, streams: list[RandomStream], args: Args) -> None:
    """An iteration's number, learning rate and random numbers, each seed's from streams of its own."""
    done = (iteration - 1) / (args.total_timesteps // (args.num_envs * args.num_steps))
    memory.learning_rate.fill_(args.learning_rate * (1 - done * args.anneal_lr))
    memory.slot.fill_((iteration - 1) % args.log_every)
    for s in range(len(args.seeds)):
        action, reset, order = (stream.generator for stream in streams[3 * s : 3 * s + 3])
        if agent.discrete:
            memory.action_noise[s].exponential_(generator=action).log_().neg_()  # Gumbel's distribution
        else:
            memory.action_noise[s].normal_(generator=action)
        memory.reset_noise[s].uniform_(generator=reset)
        for epoch in memory.order[s]:
            torch.randperm(epoch.numel(), generator=order, out=epoch.view(-1))


@torch.no_grad()
def step_lanes(agent: Agent, parameters: Tensor, env: BatchedEnv, memory: Memory, *row: Tensor) -> None:
    """Step every lane of every seed once and write what happened into one row of the rollout. The environment
    knows of lanes alone: those of seed s begin at s * num_envs."""
    obs, noise, reset_noise, next_obs, action, reward, terminated, truncated = row
    action.copy_(call_all("sample", agent, parameters, obs, noise))
    happened = env.step(action.flatten(0, 1), reset_noise.flatten(0, 1))
    for buffer, new in zip((next_obs, reward, terminated, truncated), happened, strict=True):
        buffer.copy_(new.view_as(buffer))
    done = terminated | truncated
    memory.episodic_return.add_(reward)
    memory.episodic_length.add_(1)
    ended = torch.stack([done, done * memory.episodic_return, done * memory.episodic_length], 1)
    memory.ended.add_(ended.sum(2))  # as ENDED
    memory.episodic_return.mul_(~done)
    memory.episodic_length.mul_(~done)


def collect_rollout(
    step: Callable, agent: Agent, parameters: Tensor, env: BatchedEnv, memory: Memory
) -> None:
    """`step` every lane num_steps times, with noise that is drawn already."""
    memory.ended.zero_()
    memory.active.copy_(memory.alive)
    over_time = (
        memory.obs[:, :-1], memory.action_noise, memory.reset_noise, memory.next_obs, memory.action,
        memory.reward, memory.terminated, memory.truncated,
    )  # fmt: skip
    for row in zip(*(tensor.unbind(1) for tensor in over_time), strict=True):
        row[0].copy_(env.obs().view_as(row[0]))  # not in `step`: compiled, it miswrites rows that interleave
        step(agent, parameters, env, memory, *row)
    memory.obs[:, -1].copy_(env.obs().view_as(memory.obs[:, -1]))


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
def estimate_advantages(
    forward: Callable, agent: Agent, parameters: Tensor, memory: Memory, args: Args
) -> None:
    """`forward` over the rollout, advantages from it, and all packed into one row for each step."""
    reward, terminated, truncated = memory.reward, memory.terminated, memory.truncated
    values = forward("value", agent, parameters, torch.cat([memory.obs, memory.next_obs], 1))
    log_prob, _ = forward("log_prob_entropy", agent, parameters, memory.obs[:, :-1], memory.action)
    value, next_value = values[:, : args.num_steps], values[:, args.num_steps + 1 :]
    at_limit = torch.stack([truncated, torch.where(truncated, next_value, 0.0)], 1)
    memory.at_limit.copy_(at_limit.flatten(2).sum(2))
    # A recursion over time that knows no seeds: (S, T, N) -> (T, S * N), and back.
    columns = (x.transpose(0, 1).flatten(1) for x in (reward, value, next_value, terminated, truncated))
    estimates = compute_gae(*columns, args.gamma, args.gae_lambda)
    advantages, returns = (x.unflatten(1, (-1, args.num_envs)).transpose(0, 1) for x in estimates)
    residual = (returns - value).flatten(1).var(1, correction=0)
    explained = 1 - residual / returns.flatten(1).var(1, correction=0)
    memory.explained_variance.copy_(explained.unsqueeze(1))
    scalars = torch.stack([log_prob, value, advantages, returns], -1)
    columns = [memory.obs[:, :-1], memory.action.reshape(*reward.shape, -1), scalars]
    memory.rows.copy_(torch.cat(columns, -1).flatten(1, 2))


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


def flatten_parameters(*agents: Agent) -> Tensor:
    """All parameters in one row for each agent, (S, P), of which each parameter becomes a view. Rows begin at
    multiples of 64 bytes: where a parameter lies in memory can decide the last bit of a product."""
    sizes = [p.numel() for p in agents[0].parameters()]
    room = -(-sum(sizes) // 16) * 16
    flat = next(agents[0].parameters()).detach().new_zeros(len(agents), room)[:, : sum(sizes)]
    for agent, row in zip(agents, flat, strict=True):
        for p, data in zip(agent.parameters(), row.split(sizes), strict=True):
            p.data = data.view_as(p).copy_(p.detach())
    return flat


def minibatch_loss(parameters: Tensor, agent: Agent, rows: Tensor, index: Tensor, args: Args) -> tuple:
    """The loss of one seed under its `parameters`, (P,), on those of its packed rows that `index` names; its
    diagnostics as LOSSES, (6,). `train` maps it and its gradient over all seeds."""
    columns = [agent.obs_dim, rows.shape[1] - agent.obs_dim - 4, 1, 1, 1, 1]  # as estimate_advantages packs
    obs, action, *old = rows[index].split(columns, 1)
    action = action.squeeze(1).long() if agent.discrete else action
    log_prob, entropy = call("log_prob_entropy", agent, parameters, obs, action)
    now = log_prob, entropy, call("value", agent, parameters, obs)
    loss, diagnostics = ppo_loss(*now, *(x.squeeze(1) for x in old), args)
    return loss, torch.stack(list(diagnostics.values())).detach()


def update_minibatch(
    differentiate: Callable, agent: Agent, parameters: Tensor, memory: Memory, args: Args
) -> None:
    """One step of each seed along what `differentiate` gives, by Adam (Kingma and Ba 2015, arXiv:1412.6980,
    algorithm 1) with a clip of its own. Where memory.active is false all stays as it was."""
    gradient, (_, diagnostics) = differentiate(parameters, agent, memory.rows, memory.index, args)
    memory.epoch_sum.add_(diagnostics)
    if args.max_grad_norm > 0:
        norm = gradient.norm(dim=1, keepdim=True) + 1e-6
        gradient = gradient * (args.max_grad_norm / norm).clamp(max=1)
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
    """Keep the diagnostics of the last epoch that moved a seed's policy: once it is past target_kl, its other
    epochs of the iteration are masked."""
    means = memory.epoch_sum / args.num_minibatches
    memory.losses.copy_(torch.where(memory.active, means, memory.losses))
    memory.epoch_sum.zero_()
    if args.target_kl is not None:
        memory.active.logical_and_(memory.losses[:, LOSSES.index("approx_kl"), None] <= args.target_kl)


@torch.no_grad()
def end_iteration(parameters: Tensor, memory: Memory) -> None:
    """Write each seed's row of the iteration's metrics."""
    held = memory.losses[:, :1], parameters, memory.obs.flatten(1)
    finite = torch.stack([tensor.isfinite().all(1) for tensor in held], 1)
    alone = memory.explained_variance, memory.learning_rate, finite
    row = torch.cat([memory.ended, memory.at_limit, memory.losses, *alone], 1)
    memory.metrics.index_copy_(1, memory.slot[:1], row.unsqueeze(1))


def capture(function: Callable[[], None], device: str) -> Callable[[], None]:
    """Record `function` as a CUDA graph. That executes nothing; calling the result executes it."""
    if torch.device(device).type != "cuda":
        raise RuntimeError(f"the device is {device}, not cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph):
        function()
    return graph.replay


def read_metrics(memory: Memory, iterations: range, args: Args) -> tuple[dict, dict]:
    """Fetch the metrics of these iterations, at most log_every, from the device: the only wait for it.
    Returns {seed: its lines, while all was finite} and {seed: why it ends} where something was not."""
    lines, ends = {seed: [] for seed in args.seeds}, {}
    for seed, alive, table in zip(args.seeds, memory.alive, memory.metrics.tolist(), strict=True):
        for iteration in iterations if alive else ():
            row = dict(zip(METRICS, table[(iteration - 1) % args.log_every], strict=True))
            if broken := [name for name in FINITE if not row.pop(name)]:
                alive.fill_(False)  # from here on nothing moves its weights
                ends[seed] = f"iteration {iteration}: the {broken[0].removeprefix('finite_')} is not finite"
                break
            episodes, returns, lengths, limits, limit_values = map(row.pop, (*ENDED, *AT_LIMIT))
            lines[seed].append({
                "iteration": iteration,
                "global_step": iteration * args.num_steps * args.num_envs,
                "episodes": int(episodes),
                "episodic_return": returns / episodes if episodes else None,
                "episodic_length": lengths / episodes if episodes else None,
                "value_at_time_limit": limit_values / limits if limits else None,
                **row,
            })  # fmt: skip
    return lines, ends


def check_args(args: Args) -> None:
    """Raise Refusal, before anything has started, for settings that cannot work."""
    check_ranges(args)
    fit = list(dict.fromkeys(seed for seed in args.seeds if seed >= 0)) or [0]
    check(fit == args.seeds, f"--seeds takes different numbers of 0 or more: give {' '.join(map(str, fit))}")
    known = ", ".join(BATCHED_ENVS)
    check(args.env_id in BATCHED_ENVS, f"--env-id {args.env_id} has no batched form: choose one of {known}")
    rows, minibatches = args.num_envs * args.num_steps, args.num_minibatches
    fit = math.gcd(rows, minibatches) % rows or 1  # never one row a minibatch
    check(rows % minibatches == 0, f"--num-minibatches {minibatches} does not divide {rows} rows: {fit} does")
    wider = f"--num-steps {2 * args.num_steps} or --no-norm-adv"
    check(rows > minibatches or not args.norm_adv, f"--norm-adv needs 2 rows in a minibatch: give {wider}")
    total = args.total_timesteps
    check(total >= rows, f"--total-timesteps {total} is less than one rollout: give {rows} or more")


@restores_process
def train(args: Args) -> list[Agent]:
    """Train from args.seeds, or go on where args.resume stopped; returns an agent for each. Raises Refusal (a
    ValueError) for settings that cannot work, NonFinite when no seed is left whose numbers are finite."""
    check_args(args)
    torch.set_num_threads(args.threads)
    S, N, agents = len(args.seeds), args.num_envs, nn.ModuleList()
    for seed in args.seeds:
        with initial_weights(seed):
            agents.append(Agent(make_env(args.env_id), args).to(args.device))
    agent, parameters = agents[0], flatten_parameters(*agents)
    env = make_batched_env(args.env_id, S * N, args.device)
    memory = Memory(agent, env, parameters.shape[1], args)
    names = [(seed, name) for seed in args.seeds for name in ("action", "reset", "minibatch")]
    streams = [RandomStream(seed, name, args.device) for seed, name in names]
    for noise, stream in zip(memory.reset_noise, streams[1::3], strict=True):
        noise[0].uniform_(generator=stream.generator)
    env.reset(memory.reset_noise[:, 0].flatten(0, 1))

    num_iterations = args.total_timesteps // (args.num_steps * N)
    fuse = compiled if args.compile else lambda function: function
    gradients = torch.func.grad_and_value(minibatch_loss, has_aux=True)
    gradients = torch.func.vmap(gradients, in_dims=(0, None, 0, 0, None))  # of all seeds
    functions = [
        partial(collect_rollout, fuse(step_lanes), agent, parameters, env, memory),
        partial(estimate_advantages, fuse(call_all), agent, parameters, memory, args),
        partial(update_minibatch, fuse(gradients), agent, parameters, memory, args),
        partial(end_epoch, memory, args),
        partial(end_iteration, parameters, memory),
    ]

    # All that a resumed run needs to end in the same bytes as one that was never cut.
    state = {"agents": agents, "memory": memory, "env": env}
    state |= {f"{name}_{seed}": stream for (seed, name), stream in zip(names, streams, strict=True)}
    run = SeedRuns(SCRIPT, args, num_parameters=parameters.numel())
    first_iteration = run.restore(state)
    captured, unread = False, first_iteration

    for iteration in range(first_iteration, num_iterations + 1):
        prepare(iteration, memory, agent, streams, args)
        collect, estimate, update, finish_epoch, finish = functions
        collect()
        estimate()
        for epoch in memory.order.unbind(1):
            for minibatch in epoch.unbind(1):
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
            lines, ends = read_metrics(memory, range(unread, iteration + 1), args)
            unread = iteration + 1
            run.log_seeds(lines, ends)
        run.save(iteration, state)
        run.stop_if_asked()

    run.finish(captured=captured)
    run.report_seeds({s: evaluate(agent, args) for s, agent in run.going_on(agents)})
    return agents


def evaluate(agent: Agent, args: Args, film: Callable | None = None) -> tuple[list[float], int]:
    """Play `eval_episodes` episodes with the best action. Returns the scores and how many episodes were
    stopped at `eval_max_steps`. Seeds are the same for every run, the environment is its own, and no random
    stream of training is drawn from. `film(env)` sees the first episode."""
    env = make_env(args.env_id, stream="eval", render=bool(film))
    scores, stopped = [], 0
    for episode in range(args.eval_episodes):
        obs, _ = env.reset()
        done = False
        while not done and env.episodic_length < args.eval_max_steps:
            if film and episode == 0:
                film(env)
            with torch.no_grad():
                action = agent.best(torch.tensor(obs[None], device=args.device))
            obs, _, terminated, truncated, _ = env.step(agent.env_action(action)[0])
            done = terminated or truncated
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
