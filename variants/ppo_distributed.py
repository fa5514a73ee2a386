"""PPO on several processes: all cores of a machine, or all machines, started by torchrun.

Each rank (process) has the same weights, environments of its own, and their rows of each minibatch. The idea
to take away: the gradient of a mean over rows is the sum of what each rank's rows give, so one all-reduce a
minibatch makes of many processes one, if normalisation, statistics and stops too see the rows of all ranks.

    torchrun --nproc-per-node 2 -m variants.ppo_distributed --seed 0    # run it on two cores
    python -m variants.ppo_distributed --seed 0                         # the same as one process
    torchrun --nproc-per-node 2 -m variants.ppo_distributed --resume runs/NAME    # go on after Ctrl-C
    python -m variants.ppo_distributed --eval-only runs/NAME            # play the saved policy
    python -m rerun runs/NAME/recording.rrd                             # watch it
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from gymnasium.spaces import Box, Discrete
from torch import Tensor, nn

from common.cli import check, check_ranges, command_line, load_checkpoint, parse_args
from common.distributed import SharedRun, all_envs, everyone, from_rank_0, own_share, process_group, together
from common.envs import FlatEnv, RewardScaling, RunningNorm, make_env
from common.metrics import mean, report_evaluation, require_finite
from common.process import restores_process
from common.seeding import RandomStream, initial_weights

SCRIPT = Path(__file__).stem


@dataclass
class Args:
    seed: int = 0  # every random stream of the run follows from it
    env_id: str = "CartPoleContinuous-v0"  # any Gymnasium id, Box or Discrete; module:Env-v0 is imported
    env_kwargs: str = "{}"  # JSON object for gymnasium.make
    total_timesteps: int = 150_000  # environment steps of all ranks; rounded down to whole rollouts
    num_envs: int = 8  # environments of all ranks, each of which steps an equal share
    num_steps: int = 128  # steps of each environment in a rollout
    learning_rate: float = 2e-3  # Adam's step size
    anneal_lr: bool = True  # learning rate falls linearly to 0
    gamma: float = 0.99  # discount
    gae_lambda: float = 0.9  # 0: one-step TD error, 1: all rewards
    num_minibatches: int = 4  # gradient steps an epoch, and all-reduces: few and large ones scale
    update_epochs: int = 4  # passes over each rollout
    norm_adv: bool = True  # advantages to mean 0, std 1 in each minibatch
    clip_coef: float = 0.2  # how far the ratio may move before the surrogate stops paying
    clip_ratio: bool = True  # the surrogate clip itself: bounds each update
    clip_vloss: bool = False  # clip the value's move too
    ent_coef: float = 0.0  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # global gradient-norm clip, 0 for none
    target_kl: float | None = None  # stop an iteration's epochs once approx_kl passes it
    hidden_dim: int = 64  # width of both hidden layers
    orthogonal_init: bool = True  # orthogonal weights, zero biases; off: PyTorch's own
    shared_trunk: bool = False  # one body for actor and critic
    log_std_init: float = 0.0  # initial log standard deviation of the action
    norm_obs: bool = False  # observations to running mean 0, std 1
    norm_reward: bool = False  # rewards (and so V) divided by the running std of the discounted return
    device: str = "cpu"  # where the networks live; cuda: each rank of a machine has its own
    timeout: float = 20.0  # seconds that a rank waits for the others; more where rollouts differ by more
    eval_episodes: int = 20  # episodes of the final evaluation, on rank 0; 0: none
    eval_max_steps: int = 10_000  # an evaluation episode that has not ended by then is stopped
    checkpoint_every: int = 10  # iterations between checkpoints
    rerun: bool = True  # write recording.rrd
    watch: bool = False  # open the Rerun viewer and stream to it while training
    out: str | None = None  # the run's folder; default: a fresh one under runs/
    resume: str | None = None  # a run's folder: go on in it, with any number of processes
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


def categorical_log_prob(logits: Tensor, action: Tensor) -> Tensor:
    """log softmax(logits)[action]: (..., actions) and int64 (...) -> (...)."""
    return logits.log_softmax(-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)


def categorical_entropy(logits: Tensor) -> Tensor:
    """Entropy of softmax(logits) in nats: (..., actions) -> (...)."""
    log_probs = logits.log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


def through(net: nn.Sequential, x: Tensor) -> Tensor:
    """net(x), without the checks for hooks: around layers this small they cost as much as the arithmetic."""
    for layer in net:
        x = layer.forward(x)
    return x


class Agent(nn.Module):
    """Actor and critic: obs_dim -> hidden -> hidden -> action_dim, and -> 1. The actor's outputs
    are logits, or the mean of a Gaussian whose standard deviation does not depend on the observation."""

    def __init__(self, env: FlatEnv, args: Args) -> None:
        super().__init__()
        # A layer of the networks: its statistics are saved with them, and a forward pass never changes them.
        self.obs_norm = RunningNorm(env.obs_dim) if args.norm_obs else nn.Identity()
        init = layer_init if args.orthogonal_init else lambda layer, gain: layer
        width = args.hidden_dim

        def trunk() -> list[nn.Module]:
            first = init(nn.Linear(env.obs_dim, width), math.sqrt(2))
            second = init(nn.Linear(width, width), math.sqrt(2))
            return [self.obs_norm, first, nn.Tanh(), second, nn.Tanh()]

        actor_trunk = trunk()
        critic_trunk = actor_trunk if args.shared_trunk else trunk()
        # The small gain makes the first policy nearly the same in every state.
        self.actor = nn.Sequential(*actor_trunk, init(nn.Linear(width, env.action_dim), 0.01))
        self.critic = nn.Sequential(*critic_trunk, init(nn.Linear(width, 1), 1.0))
        self.discrete = isinstance(env.action_space, Discrete)
        if not self.discrete:
            self.log_std = nn.Parameter(torch.full((env.action_dim,), args.log_std_init))
            self.low, self.high = env.low, env.high

    def draw_noise(self, stream: RandomStream, *shape: int) -> Tensor:
        """What `sample` adds to the actor's outputs: Gumbel noise for logits, normal noise for a mean."""
        return -torch.log(-torch.log(stream.uniform(*shape))) if self.discrete else stream.normal(*shape)

    def sample(self, obs: Tensor, noise: Tensor) -> Tensor:
        """An action for each row. With Gumbel noise, the largest sum is a draw from softmax(logits)."""
        if self.discrete:
            return (through(self.actor, obs) + noise).argmax(-1)
        return through(self.actor, obs) + self.log_std.exp() * noise

    def best(self, obs: Tensor) -> Tensor:
        """The action an evaluation takes: the most probable, or the mean."""
        return through(self.actor, obs).argmax(-1) if self.discrete else through(self.actor, obs)

    def value(self, obs: Tensor) -> Tensor:
        """V(obs): (..., obs_dim) -> (...)."""
        return through(self.critic, obs).squeeze(-1)

    def env_action(self, action: Tensor) -> np.ndarray:
        """What the environment is given: the index, or the vector clipped to its bounds in their own type."""
        action = action.cpu().numpy()
        return action if self.discrete else action.clip(self.low, self.high)

    def log_prob_entropy(self, obs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of actions (...,) and the entropy of the policy, (...,) or for the Gaussian ()."""
        output = through(self.actor, obs)
        if self.discrete:
            return categorical_log_prob(output, action), categorical_entropy(output)
        return gaussian_log_prob(output, self.log_std, action), gaussian_entropy(self.log_std)


class Rollout(NamedTuple):
    """What happened, T = num_steps in N = num_envs environments. `next_obs` is what the step returned, before
    any reset; `obs[t + 1]` is where the environment stood then: the same, or the next episode's start."""
    obs: Tensor  # float32[T + 1, N, obs_dim]
    next_obs: Tensor  # float32[T, N, obs_dim]
    action: Tensor  # as sampled: float32[T, N, action_dim], or of choices int64[T, N, *action_shape]
    reward: Tensor  # float32[T, N]
    terminated: Tensor  # bool[T, N]: the task is over, as in a fall
    truncated: Tensor  # bool[T, N]: the clock ran out, and the task would have gone on


class Batch(NamedTuple):
    """A rollout flattened to T * N rows, with what the update must know of the policy that collected it."""
    obs: Tensor
    action: Tensor
    log_prob: Tensor
    value: Tensor
    advantages: Tensor
    returns: Tensor


def collect_rollout(agent: Agent, envs: list[FlatEnv], noise: Tensor) -> tuple[Rollout, list]:
    """Step every environment once for each row of noise [T, N, action_dim]. Returns the rollout, on the CPU,
    and (episodic_return, episodic_length) of each episode that ended in it."""
    T, N, _ = noise.shape
    rollout = Rollout(
        obs=torch.empty(T + 1, N, envs[0].obs_dim),
        next_obs=torch.empty(T, N, envs[0].obs_dim),
        action=torch.empty(T, N, *envs[0].action_shape, dtype=envs[0].action_dtype),
        reward=torch.empty(T, N),
        terminated=torch.empty(T, N, dtype=torch.bool),
        truncated=torch.empty(T, N, dtype=torch.bool),
    )
    # The same memory as NumPy arrays: writing single numbers into tensors is several times slower.
    obs, next_obs, _, reward, terminated, truncated = (x.numpy() for x in rollout)
    finished = []
    obs[0] = [env.obs for env in envs]
    for t in range(T):
        with torch.no_grad():
            rollout.action[t] = action = agent.sample(rollout.obs[t].to(noise.device), noise[t])
        for i, (env, env_action) in enumerate(zip(envs, agent.env_action(action), strict=True)):
            next_obs[t, i], reward[t, i], terminated[t, i], truncated[t, i], _ = env.step(env_action)
            obs[t + 1, i] = next_obs[t, i]
            if terminated[t, i] or truncated[t, i]:
                finished.append((env.episodic_return, env.episodic_length))
                obs[t + 1, i], _ = env.reset()
    return rollout, finished


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


def update(
    agent: Agent, parameters: nn.Parameter, optimizer: torch.optim.Optimizer,
    batch: Batch, all_advantages: Tensor, order: RandomStream, args: Args,
) -> dict[str, float]:  # fmt: skip
    """Pass over all ranks' rows `update_epochs` times in shuffled minibatches, one gradient step for each.
    `batch` holds this rank's rows, `all_advantages` (T * N,) everyone's. Returns the diagnostics, the same on
    every rank as the weights are: means over the last epoch's minibatches, each taken before its step."""
    rank, N, n = dist.get_rank(), args.num_envs, args.num_envs // dist.get_world_size()
    normalised = replace(args, norm_adv=False)
    for _ in range(args.update_epochs):
        # Row t * N + i is step t of environment i. All ranks draw one order, and each works on its own rows.
        permutation = order.permutation(len(all_advantages)).to(all_advantages.device)
        mine = permutation % N // n == rank
        own = permutation[mine] // N * n + permutation[mine] % n
        sizes = mine.view(args.num_minibatches, -1).sum(1).tolist()
        minibatches = all_advantages[permutation].chunk(args.num_minibatches)
        if args.norm_adv:  # by all ranks' rows, of which ppo_loss sees only some
            minibatches = [(x - x.mean()) / (x.std() + 1e-8) for x in minibatches]
        shuffled = Batch(*(x[own] for x in batch))._replace(advantages=torch.cat(minibatches)[mine])
        epoch = []
        for whole, obs, action, *old in zip(minibatches, *(x.split(sizes) for x in shuffled), strict=True):
            log_prob, entropy = agent.log_prob_entropy(obs, action)
            loss, diagnostics = ppo_loss(log_prob, entropy, agent.value(obs), *old, normalised)
            # The mean over a minibatch is the sum of the ranks' means, each times its share of the rows.
            share = len(obs) / len(whole)
            parameters.grad.zero_()
            if share > 0:
                (share * loss).backward()
                epoch.append(share * torch.stack(list(diagnostics.values())).detach())
            dist.all_reduce(parameters.grad)
            if args.max_grad_norm > 0:
                parameters.grad *= (args.max_grad_norm / (parameters.grad.norm() + 1e-6)).clamp(max=1)
            optimizer.step()
        totals = torch.stack(epoch).sum(0) / args.num_minibatches
        dist.all_reduce(totals)
        means = dict(zip(diagnostics, totals.tolist(), strict=True))
        if args.target_kl is not None and means["approx_kl"] > args.target_kl:
            break
    return means


def check_args(args: Args, env: FlatEnv) -> None:
    """Raise Refusal, before anything has started, for settings that cannot work."""
    check_ranges(args)
    rows, minibatches, total = args.num_envs * args.num_steps, args.num_minibatches, args.total_timesteps
    kind = f"--env-id {args.env_id} has {type(env.action_space).__name__} actions"
    fits = isinstance(env.action_space, (Box, Discrete))
    check(fits, f"{kind}, {SCRIPT}.py takes Discrete or Box: ppo_discrete.py takes several choices")
    fit = math.gcd(rows, minibatches) % rows or 1  # never one row a minibatch
    check(rows % minibatches == 0, f"--num-minibatches {minibatches} does not divide {rows} rows: {fit} does")
    wider = f"--num-steps {2 * args.num_steps} or --no-norm-adv"
    check(rows > minibatches or not args.norm_adv, f"--norm-adv needs 2 rows in a minibatch: give {wider}")
    check(total >= rows, f"--total-timesteps {total} is less than one rollout: give {rows} or more")


@restores_process
@process_group()
def train(args: Args) -> Agent:
    """Train from args.seed, or go on where args.resume stopped, together with the other ranks; returns the
    agent, the same on each. Raises Refusal (a ValueError) for settings that cannot work, NonFinite when a
    loss or observation stops being a number, RankFailed when another rank fails."""
    torch.set_num_threads(1)  # more would only wait for each other, and the bytes would depend on how many
    T, N = args.num_steps, args.num_envs
    with together():
        with make_env(args.env_id, args.env_kwargs) as env:  # closed at once: of some only one can be open
            check_args(args, env)
        mine = own_share(args)  # of the columns 0 .. N - 1, one for each environment
        envs = [make_env(args.env_id, args.env_kwargs, args.seed, index) for index in range(N)[mine]]
        for env in envs:
            env.reset()
    with initial_weights(args.seed):
        agent = Agent(envs[0], args).to(args.device)
    parameters = flatten_parameters(agent)
    optimizer = torch.optim.Adam([parameters], lr=args.learning_rate, eps=1e-5, fused=True)
    reward_scaling = RewardScaling(args.num_envs, args.gamma).to(args.device)
    action_noise, minibatch_order = RandomStream(args.seed, "action"), RandomStream(args.seed, "minibatch")
    num_iterations = args.total_timesteps // (T * N)

    # All that a resumed run needs to end in the same bytes as one that was never cut. The environments are
    # gathered from all ranks when it is saved; the rest is the same on every rank.
    state = {"agent": agent, "optimizer": optimizer, "reward_scaling": reward_scaling}
    state |= {"action_noise": action_noise, "minibatch_order": minibatch_order}
    state |= {f"env_{i}": env for i, env in zip(range(N)[mine], envs, strict=True)}
    run = SharedRun(SCRIPT, args, num_parameters=parameters.numel())
    first_iteration = run.restore(state)

    for iteration in range(first_iteration, num_iterations + 1):
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - (iteration - 1) / num_iterations)

        # Of all environments: what one of them is given does not depend on how many ranks there are.
        noise = agent.draw_noise(action_noise, T, N, envs[0].action_dim).to(args.device)
        with together():
            rollout, own_finished = collect_rollout(agent, envs, noise[:, mine])
            require_finite(iteration, observation=torch.cat(rollout[:2]), reward=rollout.reward)
        finished = [episode for rank in everyone(own_finished) for episode in rank]
        obs, next_obs, action, reward, terminated, truncated = (x.to(args.device) for x in rollout)

        # Acting needed neither values nor log-probabilities: one pass over the finished rollout gives them,
        # computed as the update will compute them, so that its first ratios are 1.
        with torch.no_grad():
            values = agent.value(torch.cat([obs, next_obs]))
            log_prob, _ = agent.log_prob_entropy(obs[:T], action)
        # Observations and actions stay with their rank. These become known to all, (T, N), so that statistics
        # and advantages are those of one process.
        own = (reward, terminated, truncated, values[:T], values[T + 1 :])
        reward, terminated, truncated, value, next_value = map(all_envs, own)
        if args.norm_reward:
            reward = reward_scaling(reward, terminated | truncated)
        value_at_time_limit = mean(next_value[truncated].tolist())
        advantages, returns = compute_gae(
            reward, value, next_value, terminated, truncated, args.gamma, args.gae_lambda
        )
        rows = (obs[:T], action, log_prob, *(x[:, mine] for x in (value, advantages, returns)))
        batch = Batch(*(x.flatten(0, 1) for x in rows))
        losses = update(agent, parameters, optimizer, batch, advantages.flatten(), minibatch_order, args)
        if args.norm_obs:
            agent.obs_norm.update(all_envs(obs[:T]))
        unexplained = (returns - value).var(correction=0) / returns.var(correction=0)
        metrics = {
            "iteration": iteration, "global_step": iteration * T * N, "episodes": len(finished),
            "episodic_return": mean([score for score, _ in finished]),
            "episodic_length": mean([length for _, length in finished]),
            "value_at_time_limit": value_at_time_limit, **losses,
            "explained_variance": (1 - unexplained).item(), "learning_rate": optimizer.param_groups[0]["lr"],
        }  # fmt: skip
        with together():
            require_finite(iteration, loss=torch.tensor(losses["loss"]), parameter=parameters)
            run.log(metrics)
        run.save(iteration, state)
        run.stop_if_asked()

    for env in envs:
        env.close()
    if dist.get_rank() == 0:  # the others leave: an evaluation may take longer than they would wait
        run.finish()
        run.report(*evaluate(agent, args, run.film))
    return agent


def evaluate(agent: Agent, args: Args, film: Callable | None = None) -> tuple[list[float], int]:
    """Play `eval_episodes` episodes with the best action. Returns the scores and how many episodes were
    stopped at `eval_max_steps`. Seeds are the same for every run, the environment is its own, and no random
    stream of training is drawn from. `film(env)` sees the first episode."""
    env = make_env(args.env_id, args.env_kwargs, stream="eval", render=bool(film))
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
    torch.set_num_threads(1)
    checkpoint = load_checkpoint(args, SCRIPT)
    check(args.eval_episodes > 0, "--eval-only needs --eval-episodes 1 or more")
    with make_env(args.env_id, args.env_kwargs) as env:
        check_args(args, env)
        agent = Agent(env, args).to(args.device)
    flatten_parameters(agent)  # where a parameter lies in memory decides the last bit of a product
    agent.load_state_dict(checkpoint["state"]["agent"])
    report_evaluation(args, checkpoint, *evaluate(agent, args))


if __name__ == "__main__":
    with command_line(), process_group():
        args = from_rank_0(partial(parse_args, Args, SCRIPT, __doc__))
        if args.eval_only is None or dist.get_rank() == 0:
            evaluate_only(args) if args.eval_only is not None else train(args)
