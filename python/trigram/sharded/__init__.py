"""The optimizer's state divided among the ranks (ZeRO).

What lives here: who updates the weights of sharded training (``updates``), made of parts: divided weights,
slices that are updated in backward, parts that are lent to other algorithms, steps that fail, the script's
calls of the optimizer, and what follows when a rank is lost (``recovery``); the buckets of weights, and those
of gradients of which each rank keeps a part. ``elastic``: others keep copies. Uses:
``gradients`` and what that may use.
"""
