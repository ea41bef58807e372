"""What a rank has of the others while a batch is composed: their memory, a barrier, collectives.

A transport makes one for each rank; the ways in `ways` use nothing else, and a fault on demand is
one of these with a part replaced.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from equivalence.paths.ipc import moves

HALVES = 2
"""Stagings and dense buffers have two parity halves: turn t uses t % 2."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Regions:
    """Memory of one kind that ranks export; every tuple goes by rank, one's own part included.

    What a way does not read of other ranks has one's own part alone, and no rows for the others.

    Attributes:
        pools: u8 [layers, pool pages, page_bytes] each.
        staging: u8 [HALVES, 1 + staging pages, page_bytes] each; row 0 is reserved.
        dense: u8 [HALVES, at least S, page_bytes] each.
    """

    pools: tuple[Tensor, ...]
    staging: tuple[Tensor, ...]
    dense: tuple[Tensor, ...]


def parity(turn: int) -> int:
    """The half of a turn."""
    return turn % HALVES


def zeroed(like: Tensor, rows: int) -> Tensor:
    """u8 [rows, page_bytes] of zeros, to be added up."""
    return torch.zeros(rows, like.shape[-1], dtype=like.dtype, device=like.device)


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
        peer_memory: whether every rank can read every other's regions, agreed on once.
        half: the half that a turn uses.
        zeroed: memory for a sum over ranks.
        gather: reads pages of this rank and of others.
        write: fills own current pages that others read.
        put: copies own current pages to where others read them.
    """

    rank: int
    ranks: int
    regions: Mapping[str, Regions]
    barrier: Callable[[], None]
    all_reduce: Callable[[Tensor], None]
    peer_memory: bool = True
    half: Callable[[int], int] = parity
    zeroed: Callable[[Tensor, int], Tensor] = zeroed
    gather: Callable[..., None] = moves.gather
    write: Callable[..., None] = moves.write
    put: Callable[..., None] = moves.put
