"""PPO that remembers: GRU, LSTM, transformer or Mamba, for tasks that no single observation gives away.

The policy acts on the episode so far: a memory stands where the other scripts have their second hidden layer.
The idea to take away: with a memory, everything is a question of *when*. It is emptied before an episode's
first observation is taken in, not after. The update replays chunks of steps, each from the state that the
policy had there when it collected them (Kapturowski et al. 2019, "Recurrent experience replay", section
3). And the value at a time limit is what that very episode's memory makes of its last observation.

    python -m variants.ppo_memory --seed 0                # run it: a cart-pole seen without its velocities
    python -m variants.ppo_memory --seed 0 --memory none  # ablate it: one observation is not enough
    python -m variants.ppo_memory --seed 0 --break-stale  # break it: every chunk from an empty memory
    python -m variants.ppo_memory --resume runs/NAME      # go on after Ctrl-C, to the same bytes
    python -m variants.ppo_memory --eval-only runs/NAME   # play the saved policy
    python -m rerun runs/NAME/recording.rrd               # watch it
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor, nn

from common.cli import check, check_ranges, command_line, flag, load_checkpoint, parse_args
from common.envs import FlatEnv, RewardScaling, RunningNorm, make_env
from common.files import Kept
from common.metrics import mean, report_evaluation, require_finite
from common.process import restores_process
from common.run_folder import Run
from common.seeding import RandomStream, initial_weights

SCRIPT = Path(__file__).stem
State = tuple  # what a memory holds: tensors with a row for each lane, in tuples; zeros where it is empty


@dataclass
class Args:
    seed: int = 0  # every random stream of the run follows from it
    env_id: str = "CartPoleNoVelocity-v0"  # any Gymnasium id with Discrete or Box actions
    env_kwargs: str = "{}"  # JSON object for gymnasium.make
    total_timesteps: int = 300_000  # environment steps; rounded down to whole rollouts
    memory: Literal["none", "gru", "lstm", "transformer", "mamba"] = "gru"  # what carries the past along
    memory_size: int = 64  # width of the memory, and of the layer before it
    bptt_length: int = 16  # steps of a chunk: how far gradients reach back; divides num_steps
    recompute_advantages: bool = False  # Brax's layout: each minibatch's GAE anew, cut at its chunks' ends
    num_envs: int = 32  # environments stepped side by side
    num_steps: int = 64  # steps of each environment in a rollout
    learning_rate: float = 2e-3  # Adam's step size
    anneal_lr: bool = True  # learning rate falls linearly to 0
    gamma: float = 0.99  # discount
    gae_lambda: float = 0.95  # 0: one-step TD error, 1: all rewards
    num_minibatches: int = 4  # gradient steps an epoch, each on whole chunks
    update_epochs: int = 4  # passes over each rollout
    norm_adv: bool = True  # advantages to mean 0, std 1 in each minibatch
    clip_coef: float = 0.2  # how far the ratio may move before the surrogate stops paying
    clip_ratio: bool = True  # the surrogate clip itself: bounds each update
    clip_vloss: bool = False  # clip the value's move too
    ent_coef: float = 0.0  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # global gradient-norm clip, 0 for none
    target_kl: float | None = None  # stop an iteration's epochs once approx_kl passes it
    orthogonal_init: bool = True  # orthogonal weights, zero biases; off: PyTorch's own
    shared_trunk: bool = False  # one memory for actor and critic
    log_std_init: float = 0.0  # initial log standard deviation of the action
    norm_obs: bool = False  # observations to running mean 0, std 1
    norm_reward: bool = False  # rewards (and so V) divided by the running std of the discounted return
    break_: Annotated[bool, flag(name="break")] = False  # BUG on purpose: a time limit is taken for a fall
    break_reset: bool = False  # BUG on purpose: a time limit bootstraps from the next episode's first obs
    break_memory: bool = False  # BUG on purpose: the memory runs on into the next episode; no score shows it
    break_stale: bool = False  # BUG on purpose: chunks begin with an empty memory; it learns half as fast
    device: str = "cpu"  # where the networks live
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


def on_each(function: Callable, *states: State | Tensor) -> State | Tensor:
    """`function` applied to each tensor of a state, or to each with its like in other states."""
    if isinstance(states[0], Tensor):
        return function(*states)
    return tuple(on_each(function, *parts) for parts in zip(*states, strict=True))


def reset(state: State, starts: Tensor) -> State:
    """The state with the rows emptied in which an episode starts, bool (N,); no gradient passes there."""
    return on_each(lambda x: x.masked_fill(starts.view(-1, *[1] * (x.dim() - 1)), 0.0), state)


class NoMemory(nn.Module):
    """No memory: a layer like any other. Its methods are those of every memory; the others replace some.
    A state is a tuple of tensors with a row for each of N lanes, all zeros where the memory is empty."""

    row_shapes: tuple = ()  # of one lane in each tensor of the state

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size)

    def initial(self, lanes: int) -> State:
        """The state of empty memories."""
        device = next(self.parameters()).device
        return tuple(torch.zeros(lanes, *shape, device=device) for shape in self.row_shapes)

    def step(self, state: State, x: Tensor) -> tuple[Tensor, State]:
        """Take in one input of each lane, (N, size), with no reset: outputs (N, size) and the state after."""
        output, state = self.sequence(state, x[None], torch.zeros_like(x[None, :, 0], dtype=torch.bool))
        return output[0], state

    def sequence(self, state: State, xs: Tensor, starts: Tensor) -> tuple[Tensor, State]:
        """Take in inputs (T, N, size) one after the other. Where starts, bool (T, N), says that an input is
        the first of an episode, the memory is emptied *before* it takes that in."""
        return self.layer(xs).tanh(), state


class Recurrent(NoMemory):
    """A GRU (Cho et al. 2014, arXiv:1406.1078) or an LSTM (Hochreiter and Schmidhuber 1997)."""

    SPAN = 32

    def __init__(self, size: int, cell: type[nn.RNNCellBase]) -> None:
        nn.Module.__init__(self)
        self.cell = cell(size, size)
        self.row_shapes = ((size,),) * (2 if cell is nn.LSTMCell else 1)
        # Units that keep what they hold for 2 to SPAN steps (Tallec and Ollivier 2018, arXiv:1804.11188).
        keep = torch.log(torch.empty(size).uniform_(1, self.SPAN - 1))
        self.cell.bias_hh.data[size : 2 * size] = keep  # a GRU's update gate, or an LSTM's forget gate
        if cell is nn.LSTMCell:
            self.cell.bias_hh.data[:size] = -keep  # what it keeps it does not overwrite

    def step(self, state: State, x: Tensor) -> tuple[Tensor, State]:
        state = self.cell.forward(x, state) if len(state) > 1 else (self.cell.forward(x, state[0]),)
        return state[0], state

    def sequence(self, state: State, xs: Tensor, starts: Tensor) -> tuple[Tensor, State]:
        outputs = []
        for x, start, any_start in zip(xs, starts, starts.any(1).tolist(), strict=True):
            output, state = self.step(reset(state, start) if any_start else state, x)
            outputs.append(output)
        return torch.stack(outputs), state


class Transformer(NoMemory):
    """One block of a transformer (Vaswani et al. 2017, arXiv:1706.03762), layers normalised first. Its state
    is the WINDOW inputs before this one, and for each whether it is of this episode. No input has a position:
    each head learns what to add to a score at each distance back, and begins with a slope of its own (Press
    et al. 2022, arXiv:2108.12409), so that some heads look at the last inputs and some at all."""

    WINDOW, HEADS = 32, 4

    def __init__(self, size: int) -> None:
        nn.Module.__init__(self)
        self.row_shapes = ((self.WINDOW, size), (self.WINDOW,))
        self.norm = nn.LayerNorm(size)
        self.query, self.key, self.value = (nn.Linear(size, size) for _ in range(3))
        slopes = 2.0 ** (1 - 2 * torch.arange(self.HEADS))
        self.distance_bias = nn.Parameter(-slopes.outer(torch.arange(self.WINDOW + 1)))
        self.project = nn.Linear(size, size)
        self.mlp = nn.Sequential(
            nn.LayerNorm(size), nn.Linear(size, 2 * size), nn.ReLU(), nn.Linear(2 * size, size)
        )
        for layer in (self.project, self.mlp[-1]):  # at first it passes its input on, and adds by and by
            nn.init.zeros_(layer.weight)

    def sequence(self, state: State, xs: Tensor, starts: Tensor) -> tuple[Tensor, State]:
        W, (before, of_this_episode) = self.WINDOW, state
        inputs = torch.cat([before, xs.transpose(0, 1)], 1)  # (N, W + T, size)
        # Episodes by number: 0 the one under way, then counted up; -1 is a place with no input of it.
        episode = torch.cat([of_this_episode - 1, starts.cumsum(0).T], 1)
        index = torch.arange(inputs.shape[1], device=xs.device)
        distance = index[W:, None] - index  # (T, W + T)
        seen = (episode[:, W:, None] == episode[:, None]) & (distance >= 0) & (distance <= W)
        normed = self.norm(inputs)
        query, key, value = (
            layer(x).unflatten(-1, (self.HEADS, -1)).transpose(1, 2)  # (N, heads, places, size / heads)
            for layer, x in ((self.query, normed[:, W:]), (self.key, normed), (self.value, normed))
        )
        scores = query @ key.transpose(2, 3) / math.sqrt(key.shape[-1])
        scores = scores + self.distance_bias[:, distance.clamp(0, W)]
        weights = scores.masked_fill(~seen.unsqueeze(1), -math.inf).softmax(-1)
        x = inputs[:, W:] + self.project((weights @ value).transpose(1, 2).flatten(2))
        x = x + through(self.mlp, x)
        kept = (episode[:, -W:] == episode[:, -1:]).float()
        return x.transpose(0, 1), (inputs[:, -W:] * kept.unsqueeze(-1), kept)


class Mamba(NoMemory):
    """A selective state space (Gu and Dao 2023, arXiv:2312.00752): h = exp(dt A) h + dt B u, y = C h + D u,
    where dt, B and C depend on the input u, so that it chooses what to keep. Its state is h, and the inputs
    that the short convolution before it still needs."""

    STATES, CONV, EXPAND = 16, 4, 2

    def __init__(self, size: int) -> None:
        nn.Module.__init__(self)
        self.inner, self.rank = self.EXPAND * size, math.ceil(size / 16)
        self.row_shapes = ((self.CONV - 1, self.inner), (self.inner, self.STATES))
        self.norm = nn.LayerNorm(size)
        self.project_in = nn.Linear(size, 2 * self.inner, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(self.CONV, self.inner).uniform_(-0.5, 0.5))
        self.conv_bias = nn.Parameter(torch.zeros(self.inner))
        self.select = nn.Linear(self.inner, self.rank + 2 * self.STATES, bias=False)
        self.to_dt = nn.Linear(self.rank, self.inner)
        # As the authors start it: dt between 0.001 and 0.1, and decay rates 1 to 16 in every channel.
        dt = torch.exp(torch.empty(self.inner).uniform_(math.log(0.001), math.log(0.1)))
        self.to_dt.bias.data.copy_(dt + torch.log(-torch.expm1(-dt)))  # its inverse softplus
        self.log_decay = nn.Parameter(torch.arange(1.0, self.STATES + 1).log().repeat(self.inner, 1))
        self.skip = nn.Parameter(torch.ones(self.inner))
        self.project_out = nn.Linear(self.inner, size, bias=False)

    def sequence(self, state: State, xs: Tensor, starts: Tensor) -> tuple[Tensor, State]:
        T, (before, h) = len(xs), state
        u, gate = self.project_in(self.norm(xs)).chunk(2, -1)
        inputs = torch.cat([before.transpose(0, 1), u])  # (CONV - 1 + T, N, inner)
        episode = starts.cumsum(0)
        episode = torch.cat([torch.zeros_like(episode[:1]).expand(self.CONV - 1, -1), episode]).unsqueeze(-1)
        same = [episode[k : k + T] == episode[self.CONV - 1 :] for k in range(self.CONV)]
        taps = (inputs[k : k + T] * same[k] * self.conv_weight[k] for k in range(self.CONV))
        u = nn.functional.silu(sum(taps) + self.conv_bias)
        dt, b, c = self.select(u).split([self.rank, self.STATES, self.STATES], -1)
        dt = nn.functional.softplus(self.to_dt(dt))
        keep = torch.exp(dt.unsqueeze(-1) * -self.log_decay.exp())  # (T, N, inner, STATES), like add
        add, ys = (dt * u).unsqueeze(-1) * b.unsqueeze(-2), []
        for keep_t, add_t, c_t, start in zip(keep, add, c.unsqueeze(-1), starts, strict=True):
            (h,) = reset((h,), start)
            h = torch.addcmul(add_t, keep_t, h)
            ys.append(h @ c_t)
        y = torch.stack(ys).squeeze(-1) + self.skip * u
        y = xs + self.project_out(y * nn.functional.silu(gate))
        last = slice(1 - self.CONV, None)
        return y, ((inputs[last] * (episode[last] == episode[-1])).transpose(0, 1), h)


MEMORIES = {"none": NoMemory, "transformer": Transformer, "mamba": Mamba}
MEMORIES |= {"gru": partial(Recurrent, cell=nn.GRUCell), "lstm": partial(Recurrent, cell=nn.LSTMCell)}


class Agent(nn.Module):
    """Actor and critic: obs_dim -> a layer -> a memory -> action_dim, and -> 1. `state` is a tuple of the
    memories' states: the actor's, and the critic's if it has one of its own. Observations are
    (T, N, obs_dim), starts bool (T, N)."""

    def __init__(self, env: FlatEnv, args: Args) -> None:
        super().__init__()
        # A layer of the networks: its statistics are saved with them, and a forward pass never changes them.
        self.obs_norm = RunningNorm(env.obs_dim) if args.norm_obs else nn.Identity()
        init = layer_init if args.orthogonal_init else lambda layer, gain: layer
        size, trunks = args.memory_size, 1 if args.shared_trunk else 2
        layers = (init(nn.Linear(env.obs_dim, size), math.sqrt(2)) for _ in range(trunks))
        self.encoders = nn.ModuleList(nn.Sequential(self.obs_norm, layer, nn.Tanh()) for layer in layers)
        self.memories = nn.ModuleList(MEMORIES[args.memory](size) for _ in range(trunks))
        # Normalised: a memory's outputs have no scale of their own, and V may have to reach 100 from them.
        norms = [nn.LayerNorm(size) for _ in range(trunks)]
        # The small gain makes the first policy nearly the same in every state.
        self.actor = nn.Sequential(norms[0], init(nn.Linear(size, env.action_dim), 0.01))
        self.critic = nn.Sequential(norms[-1], init(nn.Linear(size, 1), 1.0))
        self.discrete = isinstance(env.action_space, Discrete)
        if not self.discrete:
            self.log_std = nn.Parameter(torch.full((env.action_dim,), args.log_std_init))
            self.low, self.high = env.low, env.high

    def initial(self, lanes: int) -> State:
        """The state of empty memories."""
        return tuple(memory.initial(lanes) for memory in self.memories)

    def step(self, state: State, obs: Tensor, starts: Tensor) -> tuple[Tensor, State]:
        """Take in one observation a lane, (N, obs_dim), after a reset where starts (N,) is true: the actor's
        outputs (N, action_dim), and the state after it. A state of the actor's memory alone will do."""
        outputs, after = [], []
        for i, own in enumerate(reset(state, starts)):
            output, own = self.memories[i].step(own, through(self.encoders[i], obs))
            outputs, after = [*outputs, output], [*after, own]
        return self.actor(outputs[0]), tuple(after)

    def draw_noise(self, stream: RandomStream, *shape: int) -> Tensor:
        """What `sample` adds to the actor's outputs: Gumbel noise for logits, normal noise for a mean."""
        return -torch.log(-torch.log(stream.uniform(*shape))) if self.discrete else stream.normal(*shape)

    def sample(self, output: Tensor, noise: Tensor) -> Tensor:
        """An action for each row. With Gumbel noise, the largest sum is a draw from softmax(logits)."""
        return (output + noise).argmax(-1) if self.discrete else output + self.log_std.exp() * noise

    def best(self, output: Tensor) -> Tensor:
        """The action an evaluation takes: the most probable, or the mean."""
        return output.argmax(-1) if self.discrete else output

    def env_action(self, action: Tensor) -> np.ndarray:
        """What the environment is given: the index, or the vector clipped to its bounds in their own type."""
        action = action.cpu().numpy()
        return action if self.discrete else action.clip(self.low, self.high)

    def value(self, state: State, obs: Tensor, starts: Tensor) -> Tensor:
        """V (T, N) of observations that are taken in one after the other from `state` on."""
        features, _ = self.memories[-1].sequence(state[-1], through(self.encoders[-1], obs), starts)
        return self.critic(features).squeeze(-1)

    def log_prob_entropy(
        self, state: State, obs: Tensor, starts: Tensor, action: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Log-probability (T, N) of actions, and the entropy of the policy, (T, N) or for the Gaussian ()."""
        features, _ = self.memories[0].sequence(state[0], through(self.encoders[0], obs), starts)
        output = self.actor(features)
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
    """A rollout cut into C = T / L * N chunks of L = bptt_length steps, with what the update must know of the
    policy that collected it. A chunk's obs and starts go one step further, to where the next one begins."""
    state: State  # of the memories where each chunk begins, C lanes
    obs: Tensor  # float32[L + 1, C, obs_dim]
    starts: Tensor  # bool[L + 1, C]: obs is the first of an episode
    next_obs: Tensor  # [L, C, ...], like all that follow
    action: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    log_prob: Tensor
    value: Tensor
    advantages: Tensor
    returns: Tensor


def collect_rollout(
    agent: Agent, envs: list[FlatEnv], noise: Tensor, state: State, args: Args
) -> tuple[Rollout, list, Tensor, list[State]]:
    """Step every environment once for each row of noise [T, N, action_dim]. Returns the rollout, on the CPU;
    (episodic_return, episodic_length) of each episode that ended in it; starts, bool[T + 1, N], true where
    obs is an episode's first; and the states before steps 0, L, 2 L, ... T."""
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
    finished, states, starts = [], [], torch.zeros(T + 1, N, dtype=torch.bool)
    obs[0] = [env.obs for env in envs]
    starts[0] = torch.tensor([env.episodic_length == 0 and not args.break_memory for env in envs])
    for t in range(T):
        if t % args.bptt_length == 0:
            states.append(state)
        with torch.no_grad():
            output, state = agent.step(state, rollout.obs[t].to(noise.device), starts[t].to(noise.device))
            rollout.action[t] = action = agent.sample(output, noise[t])
        for i, (env, env_action) in enumerate(zip(envs, agent.env_action(action), strict=True)):
            next_obs[t, i], reward[t, i], terminated[t, i], truncated[t, i], _ = env.step(env_action)
            obs[t + 1, i] = next_obs[t, i]
            if terminated[t, i] or truncated[t, i]:
                finished.append((env.episodic_return, env.episodic_length))
                obs[t + 1, i], _ = env.reset()
                starts[t + 1, i] = not args.break_memory
    return rollout, finished, starts, [*states, state]


def all_values(
    agent: Agent, state: State, obs: Tensor, starts: Tensor, next_obs: Tensor, truncated: Tensor
) -> tuple[Tensor, Tensor]:
    """V(obs) (T + 1, N) and V(next_obs) (T, N), each from the memory of what came before. V(next_obs_t) is
    V(obs_{t+1}) while the episode goes on, and unused after a fall. At a time limit the memory after step t
    takes in next_obs_t, with no reset, and nothing later hears of it: those lanes go through the steps a
    second time, with next_obs_t in the place of the next episode's first observation."""
    value = agent.value(state, obs, starts)
    next_value = value[1:].clone()
    t, lane = truncated.nonzero(as_tuple=True)
    if len(t):
        obs, starts, row = obs[:, lane], starts[:, lane], torch.arange(len(t), device=obs.device)
        obs[t + 1, row], starts[t + 1, row] = next_obs[t, lane], False
        again = agent.value(on_each(lambda x: x[lane], state), obs, starts)
        next_value[t, lane] = again[t + 1, row]
    return value, next_value


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


def in_chunks(x: Tensor, length: int, more: int = 0) -> Tensor:
    """(T, N, ...) -> (length, T / length * N, ...); with `more`, of T + more steps, each goes on that far."""
    return torch.cat([x[t : t + length + more] for t in range(0, len(x) - more, length)], 1)


def update(
    agent: Agent, parameters: nn.Parameter, optimizer: torch.optim.Optimizer,
    batch: Batch, order: RandomStream, args: Args,
) -> dict[str, float]:  # fmt: skip
    """Pass over the batch `update_epochs` times in shuffled minibatches of chunks, one gradient step each.
    Returns the diagnostics: means over the last epoch's minibatches, each taken before its step."""
    for _ in range(args.update_epochs):
        permutation = order.permutation(batch.returns.shape[1]).to(batch.returns.device)
        epoch = []
        for chosen in permutation.chunk(args.num_minibatches):
            state = on_each(lambda x, lanes=chosen: x[lanes], batch.state)
            obs, starts, *fields = (x[:, chosen] for x in batch[1:])
            next_obs, action, reward, terminated, truncated, *old = fields
            if args.recompute_advantages:
                with torch.no_grad():
                    value, next_value = all_values(agent, state, obs, starts, next_obs, truncated)
                if args.break_reset:
                    next_value = value[1:]
                old[2:] = compute_gae(
                    reward, value[:-1], next_value, terminated, truncated, args.gamma, args.gae_lambda
                )
            log_prob, entropy = agent.log_prob_entropy(state, obs[:-1], starts[:-1], action)
            value = agent.value(state, obs[:-1], starts[:-1])
            loss, diagnostics = ppo_loss(log_prob, entropy, value, *old, args)
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
    fit, uneven = math.gcd(args.num_steps, args.bptt_length), args.num_steps % args.bptt_length
    sentence = f"--bptt-length {args.bptt_length} does not divide --num-steps {args.num_steps}: {fit} does"
    check(uneven == 0, sentence)
    chunks = rows // args.bptt_length
    fit = math.gcd(chunks, minibatches) % rows or 1  # never one row a minibatch
    sentence = f"--num-minibatches {minibatches} does not divide {chunks} chunks of --bptt-length: {fit} does"
    check(chunks % minibatches == 0, sentence)
    wider = f"--num-steps {2 * args.num_steps} or --no-norm-adv"
    check(rows > minibatches or not args.norm_adv, f"--norm-adv needs 2 rows in a minibatch: give {wider}")
    total, size = args.total_timesteps, args.memory_size
    check(total >= rows, f"--total-timesteps {total} is less than one rollout: give {rows} or more")
    check(not (args.break_ and args.break_reset), "--break and --break-reset: give only one of the two")
    split = f"--memory-size {size} cannot be split among the transformer's {Transformer.HEADS} heads"
    fits = args.memory != "transformer" or size % Transformer.HEADS == 0
    check(fits, f"{split}: give {math.ceil(size / Transformer.HEADS) * Transformer.HEADS}")


@restores_process
def train(args: Args) -> Agent:
    """Train from args.seed, or go on where args.resume stopped; returns the agent. Raises Refusal (a
    ValueError) for settings that cannot work, NonFinite when a loss or observation stops being a number."""
    torch.set_num_threads(1)  # more would only wait for each other, and the bytes would depend on how many
    with make_env(args.env_id, args.env_kwargs) as env:  # closed at once: of some only one can be open
        check_args(args, env)
    envs = [make_env(args.env_id, args.env_kwargs, args.seed, index) for index in range(args.num_envs)]
    with initial_weights(args.seed):
        agent = Agent(envs[0], args).to(args.device)
    parameters = flatten_parameters(agent)
    optimizer = torch.optim.Adam([parameters], lr=args.learning_rate, eps=1e-5, fused=True)
    reward_scaling = RewardScaling(args.num_envs, args.gamma).to(args.device)
    action_noise, minibatch_order = RandomStream(args.seed, "action"), RandomStream(args.seed, "minibatch")
    for env in envs:
        env.reset()
    T, N, L = args.num_steps, args.num_envs, args.bptt_length
    num_iterations = args.total_timesteps // (T * N)
    memory = Kept(agent.initial(N))  # goes on from rollout to rollout

    # All that a resumed run needs to end in the same bytes as one that was never cut.
    state = {"agent": agent, "optimizer": optimizer, "reward_scaling": reward_scaling, "memory": memory}
    state |= {"action_noise": action_noise, "minibatch_order": minibatch_order}
    state |= {f"env_{i}": env for i, env in enumerate(envs)}
    first_iteration = 1  # unless resumed
    run = Run(SCRIPT, args, num_parameters=parameters.numel())
    first_iteration = run.restore(state)
    memory.value = on_each(lambda x: x.to(args.device), memory.value)

    for iteration in range(first_iteration, num_iterations + 1):
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - (iteration - 1) / num_iterations)

        noise = agent.draw_noise(action_noise, T, N, envs[0].action_dim).to(args.device)
        rollout, finished, starts, states = collect_rollout(agent, envs, noise, memory.value, args)
        require_finite(iteration, observation=torch.cat(rollout[:2]), reward=rollout.reward)
        obs, next_obs, action, reward, terminated, truncated = (x.to(args.device) for x in rollout)
        starts, memory.value = starts.to(args.device), states.pop()
        if args.norm_reward:
            reward = reward_scaling(reward, terminated | truncated)

        # Acting needed neither values nor log-probabilities: one pass over the finished rollout gives them.
        with torch.no_grad():
            values, next_value = all_values(agent, states[0], obs, starts, next_obs, truncated)
            value, value_after_reset = values[:T], values[1:]
            log_prob, _ = agent.log_prob_entropy(states[0], obs[:T], starts[:T], action)
        value_at_time_limit = mean(next_value[truncated].tolist())
        if args.break_:
            terminated = terminated | truncated
        if args.break_reset:
            next_value = value_after_reset
        advantages, returns = compute_gae(
            reward, value, next_value, terminated, truncated, args.gamma, args.gae_lambda
        )

        state_at = on_each(lambda *chunks: torch.cat(chunks), *states)
        if args.break_stale:
            state_at = on_each(torch.zeros_like, state_at)
        rows = (next_obs, action, reward, terminated, truncated, log_prob, value, advantages, returns)
        chunks = (in_chunks(x, L) for x in rows)
        batch = Batch(state_at, in_chunks(obs, L, 1), in_chunks(starts, L, 1), *chunks)
        losses = update(agent, parameters, optimizer, batch, minibatch_order, args)
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
    """Play `eval_episodes` episodes with the best action, each from an empty memory. Returns the scores and
    how many episodes were stopped at `eval_max_steps`. Seeds are the same for every run, the environment is
    its own, and no random stream of training is drawn from. `film(env)` sees the first episode."""
    env = make_env(args.env_id, args.env_kwargs, stream="eval", render=bool(film))
    scores, stopped, no_start = [], 0, torch.zeros(1, dtype=torch.bool, device=args.device)
    for episode in range(args.eval_episodes):
        obs, _ = env.reset()
        state, done = agent.initial(1)[:1], False  # the actor's
        while not done and env.episodic_length < args.eval_max_steps:
            if film and episode == 0:
                film(env)
            with torch.no_grad():
                output, state = agent.step(state, torch.tensor(obs[None], device=args.device), no_start)
            obs, _, terminated, truncated, _ = env.step(agent.env_action(agent.best(output))[0])
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
        evaluate_only(args) if args.eval_only is not None else train(args)
