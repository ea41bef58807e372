"""Which device a rank is on, when its work is done, and sums over ranks of device memory."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from equivalence import layout
from equivalence.errors import UsageError
from equivalence.world import groups

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from equivalence.world.transport import World


def of(rank: int, asked: str | None, count: int, *, transport: str) -> torch.device:
    """The device of a rank: round and round over all there are, or the one that was asked for.

    Args:
        rank: its number.
        asked: as the user named it; None or "cuda" leaves it to the rank.
        count: devices of this machine.
        transport: for the messages.

    Raises:
        UsageError: there is no such device.
    """
    if count < 1:
        raise UsageError(f"transport {transport} needs a CUDA device; torch finds none")
    named = torch.device(asked or "cuda")
    if named.type != "cuda":
        raise UsageError(f"transport {transport} is memory of CUDA devices; device is {asked}")
    index = rank % count if named == torch.device("cuda") else named.index
    if index >= count:
        raise UsageError(f"device is {asked}; torch finds {count}, from cuda:0 on")
    return torch.device("cuda", index)


def enter(world: "World", *, transport: str) -> tuple[torch.device, list[str]]:
    """Make a rank's device the current one.

    Returns:
        it, and what identifies the device of each rank.

    Raises:
        UsageError: there is no such device.
    """
    count = torch.cuda.device_count()
    device = of(world.rank, world.device, count, transport=transport)
    torch.cuda.set_device(device)
    name = str(torch.cuda.get_device_properties(device).uuid)
    return device, [told["device"] for told in world.share("device", {"device": name})]


def apart(names: list[str]) -> bool:
    """Whether every rank has a device of its own."""
    return len(set(names)) == len(names)


def mark(device: torch.device) -> Callable[[], bool]:
    """Whether all that the current stream was given up to now is done, asked without waiting."""
    if device.type != "cuda":
        return lambda: True
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types here
    event.record()
    return lambda: bool(event.query())  # type: ignore[no-untyped-call]  # likewise


def through_host(world: "World") -> Callable[[Tensor], None]:
    """Sums by gloo over copies in host memory: NCCL refuses two ranks on one GPU."""

    def all_reduce(tensor: Tensor) -> None:
        host = tensor.cpu()
        world.all_reduce(host)
        tensor.copy_(host)

    return all_reduce


def by_nccl(group: "ProcessGroup") -> Callable[[Tensor], None]:
    """Sums by NCCL, in the order of the stream; one byte of any dtype adds as a byte."""

    def all_reduce(tensor: Tensor) -> None:
        plain = layout.as_bytes(tensor)
        dist.all_reduce(plain, group=group)

    return all_reduce


def nccl(world: "World", device: torch.device) -> "ProcessGroup":
    """The NCCL group of a world whose ranks have a GPU each, connected; every rank calls it.

    Raises:
        RuntimeError: NCCL does not add up.
    """
    group: ProcessGroup = groups.group(
        "nccl",
        store=world.store,
        rank=world.rank,
        ranks=world.ranks,
        timeout=world.timeout,
    )
    world.at_end(partial(_leave, group))
    probe = torch.ones(1, dtype=torch.uint8, device=device)
    dist.all_reduce(probe, group=group)
    if int(probe) != world.ranks % 256:
        raise RuntimeError(f"NCCL adds {world.ranks} ones up to {int(probe)}")
    return group


def _leave(group: "ProcessGroup", failed: bool) -> None:  # noqa: FBT001 - as World.at_end
    """End a group: at once where ranks failed, since its work may wait for one that is gone."""
    if failed:
        distributed_c10d._abort_process_group(group)  # noqa: SLF001 - nothing public aborts one
    else:
        dist.destroy_process_group(group)
