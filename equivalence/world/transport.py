"""The seam between a world and what carries its bytes.

A transport is a module of this package named as users name it ("shm", "cuda", "symmetric"). It is
imported where its ranks run, when they are started, and has one function:

    def link(world: World) -> Link: ...

It makes `Link.export` from `world.share`, which hands small JSON values (places of segments,
handles as base64) to all ranks, and may take `world.barrier`, `world.all_reduce` and `world.agree`
as they are: they are the host's counting barrier and gloo. A barrier of its own signals first and
then asks in `world.barrier`, which ends when a rank dies, fails or is silent, whether all have
come:

    count += 1
    signal_peers(count)
    world.barrier(lambda: everybody_signalled(count))

That counts as this rank's barrier in what is told of a silent or dead rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from equivalence.errors import UsageError
from equivalence.world import devices
from equivalence.world.exports import Share
from equivalence.world.link import Link

NAMES = ("shm", "cuda", "symmetric")
_ON_GPUS = NAMES[1:]

TIMEOUT = 30.0
"""Seconds that a rank may be silent or keep others waiting, unless told otherwise."""

MOST = 64
"""Ranks that a world has at most."""


class Released(RuntimeError):  # noqa: N818 - what happened to a rank that did nothing wrong
    """This rank waited for others; the world has ended meanwhile."""


class Absent(RuntimeError):  # noqa: N818 - what is wrong with the rank it names
    """Another rank does not come; `rank` is its number, or None where it is no single one."""

    def __init__(self, message: str = "", *, rank: int | None = None) -> None:
        """Keep the sentence and the rank."""
        super().__init__(message)
        self.rank = rank


class Silent(Absent):
    """Another rank did not come within the time limit."""


class Gone(Absent):
    """The process of another rank has ended, or that of the store through which ranks meet."""


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """What a transport makes one rank's link of.

    Attributes:
        rank: the number of this rank.
        ranks: how many there are.
        device: as the user named it, or None.
        timeout: seconds that a rank may be silent.
        share: (name, payload) -> every rank's payload, by rank. Every rank calls it with the same
            name; a payload is a dict of JSON values.
        barrier: the counting barrier in the host's shared memory; where it is given a question, it
            waits until that is true instead. It raises where the world ends or others do not come.
        all_reduce: gloo, for a tensor in host memory, in place; u8 and e4m3 add as bytes.
        agree: the least of the numbers that ranks say, through gloo.
        store: (name) -> where the ranks of a process group find each other; a name has one group.
        at_end: (function) -> None; the function is called when this rank leaves the world and its
            process goes on, with whether ranks failed, the last one given first.
    """

    rank: int
    ranks: int
    device: str | None
    timeout: float
    share: Share
    barrier: Callable[[Callable[[], bool] | None], None]
    all_reduce: Callable[[Tensor], None]
    agree: Callable[[int], int]
    store: Callable[[str], Store]
    at_end: Callable[[Callable[[bool], None]], None]


def known(name: str) -> str:
    """The name of a transport, checked.

    Raises:
        UsageError: there is none of that name.
    """
    if name not in NAMES:
        raise UsageError(f"transport is {name!r}: it is {', '.join(NAMES[:-1])} or {NAMES[-1]}")
    return name


def check_device(name: str, device: str | None) -> None:
    """Refuse a device that ranks cannot have.

    Args:
        name: of a transport; any other one has memory of the CPU.
        device: as the user named it; None for the transport's own choice.

    Raises:
        UsageError: it is none, or the transport has no memory there.
    """
    try:
        named = torch.device(device or "cpu")
    except RuntimeError:
        raise UsageError(f"device is {device!r}: it is cpu, cuda, or one as in cuda:0") from None
    if name in _ON_GPUS:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        devices.of(0, device, count, transport=name)
    elif named.type != "cpu":
        raise UsageError(f"transport {name} is memory of the CPU; device is {device}")


def link(name: str, world: World) -> Link:
    """One rank's side of a world over a transport."""
    made: Link = import_module(f"{__package__}.{known(name)}").link(world)
    return made
