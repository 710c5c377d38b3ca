"""What a job does, made visible: where steps go (``steps``), spans of Python for whoever looks (``spans``,
torch's profiler by ``profiling``), the engine's records (``calls``), a timeline (``timeline``, ``merge``),
and what is left after a failure (``dump``, ``postmortem``).

The lower rooms report what they do to ``spans`` and ``steps``; the engine keeps records of its calls itself
(``rust/engine/src/health/events.rs``).
"""
