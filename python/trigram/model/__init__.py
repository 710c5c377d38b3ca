"""What a script calls on its model: ``with_bagua`` and the calls on a wrapped model.

What lives here: wrapping, switching, ``no_sync`` and ``join``, the consensus, the algorithm's state for
checkpoints, counters. Uses: all packages but ``cli``.
"""
