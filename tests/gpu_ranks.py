"""What ranks on GPUs run in tests: functions that a rank imports by name."""

import os
from dataclasses import replace

import torch
from torch import Tensor

from equivalence.engines import pointer_gather
from equivalence.paths.ipc import step
from equivalence.paths.ipc.ways import WAYS
from equivalence.world.link import Link

EACH = 4096


def who(link: Link) -> dict[str, Tensor]:
    """The process, and the number of the device."""
    index = str(link.device).partition(":")[2]
    return {"pid": torch.tensor(os.getpid()), "device": torch.tensor(int(index or -1))}


def rounds(link: Link, *, count: int, streams: bool = False) -> Tensor:
    """How many cells a rank ever read that were not those of the round, int64.

    Each round every rank writes the number of the round and its own into its part, in the half of
    the round; after the barrier each reads all parts.
    """
    parts = link.export("rounds", (2, EACH))
    barrier = link.barrier.on_stream if streams else link.barrier  # type: ignore[attr-defined]
    wrong = torch.zeros((), dtype=torch.int64, device=link.device)
    link.barrier()
    for number in range(count):
        half = number % 2
        # Work before the write, of another length on each rank and in each round.
        if number % link.ranks == link.rank:
            busy = torch.ones(EACH // 2, EACH // 2, device=link.device)
            for _ in range(20):
                busy = busy @ busy * 1e-4
        parts[link.rank][half].fill_((number * 7 + link.rank) % 256)
        barrier()
        for rank, part in enumerate(parts):
            wrong += (part[half] != (number * 7 + rank) % 256).sum()
    link.barrier()
    return wrong.cpu()


def sums(link: Link) -> dict[str, Tensor]:
    """Bytes added up over ranks, of u8 and of e4m3, and the least number."""
    plain = torch.full((1000,), 100 + link.rank, dtype=torch.uint8, device=link.device)
    link.all_reduce(plain)
    typed = torch.zeros(1000, dtype=torch.uint8, device=link.device)
    typed[link.rank :: link.ranks] = 0x80 + 0x7F * (link.rank % 2)
    typed = typed.view(torch.float8_e4m3fn)
    link.all_reduce(typed)
    least = torch.tensor(link.agree(5 + link.rank))
    return {"plain": plain, "typed": typed.view(torch.uint8), "least": least}


def one_kernel(
    link: Link,
    *,
    way: str,
    **call: Tensor | int,
) -> Tensor:
    """Pages that the kernel gathers otherwise than an index after another, int64."""
    wrong = torch.zeros((), dtype=torch.int64, device=link.device)
    ready = step.prepare(link, way=way, **call)  # type: ignore[arg-type]  # as they came
    link.barrier()
    want, got = (
        [dense.clone() for *_, dense in WAYS[ready.way].run(peers, ready.plan, ready.rows, turn=0)]
        for peers in (ready.peers, replace(ready.peers, gather=pointer_gather.Gather()))
    )
    for one, other in zip(want, got, strict=True):
        wrong += (one != other).any(1).sum()
    link.barrier()
    return wrong.cpu()
