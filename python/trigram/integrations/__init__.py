"""Bridges to the libraries in which people train: import the one you use, and nothing else is imported.

What lives here: Lightning (``lightning.py``, Trainer and Fabric), Accelerate (``accelerate.py``) and the
Trainer of transformers (``transformers.py``). Each is one file, and needs its library installed. Uses: model.
"""
