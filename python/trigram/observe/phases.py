"""The phases of a training step, and who trains a model."""

INPUT, FORWARD, BACKWARD, WAIT, OPTIMIZER, OTHER = (
    "input",
    "forward",
    "backward",
    "wait",
    "optimizer",
    "other",
)
PHASES = (INPUT, FORWARD, BACKWARD, WAIT, OPTIMIZER, OTHER)
"""``input``: from the update, or a backward pass that no update follows, to the next forward pass (the script
fetches its batch, and whatever else it does there); ``wait``: the training thread waits for communication;
``other``: the rest, such as the loss, clipping, logging, and another model's passes and updates."""
WITH_BAGUA = "with_bagua"
"""Who trains a model, if no library of torch does."""
