"""How a wrapped model trains: its hooks, and the composition of an algorithm from the packages below.

What lives here: step hooks, buckets, gradient synchronisation, weight synchronisation and its schedules,
gradient compressors, options, QAdam, DDP's communication hook. Uses: all packages but ``model`` and ``cli``.
"""
