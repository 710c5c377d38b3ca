"""How a wrapped model trains: what an algorithm is composed of, and averages of its weights.

What lives here: the composition (``compose``), the synchronization of weights, its schedules and boundaries,
options, DDP's communication hook. Uses: all rooms of the library but ``model`` and ``plan``.
"""
