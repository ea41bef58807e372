"""The transport over torch's symmetric memory, with a GPU of its own for every rank."""

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from equivalence.errors import UsageError
from equivalence.world import devices, exports
from equivalence.world.link import Link
from equivalence.world.transport import World

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_KERNEL_WAITS = 2
"""How often the time limit a barrier's kernel waits: the host says first who is missing."""


def link(world: World) -> Link:
    """One rank's side over symmetric memory; sums go through NCCL.

    Raises:
        UsageError: there is no such device, or two ranks share one.
    """
    device, names = devices.enter(world, transport="symmetric")
    if world.ranks < 2 or not devices.apart(names):  # noqa: PLR2004 - one rank has no peer
        raise UsageError(
            f"transport symmetric is one rank a GPU and two at least: {world.ranks} ranks have "
            f"{len(set(names))}; transport cuda shares GPUs"
        )
    group = devices.nccl(world, device)
    memory = Memory(world=world, device=device, group=group)
    return Link(
        rank=world.rank,
        ranks=world.ranks,
        device=device,
        transport="symmetric",
        # A rank that still reads memory of the old shape must not lose it.
        export=exports.table(
            world.rank, world.share, memory.make, settle=partial(torch.cuda.synchronize, device)
        ),
        barrier=Barrier(world, memory.handle((world.ranks,))[0], device),
        all_reduce=devices.by_nccl(group),
        agree=world.agree,
    )


class Barrier:
    """Barriers of symmetric memory: a kernel signals and waits for every peer."""

    def __init__(self, world: World, handle: Any, device: torch.device) -> None:  # noqa: ANN401
        """Begin with no round.

        Args:
            world: of this rank.
            handle: of one allocation, whose signals are used.
            device: of this rank.
        """
        self._world, self._handle, self._device = world, handle, device
        self._limit = int(_KERNEL_WAITS * 1000 * world.timeout)

    def __call__(self) -> None:
        """Return once every rank has come as often."""
        self.on_stream()
        self._world.barrier(devices.mark(self._device))

    def on_stream(self) -> None:
        """The same for streams alone: the host goes on, and nobody notices a rank that is gone."""
        self._handle.barrier(channel=0, timeout_ms=self._limit)


@dataclass(frozen=True, kw_only=True, eq=False)
class Memory:
    """Symmetric memory of a world, as one of its ranks makes it.

    Attributes:
        world: of this rank.
        device: of this rank.
        group: of all ranks.
        handles: by name, what keeps the others' memory open.
    """

    world: World
    device: torch.device
    group: "ProcessGroup"
    handles: dict[str, Any] = field(default_factory=dict)

    def make(self, name: str, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Zeros of every rank."""
        self.handles.pop(name, None)
        handle, own = self.handle(shape)
        tensors = tuple(
            own if rank == self.world.rank else handle.get_buffer(rank, shape, torch.uint8)
            for rank in range(self.world.ranks)
        )
        torch.cuda.synchronize(self.device)
        self.world.share(f"zeros {name}", {})
        self.handles[name] = handle
        return tensors

    def handle(self, shape: tuple[int, ...]) -> tuple[Any, Tensor]:
        """Zeros of this rank in symmetric memory, and what reaches the others' from it."""
        size = max(1, torch.Size(shape).numel())
        own = symm_mem.empty(size, dtype=torch.uint8, device=self.device)
        own.zero_()
        handle = symm_mem.rendezvous(own, self.group)
        return handle, own[: torch.Size(shape).numel()].view(shape)
