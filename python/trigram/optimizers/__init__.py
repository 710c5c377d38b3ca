"""What Trigram knows of torch's optimizers, and does to them.

What lives here: who hears of their steps (``optimizer_hooks``), which of them may be given slices of
parameters (``optimizer_kinds``, ``optimizer_trial``), optimizers that several models share, the second moment
of a mean (``adam_variance``), QAdam. Uses: averages and what is below them.
"""
