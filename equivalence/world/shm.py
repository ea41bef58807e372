"""The transport over POSIX shared memory: every rank maps what each of them exports."""

import os
from pathlib import Path

import torch
from torch import Tensor

from equivalence.errors import UsageError
from equivalence.world import segment
from equivalence.world.link import Link
from equivalence.world.transport import World


def link(world: World) -> Link:
    """One rank's side over shared memory.

    Raises:
        UsageError: a device other than the CPU was asked for.
    """
    if torch.device(world.device or "cpu").type != "cpu":
        raise UsageError(f"transport shm is memory of the CPU; device is {world.device}")
    held: dict[str, tuple[tuple[int, ...], tuple[Tensor, ...]]] = {}

    def export(name: str, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
        shape = tuple(shape)
        if name not in held or held[name][0] != shape:
            # Memory of the old shape goes first, or both would have to fit.
            held.pop(name, None)
            held[name] = (shape, _exchanged(world, name, shape))
        return held[name][1]

    return Link(
        rank=world.rank,
        ranks=world.ranks,
        device=torch.device("cpu"),
        transport="shm",
        export=export,
        barrier=world.barrier,
        all_reduce=world.all_reduce,
        agree=world.agree,
    )


def _exchanged(world: World, name: str, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    """New memory of every rank.

    Raises:
        UsageError: ranks export other shapes under this name.
        MemoryError: a rank had no room; all say so.
    """
    size = torch.Size(shape).numel()
    path, own, why = None, None, ""
    try:
        if size:
            path, own = segment.create(size, tag=world.tag)
    except MemoryError as error:
        why = str(error)
    try:
        said = {"shape": list(shape), "path": str(path or ""), "why": why}
        offers = world.share(f"export {name}", said)
        for rank, offer in enumerate(offers):
            if offer["shape"] != list(shape):
                raise UsageError(
                    f"rank {world.rank} exports {name!r} as {list(shape)}, "
                    f"rank {rank} as {offer['shape']}: every rank gives the same shape"
                )
        for rank, offer in enumerate(offers):
            if offer["why"]:
                raise MemoryError(f"rank {rank} cannot export {name!r}: {offer['why']}")
        if not size:
            return tuple(torch.empty(shape, dtype=torch.uint8) for _ in offers)
        memory = tuple(
            segment.mapped(segment.attach(Path(offer["path"]), size), size).view(shape)
            for offer in offers
        )
        world.share(f"mapped {name}", {})
        return memory
    finally:
        if path is not None:
            segment.release(path)
        if own is not None:
            os.close(own)
