"""A process group of torch.distributed, whether this process has one already or not."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store


def group(
    backend: str, *, store: Callable[[str], Store], rank: int, ranks: int, timeout: float
) -> Any:  # noqa: ANN401 - torch says ProcessGroup or a number
    """A group of all ranks; every rank calls it.

    Args:
        backend: "gloo" or "nccl".
        store: (backend) -> where its ranks find each other; asked where this process has none yet.
        rank: this one.
        ranks: how many there are.
        timeout: seconds.
    """
    limit = timedelta(seconds=timeout)
    if dist.is_initialized():
        return dist.new_group(backend=backend, timeout=limit)
    dist.init_process_group(
        backend, store=store(backend), rank=rank, world_size=ranks, timeout=limit
    )
    return dist.group.WORLD
