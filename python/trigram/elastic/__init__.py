"""Elastic jobs: ranks are lost and join while the job runs.

What lives here: the connection to the job's store (``store.py``), join requests (``join_queue.py``), which
ranks are members and how they agree on it (``membership.py``), replicas of several ranks (``replicas.py``,
``places.py``), how a rank notices a loss and its replica agrees on it (``losses.py``), joining a running job
(``joining.py``), and what a model does when the membership changes (``recovery.py``). Uses: errors, runtime,
collectives, averaging. It does not know :mod:`trigram.mixing`.
"""
