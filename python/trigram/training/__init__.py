"""``with_bagua``: installs hooks on a model and composes an algorithm from the packages below.

What lives here: step hooks, buckets, gradient synchronisation, weight synchronisation and its schedules,
gradient compressors, options, QAdam, DDP's communication hook. Uses: all packages but ``cli``.
"""
