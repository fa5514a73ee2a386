"""Hints: `python -m exercises.hint 3` shows the first for exercise 3 and says how to ask for the next."""

from __future__ import annotations

import sys
import textwrap

from exercises.checks import exercises, shown

# For each exercise three steps: a question, where the answer lies, nearly the answer.
HINTS = {
    1: (
        "There are two questions at each step, and two flags to answer them. Does the episode have a "
        "future after this step? And is the step after it, t + 1, of the same episode? For which of the "
        "three, a fall, a time limit, an ordinary step, is each answer yes?",
        "A future: not after a fall, but after a time limit and after an ordinary step. The same episode: "
        "only after "
        "an ordinary step. So V(next_obs) is switched off by one flag alone, and A_{t+1} by either of the "
        "two. "
        "Multiply each of them by something that is 0 when it is switched off. The rollout's last step is an "
        "ordinary step.",
        "`delta` is rewards[t] + gamma * next_values[t] * ~(one flag)[t] - values[t], with the flag "
        "that stands for a fall. `advantage` becomes delta + gamma * gae_lambda * advantage * ~(both flags, "
        "joined by |).",
    ),
    2: (
        "Before you predict: what happens to the size of a gradient step when all advantages of a "
        "minibatch are ten times as large? And does Adam, which divides each gradient by its own "
        "running size, care?",
        "For the conclusion look at the interval first. Does it hold 0? Only if it does not can you claim a "
        'direction. Then look at the differences: "always" takes every single one.',
        "Go down the list in order and take the first that is true: every difference above 0; both ends "
        "of the interval above 0; both below; neither. UPSETS is the count of differences whose sign is "
        "not the sign of their mean.",
    ),
    3: (
        "In which rows of the table would a further step in the same direction make `ratio * advantage` "
        "larger, though the ratio is already outside of 1 +- 0.2? In which rows would the step lead "
        "back towards 1?",
        "The clip must bind where moving on would gain: ratio 1.5 with a good action, 0.5 with a bad "
        "one. In the other two rows the clipped product is the larger of the two, so a minimum of the "
        "products, taken row by row, leaves it aside. The minimum is taken of the products, not of the "
        "ratios.",
        "ratio = (log_prob - old_log_prob).exp(); then the products ratio * advantages and "
        "ratio.clamp(1 - clip_coef, 1 + clip_coef) * advantages; then first.minimum(second).mean(), "
        "with a minus in front.",
    ),
    4: (
        "The logarithm of a product is a sum, and that of 1 / x is -log(x). What is the logarithm of "
        "each factor of the Gaussian's density? Which of them depends on the action?",
        "Gaussian: three terms for every component, -0.5 * z^2, -log_std and -0.5 * LOG_2PI, and a sum "
        "over the last axis. Tanh: log(half_range) plus the safe form, and a sum over the last axis. "
        "Categorical: log_softmax, then gather at the action.",
        "z = (action - mean) / log_std.exp(), then (-0.5 * z**2 - log_std - 0.5 * LOG_2PI).sum(-1). For "
        "the tanh, (2 * (math.log(2) - u - softplus(-2 * u)) + half_range.log()).sum(-1). For the "
        "categorical, x.gather(-1, action.unsqueeze(-1)).squeeze(-1), of x = logits.log_softmax(-1).",
    ),
    5: (
        "When an episode has ended there are two observations: the one that step() returned and the one "
        "that reset() returned. Who needs which: the policy that acts next, and the value that GAE "
        "bootstraps from? For the update: what must stay the same throughout all the epochs, and what "
        "is computed anew for each minibatch?",
        "next_obs[t] always is what step() returned. obs[t + 1] is the same, unless terminated or "
        "truncated: then it is what reset() returned. In the update, batch.log_prob, advantages and "
        "returns are as old as the rollout; the log-probability and the value that carry the gradient "
        "come from the agent, for each minibatch.",
        "Rollout: next_obs, reward, terminated, truncated, _ = env.step(rollout.action[t, i]); write "
        "the four at [t, i]; `if terminated or truncated: next_obs, _ = env.reset()`; rollout.obs[t + "
        "1, i] = next_obs. Update: for piece in permutation(len(batch.returns)).chunk(num_minibatches): "
        "minibatch = Batch._make(x[piece] for x in batch); then the loss of step 3 of the comment, with "
        "minibatch.log_prob as the old one.",
    ),
    6: (
        "What do you know of the rows that are gone? From their mean and count you can tell their sum, "
        "and from their variance and count the sum of their squared distances. And for the rest of the "
        "exercise: what would you need on another computer, to act as this policy acts?",
        "The comment in `merge` has both sums; divide each by count + n. In evaluation one of the two "
        "lines of training_action has to go. A checkpoint that restores the policy holds five things: "
        "weight and bias, and mean, var and count.",
        "merge: new mean = (count * mean + n * batch.mean(0)) / (count + n), and the squares, divided "
        "in the same way, with batch.var(0, unbiased=False). evaluation_action: "
        "policy(statistics.normalise(obs)). checkpoint: a dict of policy.state_dict() and a dict of the "
        "three fields; restore: Statistics(**that dict).",
    ),
    7: (
        "For each function, read its docstring, and cover the body. On paper, take the smallest case "
        "you can think of: one row, one step, round numbers. What should come out? Then uncover the "
        "body and follow the case through it. Where does it leave your path?",
        "Where to look. advantages: what a time limit does to delta. value_targets: which of the two "
        "observations at an episode's end. policy_epoch: which probability is in the ratio's "
        "denominator. surrogate_loss: a row with a negative advantage. clipped_value_loss: which of its "
        "two errors counts. critic_loss: through which of its two values the gradient flows.",
        "Cases. advantages: a single truncated step, next_value 8. value_targets: a truncated step with "
        "next_obs 8 and obs[1] 2. policy_epoch: old_log_prob of 1/4 for an action that now has 1/2, "
        "advantage 1: the logits must not move. surrogate_loss: advantages [3, -3], and the signs of "
        "log_prob.grad. clipped_value_loss: value 1, old_value 0, returns 1: the loss is 0.32. "
        "critic_loss: weight 1, bias 0, obs 0, next_obs 1, gamma 0.5: the weight's gradient is 0.",
    ),
    8: (
        "Go through eager_update line by line and ask three questions. Does Python have to know a "
        "number to go on? Does the shape of anything depend on numbers? Does a name of the state point "
        "to new memory afterwards?",
        "Five lines: x[near] has a shape that depends on numbers; `if norm > 0.5` asks for a number; "
        "both assignments to state point it to new memory; .item() asks for a number. And learning_rate "
        "is a Python number, which a graph keeps for ever.",
        "Keep all rows and let far ones be zero: error = torch.where(near, error, 0.0), with near.sum() "
        "in place of len(error). The gradient times (0.5 / norm).clamp(max=1.0). Then "
        "state.loss.copy_(...), state.momentum.mul_(0.9).add_(gradient) and "
        "state.weight.sub_(state.learning_rate * state.momentum).",
    ),
    9: (
        "Whose past is in `state` when the first observation of an episode arrives, and who must not see "
        "it? And for a chunk: if you had only its observations and its starts, what would you lack to come "
        "to the same numbers as the policy did?",
        "The reset comes first, and only where starts is true; then obs is taken in. A chunk lacks what "
        "was remembered just before its first step, so that has to be kept before the step is taken. The "
        "replay takes the very same steps, with the resets at the same places.",
        "step: state = torch.where(starts, 0.0, state), then remember(state, obs). collect: if t % length "
        "== 0, chunk_states.append(state); then state = step(state, obs[t], starts[t]) and "
        "seen.append(state). replay: the same loop without chunk_states, and torch.stack(seen).",
    ),
}  # fmt: skip


def main(words: list[str]) -> int:
    """Print a hint; returns the exit status."""
    number, step = ([*words, "1"] if len(words) == 1 else words) if len(words) in (1, 2) else ("", "")
    steps = len(next(iter(HINTS.values())))
    if number not in map(str, HINTS) or step not in map(str, range(1, steps + 1)):
        print(
            f"python -m exercises.hint N [STEP]   N: 1 to {len(HINTS)}, STEP: 1 to {steps}", file=sys.stderr
        )
        return 2
    exercise = exercises()[int(number)]
    print(f"exercise {number}, {shown(exercise.path)}: hint {step} of {steps}\n")
    text = HINTS[int(number)][int(step) - 1]
    print(textwrap.fill(text, 100, break_on_hyphens=False, break_long_words=False))
    if int(step) < steps:
        print(f"\nnot yet?   python -m exercises.hint {number} {int(step) + 1}")
    else:
        print(f"\nnot yet?   exercises/solutions/{exercise.path.name} is one possible answer")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
