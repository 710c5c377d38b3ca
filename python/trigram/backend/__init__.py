"""Trigram as a backend of ``torch.distributed``: ``init_process_group("trigram")``.

What lives here: the registration (``registration.py``), the process group with what torch asks of it
(``process_group.py``, ``identity.py``), its calls by family (``reductions.py``, ``transfers.py``,
``point_to_point.py``, ``barriers.py``) and what these share (``starting.py``, ``tensors.py``,
``arguments.py``), handles and futures (``work.py``, ``futures.py``, ``callbacks.py``), profiler events
(``profiling.py``), operators that torch cannot reach through a Python process group (``functional.py``),
and the adapter for torchcomms (``torchcomms.py``). Uses: errors, runtime, gpu, collectives.

Importing it registers a name and a function, and nothing else: the rest is imported when the first process
group is made.
"""

from trigram.backend.registration import register

__all__ = ["register"]

register()
