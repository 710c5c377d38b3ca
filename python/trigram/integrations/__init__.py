"""Bridges to the libraries in which people train: import the one you use, and nothing else is imported.

What lives here: Lightning (``lightning.py``, Trainer and Fabric), Accelerate (``accelerate.py``), the Trainer
of transformers (``transformers.py``), Ray Train (``ray.py``), torch's FSDP2 (``fsdp.py``) and its debug
server (``torch_debug.py``). Each is one file, and needs its library installed. Elastic jobs have files of
their own (``lightning_elastic.py``, ``transformers_elastic.py``). ``saved_state.py``, ``elastic_calls.py``,
``elastic_schedule.py`` and ``accelerate_elastic.py`` are what they share. Uses: model.
"""
