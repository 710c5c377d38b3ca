"""Trigram as a backend of ``torch.distributed``: ``init_process_group("trigram")``.

What lives here: the registration (``registration.py``), the process group (``process_group.py``) and what it
answers about itself (``identity.py``), its calls (``calls/``), and the handles that they return
(``handles/``). Uses: errors, runtime, gpu, collectives.

Importing it registers a name and a function, and nothing else: the rest is imported when the first process
group is made.
"""

from trigram.backend.registration import register

__all__ = ["register"]

register()
