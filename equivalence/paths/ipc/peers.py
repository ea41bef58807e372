"""What a rank has of the others while a batch is composed: their memory, a barrier, collectives.

A transport makes one for each rank; the ways in `ways` use nothing else, and a fault on demand is
one of these with a part replaced.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

HALVES = 2
"""Stagings and dense buffers have two parity halves: turn t uses t % 2."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Regions:
    """Memory of one kind that ranks export; every tuple goes by rank, one's own part included.

    Attributes:
        pools: u8 [layers, pool pages, page_bytes] each.
        dense: u8 [HALVES, at least S, page_bytes] each.
        staging: u8 [HALVES, 1 + staging pages, page_bytes] each; row 0 is reserved.
    """

    pools: tuple[Tensor, ...]
    dense: tuple[Tensor, ...]
    staging: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Peers:
    """One rank's side of the world.

    Attributes:
        rank: its number.
        ranks: how many there are.
        regions: by kind. Without peer memory only one's own part may be touched.
        barrier: returns once every rank has called it as often, and what each wrote before its
            call can be read by all: wait, with release and acquire.
        all_reduce: adds up a u8 tensor over ranks, in place on every rank, as bytes.
        agree: the least of the numbers that ranks say.
        peer_memory: whether every rank can read every other's regions, agreed on once.
    """

    rank: int
    ranks: int
    regions: Mapping[str, Regions]
    barrier: Callable[[], None]
    all_reduce: Callable[[Tensor], None]
    agree: Callable[[int], int]
    peer_memory: bool = True
