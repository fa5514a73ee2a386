"""The exercises, filled in. `diff exercises/ex1_completion_gae.py exercises/solutions/ex1_completion_gae.py`
shows one possible answer to exercise 1 beside your own."""
