"""What a training step would take with another algorithm, or on other machines, and which one to choose.

``inputs`` is what is known of a job; ``costs`` measures what codecs take on this machine; ``wire`` has the
times of collectives, ``step`` the time of a training step, and ``losses`` what is known of each algorithm's
loss. ``choice`` compares the algorithms and recommends, ``file`` is plan.json, ``measuring`` measures a job
while it runs (``trigram plan -- python train.py``). docs/planning.md explains the model and its errors.
"""
