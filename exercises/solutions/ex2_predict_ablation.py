"""Exercise 2: predict, then look.

`norm_adv` brings the advantages of each minibatch to mean 0 and standard deviation 1. Nearly every PPO
does it. Does it help? Reinforcement learning is so noisy that two runs that differ in nothing but their seed
can end far apart. So one run with a trick and one without show you two seeds, and not the trick. You will
need several pairs, and a sober look at their spread.

You will learn: to write a prediction down before you look, to read a bootstrap interval, and how often a
    single pair of runs would have told you the opposite.
Read first: `ppo_loss` in ppo_continuous.py, its first two lines; then `bootstrap_interval` in
    exercises/ablation.py.
Time: about 15 minutes, one of them to train 16 short runs.

1. Write PREDICTION. Does advantage normalisation help after 30,000 steps on CartPoleContinuous-v0? One of

    "always"        with it, the score is higher on every one of the 8 seeds
    "on average"    not on every seed, but the 95% interval of the mean difference lies above 0
    "hurts"         the 95% interval of the mean difference lies below 0
    "cannot tell"   the 95% interval of the mean difference holds 0

   No answer is right beforehand, and you are not graded on it. It is recorded before the first run.

2. Run     python -m exercises.ex2_predict_ablation

3. Write CONCLUSION and UPSETS from the table that it prints.
"""

from pathlib import Path

PREDICTION = "on average"  # "always", "on average", "hurts" or "cannot tell"

# What your own table says, in the same four words; whether it is what you predicted does not matter.
CONCLUSION = "cannot tell"

# On how many of the 8 seeds would a single pair of runs have misled you: shown a difference with the opposite
# sign from that of the mean difference? (A difference of 0 shows nothing, and misleads nobody.)
UPSETS = 4

RESULTS = Path(__file__).with_name("ex2_results.json")

if __name__ == "__main__":
    from exercises.ablation import run

    raise SystemExit(run(PREDICTION, RESULTS))


# Run:    pytest exercises/test_ex2.py     (it never trains, it reads what you ran)
# Stuck:  python -m exercises.hint 2
