"""The job: finding the other ranks, groups, registered memory, log lines.

What lives here: the store ranks meet in (``rendezvous.py``), groups (``group.py``), ``init`` and
``shutdown`` (``world.py``), memory that the ranks of a host share (``memory.py``), the numbers by which
the engine knows calls (``engine_codes.py``), the one logger (``logs.py``). Uses: errors and the engine.
"""
