"""Collectives of ranks in host memory, by gloo.

Ranks of a pool reach each other over the loopback interface; ranks that torchrun started do so over
the interface that the user named, or the loopback where none was named.

Ranks first come together in the control memory, where a missing one is seen and named; gloo then
has all of them.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from equivalence import layout
from equivalence.world import groups

INTERFACE = "GLOO_SOCKET_IFNAME"
_A_NUMBER = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class Collectives:
    """What one rank does together with all others.

    Attributes:
        store: (name) -> through which gloo's ranks find each other; asked for at the first
            collective.
        rank: this one.
        ranks: how many there are.
        timeout: seconds.
        meet: (size) -> every rank's, once every rank has called it.
        leave: called when a collective is done.
        made: the gloo group, once there is one.
    """

    store: Callable[[str], Store]
    rank: int
    ranks: int
    timeout: float
    meet: Callable[[int], Sequence[int]]
    leave: Callable[[], None]
    made: list[dist.ProcessGroup] = field(default_factory=list)

    def all_reduce(self, tensor: Tensor) -> None:
        """Add up over ranks, in place; bytes (u8, e4m3) as u8.

        Raises:
            ValueError: ranks add up tensors of several sizes.
        """
        given = layout.as_bytes(tensor)
        whole = given.contiguous()
        self._reduce(whole, torch.add, size=whole.nbytes)
        if whole.data_ptr() != given.data_ptr():
            given.copy_(whole)

    def agree(self, number: int) -> int:
        """The least of the numbers that ranks say."""
        said = torch.tensor(number, dtype=torch.int64)
        self._reduce(said, torch.minimum, size=_A_NUMBER)
        return int(said)

    def close(self) -> None:
        """End what was made here."""
        for group in self.made:
            dist.destroy_process_group(group)

    def _reduce(self, tensor: Tensor, join: Callable[..., Tensor], *, size: int) -> None:
        """Join in place what ranks hold: gathered on rank 0, joined there, and told to all.

        Gloo's ring has two steps a rank, each a switch of processes: where ranks outnumber cores
        it takes 21 ms for what these two calls do in 3.
        """
        sizes = self.meet(size)
        # Gloo would end the process.
        odd = next((rank for rank, other in enumerate(sizes) if other != sizes[0]), None)
        if odd is not None:
            does = [f"rank {rank} {_what(sizes[rank])}" for rank in (0, odd)]
            raise ValueError(f"{' and '.join(does)}: all ranks bring the same size")
        if self.ranks > 1:
            group, first = self._connected(), self.rank == 0
            parts = [torch.empty_like(tensor) for _ in range(self.ranks)] if first else None
            dist.gather(tensor, parts, dst=0, group=group)
            for part in (parts or ())[1:]:
                join(tensor, part, out=tensor)
            dist.broadcast(tensor, src=0, group=group)
        self.leave()

    def _connected(self) -> dist.ProcessGroup:
        if not self.made:
            os.environ.setdefault(INTERFACE, "lo")
            self.made.append(
                groups.group(
                    "gloo",
                    store=self.store,
                    rank=self.rank,
                    ranks=self.ranks,
                    timeout=self.timeout,
                )
            )
        return self.made[0]


def _what(size: int) -> str:
    return "agrees on a number" if size == _A_NUMBER else f"adds up {size:,} bytes"
