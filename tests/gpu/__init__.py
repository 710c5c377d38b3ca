"""GPU tensors: on a GPU, over the stand-in for NCCL and the driver, and NCCL's network plugin."""
