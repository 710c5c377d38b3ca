"""Where backward passes and training steps begin and end, and what happens there.

What lives here: the adapter to torch (``passes``), the tracker of steps, the base of all that synchronizes a
model (``step_hooks``), and its parts: which parameters train, whether the script has changed them, which
ranks have inputs, what averages lose. Uses: ``elastic``, ``optimizers`` and what is below them.
"""
