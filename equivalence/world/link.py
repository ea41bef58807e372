"""What a function that runs on every rank is given: who it is, and how it reaches the others."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Link:
    """One rank's side of a world, made by a transport.

    Attributes:
        rank: its number.
        ranks: how many there are.
        device: where its exported memory is.
        transport: "shm", "cuda", "symmetric" or "threads".
        export: (name, shape) -> u8 memory of that shape of every rank, by rank. Every rank calls it
            with the same name and shape, and writes into its own part alone. It lasts as long as
            the world: the same name and shape give the same memory with what it holds, another
            shape replaces it with zeros. What was replaced is not to be read any more: its memory
            may be used again.
        barrier: returns once every rank has called it as often; what each wrote to exported memory
            before can then be read by all.
        all_reduce: adds up a tensor over ranks, in place on every rank; u8 adds as bytes. All
            ranks bring the same size.
        agree: the least of the numbers that ranks say.
        peer_memory: whether this rank can read what others export.
    """

    rank: int
    ranks: int
    device: torch.device
    transport: str
    export: Callable[[str, tuple[int, ...]], tuple[Tensor, ...]]
    barrier: Callable[[], None]
    all_reduce: Callable[[Tensor], None]
    agree: Callable[[int], int]
    peer_memory: bool = True
