"""The transport over POSIX shared memory: every rank maps what each of them exports."""

import os
from functools import partial

import torch
from torch import Tensor

from equivalence.world import exports, segment
from equivalence.world.link import Link
from equivalence.world.transport import World, check_device


def link(world: World) -> Link:
    """One rank's side over shared memory.

    Raises:
        UsageError: a device other than the CPU was asked for.
    """
    check_device("shm", world.device)
    return Link(
        rank=world.rank,
        ranks=world.ranks,
        device=torch.device("cpu"),
        transport="shm",
        export=exports.table(world.rank, world.share, partial(_exchanged, world)),
        barrier=partial(world.barrier, None),
        all_reduce=world.all_reduce,
        agree=world.agree,
    )


def _exchanged(world: World, name: str, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    """New memory of every rank.

    Raises:
        MemoryError: a rank had no room; all say so.
    """
    size = torch.Size(shape).numel()
    own, why = None, ""
    try:
        if size:
            own = segment.create(size)
    except MemoryError as error:
        why = str(error)
    try:
        place = None if own is None else segment.place(own)
        offers = world.share(f"memory {name}", {"place": place, "why": why})
        for rank, offer in enumerate(offers):
            if offer["why"]:
                raise MemoryError(f"rank {rank} cannot export {name!r}: {offer['why']}")
        if not size:
            return tuple(torch.empty(shape, dtype=torch.uint8) for _ in offers)
        memory = tuple(
            segment.mapped(segment.attach(offer["place"], size), size).view(shape)
            for offer in offers
        )
        world.share(f"mapped {name}", {})
        return memory
    finally:
        if own is not None:
            os.close(own)
