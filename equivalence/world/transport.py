"""The seam between a world and what carries its bytes.

A transport is a module of this package named as users name it ("shm", "cuda", "symmetric"). It is
imported where its ranks run, when they are started, and has one function:

    def link(world: World) -> Link: ...

It makes `Link.export` from `world.share`, which hands small JSON values (segment names, handles as
base64) to all ranks, and may take `world.barrier`, `world.all_reduce` and `world.agree` as they
are: they are the host's counting barrier and gloo. A barrier of its own signals first and then
waits with `world.wait`, which ends when a rank dies, fails or is silent:

    count += 1
    signal_peers(count)
    world.wait(lambda: everybody_signalled(count))

`world.wait` counts as this rank's barrier in what is told of a silent or dead rank.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torch import Tensor

from equivalence.errors import UsageError
from equivalence.world.link import Link

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NAMES = ("shm", "cuda", "symmetric")


class Released(RuntimeError):  # noqa: N818 - what happened to a rank that did nothing wrong
    """This rank waited for others; the world has ended meanwhile."""


class Silent(RuntimeError):  # noqa: N818 - what is wrong with the rank it names
    """Another rank did not come within the time limit."""


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """What a transport makes one rank's link of.

    Attributes:
        rank: the number of this rank.
        ranks: how many there are.
        device: as the user named it, or None.
        timeout: seconds that a rank may be silent.
        tag: what all names of this world begin with.
        share: (name, payload) -> every rank's payload, by rank. Every rank calls it with the same
            name; a payload is a dict of JSON values.
        wait: waits as a barrier of this rank until what it is given is true; it raises where the
            world ends meanwhile or others do not come.
        barrier: the counting barrier in the host's shared memory.
        all_reduce: gloo, for a tensor in host memory, in place; u8 and e4m3 add as bytes.
        agree: the least of the numbers that ranks say, through gloo.
        group: the gloo group of this world, made at the first call; every rank calls it.
    """

    rank: int
    ranks: int
    device: str | None
    timeout: float
    tag: str
    share: Callable[[str, Mapping[str, Any]], list[dict[str, Any]]]
    wait: Callable[[Callable[[], bool]], None]
    barrier: Callable[[], None]
    all_reduce: Callable[[Tensor], None]
    agree: Callable[[int], int]
    group: Callable[[], "ProcessGroup"]


def known(name: str) -> str:
    """The name of a transport, checked.

    Raises:
        UsageError: there is none of that name.
    """
    home = f"{__package__}.{name}"
    if name not in NAMES or find_spec(home) is None:
        raise UsageError(f"transport is {name!r}: it is {', '.join(NAMES[:-1])} or {NAMES[-1]}")
    return name


def link(name: str, world: World) -> Link:
    """One rank's side of a world over a transport."""
    made: Link = import_module(f"{__package__}.{known(name)}").link(world)
    return made
