"""Collectives and messages on GPU tensors: the routes that the data can take, and the choice of one.

What lives here: a device's streams and pinned memory (``device.py``), the NCCL route (``nccl.py``), the route
through host memory (``host.py``), groups in two levels (``two_level.py``), and which route a group takes
(``routes.py``). Uses: errors, runtime.
"""
