"""What the checks of the backend share: the process group of this rank."""

from __future__ import annotations

import torch.distributed as dist


def world_group() -> dist.ProcessGroup:
    """The default process group, which the first check makes."""
    import trigram

    assert trigram.__version__
    if not dist.is_initialized():
        dist.init_process_group("trigram")
    group = dist.group.WORLD
    assert group is not None and dist.get_backend() == "trigram"
    return group
