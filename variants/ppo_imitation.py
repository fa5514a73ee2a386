"""PPO from demonstrations: behaviour cloning, and generative adversarial imitation learning (GAIL).

Cloning fits the policy to what an expert did where the expert was. Its first mistake leads where the expert
never was, and there it knows nothing. The idea to take away: let the policy act, and let a discriminator
judge whether what it did looks like the expert (Ho and Ermon 2016, arXiv:1606.03476). That judgement is a
reward, PPO maximises it, and so the policy learns to come back to where the expert would be. The
environment's own reward is shown, and never learned from.

    python -m variants.ppo_imitation --seed 0                 # run it: five episodes teach a pendulum's swing
    python -m variants.ppo_imitation --pretrain-epochs 300 --total-timesteps 0      # ablate it: cloning alone
    python -m variants.ppo_imitation --seed 0 --break-demos   # break it: actions of other moments
    python -m variants.ppo_imitation --record runs/NAME --episodes 5   # write what the policy of a run does,
    python -m variants.ppo_imitation --env-id ... --demos runs/NAME/demos.npz      # and learn from that
    python -m variants.ppo_imitation --resume runs/NAME       # go on after Ctrl-C, to the same bytes
    python -m variants.ppo_imitation --eval-only runs/NAME    # play the saved policy
    python -m rerun runs/NAME/recording.rrd                   # watch it
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot, softplus

from common.cli import check, check_ranges, command_line, flag, load_checkpoint, parse_args
from common.demonstrations import Demonstrations, read, record, scripted
from common.envs import FlatEnv, RewardScaling, RunningNorm, make_env
from common.metrics import mean, report_evaluation, require_finite
from common.process import restores_process
from common.run_folder import Run
from common.seeding import RandomStream, initial_weights

SCRIPT = Path(__file__).stem


@dataclass
class Args:
    seed: int = 0  # every random stream of the run follows from it
    env_id: str = "Pendulum-v1"  # any Gymnasium id with Discrete or Box actions
    env_kwargs: str = "{}"  # JSON object for gymnasium.make
    demos: str | None = None  # an .npz of demonstrations; default: those of a scripted expert
    demo_episodes: int = 5  # how many of its episodes are learned from
    pretrain_epochs: int = 0  # passes of behaviour cloning over the demonstrations before PPO begins
    reward: Literal["gail", "logit", "env"] = "gail"  # -log(1 - D), log D - log(1 - D), or the true one
    discriminator_updates: int = 2  # the discriminator's gradient steps an iteration; 0: it stays as it began
    break_demos: bool = False  # BUG on purpose: the expert's actions are shuffled among its observations
    total_timesteps: int = 300_000  # environment steps; rounded down to whole rollouts; 0: cloning alone
    num_envs: int = 8  # environments stepped side by side
    num_steps: int = 128  # steps of each environment in a rollout
    learning_rate: float = 1e-3  # Adam's step size
    anneal_lr: bool = True  # learning rate falls linearly to 0
    gamma: float = 0.95  # discount
    gae_lambda: float = 0.9  # 0: one-step TD error, 1: all rewards
    num_minibatches: int = 8  # gradient steps an epoch
    update_epochs: int = 5  # passes over each rollout
    norm_adv: bool = True  # advantages to mean 0, std 1 in each minibatch
    clip_coef: float = 0.2  # how far the ratio may move before the surrogate stops paying
    clip_ratio: bool = True  # the surrogate clip itself: bounds each update
    clip_vloss: bool = False  # clip the value's move too
    ent_coef: float = 0.02  # weight of the entropy bonus; at 0 the policy narrows until it is found out
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # global gradient-norm clip, 0 for none
    target_kl: float | None = None  # stop an iteration's epochs once approx_kl passes it
    hidden_dim: int = 64  # width of both hidden layers
    orthogonal_init: bool = True  # orthogonal weights, zero biases; off: PyTorch's own
    shared_trunk: bool = False  # one body for actor and critic
    log_std_init: float = 0.0  # initial log standard deviation of the action
    norm_obs: bool = False  # observations to running mean 0, std 1
    norm_reward: bool = False  # rewards (and so V) divided by the running std of the discounted return
    break_: Annotated[bool, flag(name="break")] = False  # BUG on purpose: a time limit is taken for a fall
    break_reset: bool = False  # BUG on purpose: a time limit bootstraps from the next episode's first obs
    device: str = "cpu"  # where the networks live
    eval_episodes: int = 20  # episodes of the final evaluation; 0: none
    eval_max_steps: int = 10_000  # an evaluation episode that has not ended by then is stopped
    checkpoint_every: int = 10  # iterations between checkpoints
    rerun: bool = True  # write recording.rrd
    watch: bool = False  # open the Rerun viewer and stream to it while training
    out: str | None = None  # the run's folder; default: a fresh one under runs/
    resume: str | None = None  # a run's folder: go on in it
    eval_only: str | None = None  # a run's folder: only evaluate its checkpoint
    record: str | None = None  # a run's folder, or "scripted": only write demonstrations, to demos.npz
    episodes: int = 5  # how many episodes --record writes


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


class Discriminator(nn.Module):
    """The logit of D(obs, action), the probability that a row is the expert's and not the policy's: rows
    (..., obs_dim + action_dim), standardised by the demonstrations' statistics -> (...)."""

    def __init__(self, expert: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", expert.mean(0))
        self.register_buffer("std", expert.std(0).clamp(min=1e-3))  # of what never changes: not 0
        sizes, width = expert.shape[1], 32
        self.net = nn.Sequential(
            nn.Linear(sizes, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def forward(self, rows: Tensor) -> Tensor:
        return through(self.net, (rows - self.mean) / self.std).squeeze(-1)


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


def judged(agent: Agent, obs: Tensor, action: Tensor) -> Tensor:
    """What the discriminator sees: obs (..., obs_dim) and beside it the action as the environment ran it,
    clipped to its bounds, or one-hot. Unclipped, the policy's actions would give themselves away."""
    if agent.discrete:
        action = one_hot(action, agent.actor[-1].out_features).float()
    else:
        low, high = (torch.as_tensor(x, dtype=obs.dtype, device=obs.device) for x in (agent.low, agent.high))
        action = action.clamp(low, high)
    return torch.cat([obs, action], -1)


def learned_reward(logit: Tensor, kind: str) -> Tensor:
    """The reward for looking like the expert, where D = sigmoid(logit): "gail" is -log(1 - D), which is
    softplus(logit), finite where 1 - D rounds to 0; "logit" is log D - log(1 - D), AIRL's (Fu et al. 2018,
    arXiv:1710.11248). The first is positive, so that living on pays whatever is done: a bias that helps where
    an episode ends by a fall, and teaches nothing."""
    return softplus(logit) if kind == "gail" else logit


def clone(
    agent: Agent, parameters: nn.Parameter, demos: Demonstrations, order: RandomStream, args: Args
) -> None:
    """Behaviour cloning: fit the actor to the expert's actions by maximum likelihood, in minibatches of 64.
    The standard deviation must not shrink to nothing, and PPO is to explore with the one it was promised."""
    optimizer = torch.optim.Adam([parameters], lr=1e-3, fused=True)
    for _ in range(args.pretrain_epochs):
        for chosen in order.permutation(len(demos.obs)).split(64):
            log_prob, _ = agent.log_prob_entropy(demos.obs[chosen], demos.action[chosen])
            parameters.grad.zero_()
            (-log_prob.mean()).backward()
            optimizer.step()
            if not agent.discrete:
                agent.log_std.data.clamp_(min=-1.0)
    if not agent.discrete:
        agent.log_std.data.fill_(args.log_std_init)


def update_discriminator(
    discriminator: Discriminator, optimizer: torch.optim.Optimizer,
    expert: Tensor, policy: Tensor, draw: RandomStream, updates: int,
) -> dict[str, float | None]:  # fmt: skip
    """Gradient steps on the cross-entropy of equal halves: all the policy's rows, and as many of the
    expert's, drawn with replacement. Returns loss and accuracy from before the last step."""
    loss = accuracy = None
    label = torch.cat([torch.ones(len(policy)), torch.zeros(len(policy))]).to(policy.device)
    for _ in range(updates):
        drawn = (draw.uniform(len(policy)) * len(expert)).long().to(policy.device)
        logit = discriminator(torch.cat([expert[drawn], policy]))
        entropy = binary_cross_entropy_with_logits(logit, label)
        optimizer.zero_grad()
        entropy.backward()
        optimizer.step()
        loss, accuracy = entropy.item(), ((logit > 0) == (label > 0)).float().mean().item()
    return {"discriminator_loss": loss, "discriminator_accuracy": accuracy}


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
    batch: Batch, order: RandomStream, args: Args,
) -> dict[str, float]:  # fmt: skip
    """Pass over the batch `update_epochs` times in shuffled minibatches, one gradient step for each. Returns
    the diagnostics: means over the last epoch's minibatches, each taken before its step."""
    for _ in range(args.update_epochs):
        permutation = order.permutation(len(batch.returns)).to(batch.returns.device)
        shuffled = [x[permutation].chunk(args.num_minibatches) for x in batch]
        epoch = []
        for obs, action, *old in zip(*shuffled, strict=True):  # old: log_prob, value, advantages, returns
            log_prob, entropy = agent.log_prob_entropy(obs, action)
            loss, diagnostics = ppo_loss(log_prob, entropy, agent.value(obs), *old, args)
            parameters.grad.zero_()
            loss.backward()
            if args.max_grad_norm > 0:
                parameters.grad *= (args.max_grad_norm / (parameters.grad.norm() + 1e-6)).clamp(max=1)
            optimizer.step()
            epoch.append(torch.stack(list(diagnostics.values())).detach())
        means = dict(zip(diagnostics, torch.stack(epoch).mean(0).tolist(), strict=True))
        if args.target_kl is not None and means["approx_kl"] > args.target_kl:
            break
    return means


def check_args(args: Args, env: FlatEnv) -> None:
    """Raise Refusal, before anything has started, for settings that cannot work."""
    check_ranges(args)
    space, rows, minibatches = env.action_space, args.num_envs * args.num_steps, args.num_minibatches
    kind = f"--env-id {args.env_id} has {type(space).__name__} actions"
    check(isinstance(space, (Box, Discrete)), f"{kind}, {SCRIPT}.py takes Discrete or Box ones")
    fit = math.gcd(rows, minibatches) % rows or 1  # never one row a minibatch
    check(rows % minibatches == 0, f"--num-minibatches {minibatches} does not divide {rows} rows: {fit} does")
    wider = f"--num-steps {2 * args.num_steps} or --no-norm-adv"
    check(rows > minibatches or not args.norm_adv, f"--norm-adv needs 2 rows in a minibatch: give {wider}")
    total = args.total_timesteps
    enough = total >= rows or total == 0
    check(enough, f"--total-timesteps {total} is less than one rollout: give {rows} or more")
    cloning = total > 0 or args.pretrain_epochs > 0
    check(cloning, "--total-timesteps 0 is cloning alone: give --pretrain-epochs 1 or more")
    check(not (args.break_ and args.break_reset), "--break and --break-reset: give only one of the two")


@restores_process
def train(args: Args) -> Agent:
    """Train from args.seed, or go on where args.resume stopped; returns the agent. Raises Refusal (a
    ValueError) for settings that cannot work, NonFinite when a loss or observation stops being a number."""
    torch.set_num_threads(1)  # more would only wait for each other, and the bytes would depend on how many
    with make_env(args.env_id, args.env_kwargs) as env:  # closed at once: of some only one can be open
        check_args(args, env)
        if args.demos is None:
            demos, _ = scripted(args.env_id, args.env_kwargs, args.seed, args.demo_episodes)
        else:
            demos = read(args.demos, env, args.demo_episodes)
    minibatch_order = RandomStream(args.seed, "minibatch")
    if args.break_demos:
        demos = demos._replace(action=demos.action[minibatch_order.permutation(len(demos.action))])
    demos = Demonstrations(*(x.to(args.device) for x in demos))
    envs = [make_env(args.env_id, args.env_kwargs, args.seed, index) for index in range(args.num_envs)]
    with initial_weights(args.seed):
        agent = Agent(envs[0], args).to(args.device)
        expert = judged(agent, demos.obs, demos.action)
        discriminator = Discriminator(expert).to(args.device)
    parameters = flatten_parameters(agent)
    optimizer = torch.optim.Adam([parameters], lr=args.learning_rate, eps=1e-5, fused=True)
    discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3, fused=True)
    reward_scaling = RewardScaling(args.num_envs, args.gamma).to(args.device)
    action_noise, expert_draw = RandomStream(args.seed, "action"), RandomStream(args.seed, "discriminator")
    for env in envs:
        env.reset()
    T, N = args.num_steps, args.num_envs
    num_iterations = args.total_timesteps // (T * N)

    # All that a resumed run needs to end in the same bytes as one that was never cut.
    state = {"agent": agent, "optimizer": optimizer, "reward_scaling": reward_scaling}
    state |= {"discriminator": discriminator, "discriminator_optimizer": discriminator_optimizer}
    state |= {"action_noise": action_noise, "minibatch_order": minibatch_order, "expert_draw": expert_draw}
    state |= {f"env_{i}": env for i, env in enumerate(envs)}
    first_iteration = 1  # unless resumed
    run = Run(SCRIPT, args, num_parameters=parameters.numel())
    if args.resume is None and args.pretrain_epochs > 0:
        run.say(f"cloning {len(demos.obs):,} steps of the expert, {args.pretrain_epochs} times over")
        clone(agent, parameters, demos, minibatch_order, args)
    first_iteration = run.restore(state)
    same = torch.equal(discriminator.mean, expert.mean(0))
    check(same, f"--demos {args.demos} is not what it was when the run began: put that back")

    for iteration in range(first_iteration, num_iterations + 1):
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - (iteration - 1) / num_iterations)

        noise = agent.draw_noise(action_noise, T, N, envs[0].action_dim).to(args.device)
        rollout, finished = collect_rollout(agent, envs, noise)
        require_finite(iteration, observation=torch.cat(rollout[:2]), reward=rollout.reward)
        obs, next_obs, action, reward, terminated, truncated = (x.to(args.device) for x in rollout)
        judged_rows = judged(agent, obs[:T], action)
        if args.reward != "env":
            with torch.no_grad():
                reward = learned_reward(discriminator(judged_rows), args.reward)
        if args.norm_reward:
            reward = reward_scaling(reward, terminated | truncated)

        # Acting needed neither values nor log-probabilities: one pass over the finished rollout gives them,
        # computed as the update will compute them, so that its first ratios are 1.
        with torch.no_grad():
            values = agent.value(torch.cat([obs, next_obs]))
            value, value_after_reset, next_value = values[:T], values[1 : T + 1], values[T + 1 :]
            log_prob, _ = agent.log_prob_entropy(obs[:T], action)
        value_at_time_limit = mean(next_value[truncated].tolist())
        if args.break_:
            terminated = terminated | truncated
        if args.break_reset:
            next_value = value_after_reset
        advantages, returns = compute_gae(
            reward, value, next_value, terminated, truncated, args.gamma, args.gae_lambda
        )

        rows = (obs[:T], action, log_prob, value, advantages, returns)
        batch = Batch(*(x.flatten(0, 1) for x in rows))
        losses = update(agent, parameters, optimizer, batch, minibatch_order, args)
        losses |= update_discriminator(
            discriminator, discriminator_optimizer, expert, judged_rows.flatten(0, 1), expert_draw,
            args.discriminator_updates,
        )  # fmt: skip
        require_finite(iteration, loss=torch.tensor(losses["loss"]), parameter=parameters)
        if args.norm_obs:
            agent.obs_norm.update(obs[:T])

        unexplained = (returns - value).var(correction=0) / returns.var(correction=0)
        metrics = {
            "iteration": iteration, "global_step": iteration * T * N, "episodes": len(finished),
            "episodic_return": mean([score for score, _ in finished]),
            "episodic_length": mean([length for _, length in finished]),
            "value_at_time_limit": value_at_time_limit, "learned_reward": reward.mean().item(), **losses,
            "explained_variance": (1 - unexplained).item(), "learning_rate": optimizer.param_groups[0]["lr"],
        }  # fmt: skip
        run.log(metrics)
        run.save(iteration, state)
        run.stop_if_asked()

    for env in envs:
        env.close()
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
    with command_line():
        args = parse_args(Args, SCRIPT, __doc__)
        if args.record is not None:
            record(args.record, args.episodes, args.env_id, args.env_kwargs, args.seed)
        else:
            evaluate_only(args) if args.eval_only is not None else train(args)
