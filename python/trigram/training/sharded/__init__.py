"""The optimizer's state divided among the ranks (ZeRO).

What lives here: the step hooks of sharded training, the optimizer's slices, the buckets of weights, and those
of gradients of which each rank keeps a part. Uses: ``training`` around it, and what that may use.
"""
