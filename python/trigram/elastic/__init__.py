"""Elastic jobs: ranks are lost and join while the job runs.

What lives here: the store behind it (``store.py``), join requests (``join_queue.py``), who is a member and
how the living agree on it (``membership.py``), joining late (``joining.py``), a model's part in all that
(``recovery.py``). Uses: errors, runtime, collectives, averaging. It does not know :mod:`trigram.mixing`.
"""
