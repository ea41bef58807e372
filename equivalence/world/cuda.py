"""The transport over CUDA IPC: device memory that every rank maps, of one rank a GPU or of several.

Ranks take the devices in turn, or all the one that was asked for.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from equivalence.world import devices, driver, exports
from equivalence.world.link import Link
from equivalence.world.transport import World

_CELL = 8


def link(world: World) -> Link:
    """One rank's side over device memory.

    Sums go through NCCL where every rank has a GPU of its own, else through gloo.

    Raises:
        UsageError: there is no such device.
        RuntimeError: a rank cannot open another's memory.
    """
    device, names = devices.enter(world, transport="cuda")
    if devices.apart(names) and world.ranks > 1:
        all_reduce = devices.by_nccl(devices.nccl(world, device))
    else:
        all_reduce = devices.through_host(world)
    return Link(
        rank=world.rank,
        ranks=world.ranks,
        device=device,
        transport="cuda",
        export=_table(world, device),
        # Another table than the functions' own: they may export "flags" too.
        barrier=Barrier(world, _table(world, device)("flags", (2, world.ranks * _CELL))),
        all_reduce=all_reduce,
        agree=world.agree,
    )


class Barrier:
    """Counting barriers over flags in device memory.

    A rank's stream writes the count into its cell of every rank's flags after all that it was given
    before; the end of a kernel makes what it wrote readable by other devices. The host then waits
    for its own flags through copies, so that what it launches next comes after everybody's writes.
    No kernel waits: processes take turns on a GPU, and one that spins keeps the others off it.
    Interprocess events would order the streams too; with eight processes they hung.
    """

    def __init__(self, world: World, flags: tuple[Tensor, ...]) -> None:
        """Begin with no round.

        Args:
            world: of this rank.
            flags: u8 [2, ranks * 8] of every rank: those of this barrier, those of `on_stream`.
        """
        self._world = world
        # [rank] -> int64 [2, ranks]
        self._flags = tuple(each.view(torch.int64) for each in flags)
        own = self._flags[world.rank]
        self._host = torch.zeros(world.ranks, dtype=torch.int64, pin_memory=own.is_cuda)
        self._counts = [0, 0]

    def __call__(self) -> None:
        """Return once every rank has come as often."""
        self._counts[0] += 1
        for flags in self._flags:
            flags[0, self._world.rank].fill_(self._counts[0])
        self._world.barrier(self._seen(self._counts[0]))

    def on_stream(self) -> None:
        """The same for streams alone: the host goes on, and nobody notices a rank that is gone."""
        self._counts[1] += 1
        count = self._counts[1]
        for flags in self._flags:
            driver.signal(flags[1, self._world.rank].data_ptr(), count)
        for cell in self._flags[self._world.rank][1]:
            driver.hold(cell.data_ptr(), count)

    def _seen(self, count: int) -> Callable[[], bool]:
        """Whether the host has seen everybody's count."""
        own = self._flags[self._world.rank]

        def look() -> Callable[[], bool]:
            self._host.copy_(own[0], non_blocking=True)
            return devices.mark(own.device)

        arrived = look()

        def ready() -> bool:
            nonlocal arrived
            if not arrived():
                return False
            if int(self._host.min()) >= count:
                return True
            arrived = look()
            return False

        return ready


@dataclass(kw_only=True, eq=False)
class Memory:
    """What every rank of a world exports, as one of them sees it.

    It goes back with the process and not before: CUDA does not allow to free what another process
    still maps, and after a failure nobody says that all have let go.

    Attributes:
        world: of this rank.
        device: of this rank.
        used: by name, the bytes and the addresses by rank.
        spare: by bytes, addresses by rank of memory whose name has another shape by now.
    """

    world: World
    device: torch.device
    used: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    spare: dict[int, list[tuple[int, ...]]] = field(default_factory=lambda: defaultdict(list))

    def make(self, name: str, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Zeros of every rank, in memory that no name uses any more or in fresh memory.

        Raises:
            RuntimeError: a rank has no room, or cannot open another's memory; all say so.
        """
        if name in self.used:
            before, addresses = self.used.pop(name)
            self.spare[before].append(addresses)
        room = _room(shape)
        addresses = self.spare[room].pop() if self.spare[room] else self._fresh(name, room)
        self.used[name] = (room, addresses)
        tensors = tuple(driver.at(each, shape, self.device) for each in addresses)
        tensors[self.world.rank].zero_()
        torch.cuda.synchronize(self.device)
        self.world.share(f"zeros {name}", {})
        return tensors

    def _fresh(self, name: str, room: int) -> tuple[int, ...]:
        """The addresses of new memory of every rank."""
        own, told = 0, {"handle": "", "why": ""}
        try:
            own = driver.allocate(room, self.device)
            told["handle"] = driver.handle(own, self.device)
        except RuntimeError as error:
            told["why"] = f"{self.device} cannot export {name!r}, {room:,} bytes: {error}"
        handles = self._agreed(f"handle {name}", told)
        addresses, why = [], ""
        for rank, each in enumerate(handles):
            try:
                mine = rank == self.world.rank
                addresses.append(own if mine else driver.opened(each["handle"], self.device))
            except RuntimeError as error:
                why = why or f"{self.device} cannot open {name!r} of rank {rank}: {error}"
        self._agreed(f"opened {name}", {"why": why})
        return tuple(addresses)

    def _agreed(self, name: str, told: dict[str, str]) -> list[dict[str, str]]:
        """What every rank tells; one that failed fails all."""
        said = self.world.share(name, told)
        for rank, each in enumerate(said):
            if each["why"]:
                raise RuntimeError(f"rank {rank} on {each['why']}")
        return said


def _table(world: World, device: torch.device) -> exports.Export:
    """Exports of one rank by names of their own."""
    # What is used again may still be read: everybody's work is done before zeros go there.
    settle = partial(torch.cuda.synchronize, device)
    make = Memory(world=world, device=device).make
    return exports.table(world.rank, world.share, make, settle=settle)


def _room(shape: tuple[int, ...]) -> int:
    """Bytes that memory of a shape takes."""
    return driver.room(torch.Size(shape).numel())
