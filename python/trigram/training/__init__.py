"""``with_bagua``: what hooks a model and composes an algorithm from the rooms below.

What lives here: step hooks, buckets, gradient synchronisation, weight synchronisation and its schedules,
gradient compressors, options, QAdam, DDP's communication hook. Uses: all rooms but the command line.
"""
