"""The job: finding the other ranks, groups, registered memory, log lines.

What lives here: the store through which ranks find each other (``rendezvous.py``), groups (``group.py``),
``init`` and ``shutdown`` (``world.py``), memory that the ranks of a host share (``memory.py``), byte strings
gathered from all ranks (``records.py``), the engine's codes for collectives, dtypes and operators
(``engine_codes.py``), callbacks of calls that end (``callbacks.py``), the one logger (``logs.py``). Uses:
errors and the engine.
"""
