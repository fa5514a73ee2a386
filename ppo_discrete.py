"""PPO with a categorical policy, for Gymnasium environments with discrete actions.

Proximal Policy Optimization (Schulman et al. 2017, arXiv:1707.06347) collects a rollout, estimates how much
better than expected each action was, and takes several epochs of gradient steps on that one rollout. The idea
to take away: using data again is safe only while the policy stays close to the one that collected it, and the
clipped surrogate keeps it close by paying nothing more once a probability ratio has left 1 +- clip_coef.

    python ppo_discrete.py --seed 0                  # run it: ten seconds later a pole balances
    python ppo_discrete.py --seed 0 --no-clip-ratio  # ablate it: training returns drop from 264 to 148
    python ppo_discrete.py --seed 0 --break          # break it: a time limit taken for a fall; see V@limit
    python ppo_discrete.py --resume runs/NAME        # go on after Ctrl-C, to the same bytes
    python ppo_discrete.py --eval-only runs/NAME     # play the saved policy
    python -m rerun runs/NAME/recording.rrd          # watch it
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from common.cli import check, check_ranges, command_line, flag, load_checkpoint, parse_args
from common.envs import FlatEnv, RewardScaling, RunningNorm, make_env
from common.metrics import mean, report_evaluation, require_finite
from common.process import compiled, restores_process
from common.run_folder import Run
from common.seeding import RandomStream, initial_weights

SCRIPT = Path(__file__).stem
OPTIMIZERS = {
    "adam": partial(torch.optim.Adam, eps=1e-5, fused=True),
    "rmsprop": partial(torch.optim.RMSprop, alpha=0.99, eps=1e-5),
}


@dataclass
class Args:
    seed: int = 0  # all randomness. Scores named below: means of seeds 0 to 9 with that flag changed
    env_id: str = "CartPole-v1"  # any Gymnasium id without Box actions; module:Env-v0 is imported
    env_kwargs: str = "{}"  # JSON object for gymnasium.make
    mask_actions: bool = False  # actions that the action_mask in info forbids are never taken; see Taxi-v4
    total_timesteps: int = 150_000  # environment steps; rounded down to whole rollouts
    num_envs: int = 8  # environments stepped side by side
    num_steps: int = 128  # steps of each environment in a rollout
    learning_rate: float = 2e-3  # the optimizer's step size
    anneal_lr: bool = True  # learning rate falls linearly to 0; off: score 500
    gamma: float = 0.99  # discount
    gae_lambda: float = 0.9  # 0: one-step TD error, 1: all rewards; at 1: score 500
    num_minibatches: int = 4  # gradient steps an epoch
    update_epochs: int = 4  # passes over each rollout
    norm_adv: bool = True  # advantages to mean 0, std 1 in each minibatch; off: score 500
    clip_coef: float = 0.2  # how far the ratio may move before the surrogate stops paying
    clip_ratio: bool = True  # the surrogate clip itself: bounds each update; off: score 466
    clip_vloss: bool = False  # clip the value's move too; on: score 458
    ent_coef: float = 0.0  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    optimizer: Literal["adam", "rmsprop"] = "adam"  # RMSprop is what A2C uses
    max_grad_norm: float = 0.5  # global gradient-norm clip, 0 for none; at 0: score 464
    target_kl: float | None = None  # stop an iteration's epochs once approx_kl passes it
    hidden_dim: int = 64  # width of both hidden layers
    orthogonal_init: bool = True  # orthogonal weights, zero biases; off: score 477
    shared_trunk: bool = False  # one body for actor and critic; on: score 321
    norm_obs: bool = False  # observations to running mean 0, std 1; on: score 417
    norm_reward: bool = False  # rewards (and so V) divided by the running std of the discounted return
    break_: Annotated[bool, flag(name="break")] = False  # BUG on purpose: a time limit is a fall; see V@limit
    break_reset: bool = False  # BUG on purpose: bootstraps from the next episode; see Pendulum-v1's V@limit
    device: str = "cpu"  # where the networks live
    compile: bool = False  # compile the gradient: 10 s, later 3 s, which 100k to 800k steps win back
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
    """Actor and critic: obs_dim -> hidden -> hidden -> actions, and -> 1. The actor's outputs are logits: the
    log-probabilities of the actions up to a constant. A MultiDiscrete or MultiBinary action is several
    choices, each with logits of its own, made independently: log-probabilities and entropies are sums."""

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
        self.choices, self.action_shape = env.choices, env.action_shape  # such as [6] and (); [2, 3] and (2,)
        self.masked = args.mask_actions

    def logits(self, obs: Tensor) -> Tensor:
        """(..., obs_dim) -> (..., options). The lowest number makes one impossible, and 0 log 0 finite: 0."""
        logits = through(self.actor, obs)
        if self.masked:  # the mask is the end of the observation
            allowed = obs[..., -logits.shape[-1] :] > 0
            logits = torch.where(allowed, logits, torch.finfo(logits.dtype).min)
        return logits

    def largest(self, scores: Tensor) -> Tensor:
        """The index of the largest score in each choice: (..., all options) -> (..., *action_shape)."""
        if self.action_shape == ():  # a single choice, which most environments have: three calls fewer
            return scores.argmax(-1)
        indices = [choice.argmax(-1) for choice in scores.split(self.choices, -1)]
        return torch.stack(indices, -1).view(*scores.shape[:-1], *self.action_shape)

    def sample(self, obs: Tensor, noise: Tensor) -> Tensor:
        """An action for each row. With Gumbel noise, the largest sum is a draw from softmax(logits)."""
        return self.largest(self.logits(obs) + noise)

    def best(self, obs: Tensor) -> Tensor:
        """The action an evaluation takes: the most probable."""
        return self.largest(self.logits(obs))

    def value(self, obs: Tensor) -> Tensor:
        """V(obs): (..., obs_dim) -> (...)."""
        return through(self.critic, obs).squeeze(-1)

    def env_action(self, action: Tensor) -> np.ndarray:
        """What the environment is given: the index itself, or one for each choice."""
        return action.cpu().numpy()

    def log_prob_entropy(self, obs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of actions (...,) and the entropy (...,) of the policy there."""
        choices = self.logits(obs).split(self.choices, -1)
        actions = action.view(*obs.shape[:-1], len(choices)).unbind(-1)
        log_prob = reduce(torch.add, map(categorical_log_prob, choices, actions))
        return log_prob, reduce(torch.add, map(categorical_entropy, choices))


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


def loss_gradient(
    agent: Agent, parameters: nn.Parameter, rows: tuple[Tensor, ...], args: Args
) -> tuple[list[str], Tensor]:
    """Leave the gradient of the loss, clipped, in parameters.grad; returns the diagnostics' names and values.
    `rows` is a minibatch: of each tensor in a Batch, the same rows."""
    obs, action, *old = rows  # old: log_prob, value, advantages, returns
    log_prob, entropy = agent.log_prob_entropy(obs, action)
    loss, diagnostics = ppo_loss(log_prob, entropy, agent.value(obs), *old, args)
    parameters.grad.zero_()
    loss.backward()
    if args.max_grad_norm > 0:
        parameters.grad *= (args.max_grad_norm / (parameters.grad.norm() + 1e-6)).clamp(max=1)
    return list(diagnostics), torch.stack(list(diagnostics.values())).detach()


def update(
    agent: Agent, parameters: nn.Parameter, optimizer: torch.optim.Optimizer,
    batch: Batch, order: RandomStream, args: Args, differentiate: Callable = loss_gradient,
) -> dict[str, float]:  # fmt: skip
    """Pass over the batch `update_epochs` times in shuffled minibatches, one gradient step for each. Returns
    the diagnostics: means over the last epoch's minibatches, each taken before its step."""
    for _ in range(args.update_epochs):
        permutation = order.permutation(len(batch.returns)).to(batch.returns.device)
        shuffled = [x[permutation].chunk(args.num_minibatches) for x in batch]
        epoch = []
        for rows in zip(*shuffled, strict=True):
            names, diagnostics = differentiate(agent, parameters, rows, args)
            optimizer.step()
            epoch.append(diagnostics)
        means = dict(zip(names, torch.stack(epoch).mean(0).tolist(), strict=True))
        if args.target_kl is not None and means["approx_kl"] > args.target_kl:
            break
    return means


def check_args(args: Args, env: FlatEnv) -> None:
    """Raise Refusal, before anything has started, for settings that cannot work."""
    check_ranges(args)
    rows, minibatches, total = args.num_envs * args.num_steps, args.num_minibatches, args.total_timesteps
    kind = f"--env-id {args.env_id} has {type(env.action_space).__name__} actions"
    takes = f"{SCRIPT}.py takes Discrete, MultiDiscrete and MultiBinary: ppo_continuous.py takes Box"
    check(len(env.choices) > 0, f"{kind}, {takes}")
    fit = math.gcd(rows, minibatches) % rows or 1  # never one row a minibatch
    check(rows % minibatches == 0, f"--num-minibatches {minibatches} does not divide {rows} rows: {fit} does")
    wider = f"--num-steps {2 * args.num_steps} or --no-norm-adv"
    check(rows > minibatches or not args.norm_adv, f"--norm-adv needs 2 rows in a minibatch: give {wider}")
    check(total >= rows, f"--total-timesteps {total} is less than one rollout: give {rows} or more")
    check(not (args.break_ and args.break_reset), "--break and --break-reset: give only one of the two")


@restores_process
def train(args: Args) -> Agent:
    """Train from args.seed, or go on where args.resume stopped; returns the agent. Raises Refusal (a
    ValueError) for settings that cannot work, NonFinite when a loss or observation stops being a number."""
    torch.set_num_threads(1)  # more would only wait for each other, and the bytes would depend on how many
    make = partial(make_env, args.env_id, args.env_kwargs, mask=args.mask_actions)
    with make() as env:  # closed at once: of some only one can be open
        check_args(args, env)
    envs = [make(args.seed, index) for index in range(args.num_envs)]
    with initial_weights(args.seed):
        agent = Agent(envs[0], args).to(args.device)
    parameters = flatten_parameters(agent)
    optimizer = OPTIMIZERS[args.optimizer]([parameters], lr=args.learning_rate)
    differentiate = compiled(loss_gradient) if args.compile else loss_gradient
    reward_scaling = RewardScaling(args.num_envs, args.gamma).to(args.device)
    action_noise, minibatch_order = RandomStream(args.seed, "action"), RandomStream(args.seed, "minibatch")
    for env in envs:
        env.reset()
    T, N = args.num_steps, args.num_envs
    num_iterations = args.total_timesteps // (T * N)

    # All that a resumed run needs to end in the same bytes as one that was never cut.
    state = {"agent": agent, "optimizer": optimizer, "reward_scaling": reward_scaling}
    state |= {"action_noise": action_noise, "minibatch_order": minibatch_order}
    state |= {f"env_{i}": env for i, env in enumerate(envs)}
    first_iteration = 1  # unless resumed
    run = Run(SCRIPT, args, num_parameters=parameters.numel())
    first_iteration = run.restore(state)

    for iteration in range(first_iteration, num_iterations + 1):
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - (iteration - 1) / num_iterations)

        uniform = action_noise.uniform(T, N, envs[0].action_dim).to(args.device)
        noise = -torch.log(-torch.log(uniform))  # Gumbel's distribution
        rollout, finished = collect_rollout(agent, envs, noise)
        require_finite(iteration, observation=torch.cat(rollout[:2]), reward=rollout.reward)
        obs, next_obs, action, reward, terminated, truncated = (x.to(args.device) for x in rollout)
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
        losses = update(agent, parameters, optimizer, batch, minibatch_order, args, differentiate)
        require_finite(iteration, loss=torch.tensor(losses["loss"]), parameter=parameters)
        if args.norm_obs:
            agent.obs_norm.update(obs[:T])

        unexplained = (returns - value).var(correction=0) / returns.var(correction=0)
        metrics = {
            "iteration": iteration, "global_step": iteration * T * N, "episodes": len(finished),
            "episodic_return": mean([score for score, _ in finished]),
            "episodic_length": mean([length for _, length in finished]),
            "value_at_time_limit": value_at_time_limit, **losses,
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
    env = make_env(args.env_id, args.env_kwargs, stream="eval", render=bool(film), mask=args.mask_actions)
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
    with make_env(args.env_id, args.env_kwargs, mask=args.mask_actions) as env:
        check_args(args, env)
        agent = Agent(env, args).to(args.device)
    flatten_parameters(agent)  # where a parameter lies in memory decides the last bit of a product
    agent.load_state_dict(checkpoint["state"]["agent"])
    report_evaluation(args, checkpoint, *evaluate(agent, args))


if __name__ == "__main__":
    with command_line():
        args = parse_args(Args, SCRIPT, __doc__)
        evaluate_only(args) if args.eval_only is not None else train(args)
