"""Asynchronous gossip, AD-PSGD (arXiv 1710.06952): two neighbours average whenever both are free.

A free rank offers an averaging step to a neighbour. If the neighbour accepts, both send a snapshot of their
weights, and each adds half the difference of the two snapshots to its weights when both have arrived. No rank
waits: a rank looks for messages at its boundaries (between two training steps), and the engine transfers the
weights in the background.

The weights are averaged in fragments, as many at a time as arrive in about a training step (see
:class:`trigram.training.schedule.BackgroundSteps`); an offer says which. It is a message of 12 bytes; weights
are sent only after an offer was accepted.

With a bound on staleness a rank that has not averaged for so many boundaries waits until it has, so that
ranks of unequal speed stay together. It listens and answers meanwhile, and does not wait for neighbours that
do not answer or have ended their training.

What lives here: who averages with whom (``offers``, without input and output), the messages (``mail``), the
weights under way (``transfers``), how long averaging steps take (``timing``), the schedule that joins them
(``steps``), and one that follows a script, for reproducible runs (``scripted``).
"""
