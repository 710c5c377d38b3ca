"""The optimizer's state divided among the ranks (ZeRO).

What lives here: the step hooks of sharded training (``sync``), which are divided weights that may be updated
in backward, lent to other algorithms, and saved; the optimizer's slices, the buckets of weights, and those of
gradients of which each rank keeps a part. ``elastic``: ranks may be lost. Uses: ``training`` around it, and
what that may use.
"""
