"""Mixture of experts: tokens travel to the ranks that have their experts, and back.

What lives here: :func:`dispatch` and :func:`combine` (``dispatch.py``), the all-to-all that gradients pass
through (``rows.py``), and :func:`groups`, who shares experts and who has copies of them (``groups.py``).
Uses: errors, runtime, codecs, collectives.
"""

from trigram.moe.dispatch import Handle, combine, dispatch
from trigram.moe.groups import groups

__all__ = ["Handle", "combine", "dispatch", "groups"]
