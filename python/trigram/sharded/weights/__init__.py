"""Weights and gradients in buckets of which each rank has a part, and its slices in the script's optimizer.

What lives here: how buckets are divided (``weight_buckets``, ``gradient_buckets``), the optimizer that steps
slices, and the calls that give all ranks all weights. Uses: ``gradients``, and what that may use.
"""
