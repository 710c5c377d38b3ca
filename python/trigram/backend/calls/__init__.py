"""The calls of c10d: how each becomes a call of the engine.

What lives here: the calls by family (``reductions.py``, ``sparse.py``, ``transfers.py``,
``point_to_point.py``, ``barriers.py``), their options (``arguments.py``), tensors as the engine takes them
(``tensors.py``) and what starts a call (``starting.py``).
"""
