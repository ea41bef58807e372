"""One rank's side of a world: what its transport is given, made over the control memory."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from equivalence.world import collectives
from equivalence.world import control as cells
from equivalence.world.control import Control
from equivalence.world.exports import Share
from equivalence.world.transport import Silent, World


@dataclass(frozen=True, kw_only=True)
class Place:
    """Who a rank is.

    Attributes:
        rank: its number.
        ranks: how many there are.
        transport: by name.
        device: as the user named it, or None.
        timeout: seconds that a rank may be silent.
    """

    rank: int
    ranks: int
    transport: str
    device: str | None
    timeout: float


def over(
    place: Place,
    control: Control,
    *,
    share: Share,
    store: Callable[[str], Store],
    limit: Callable[[], float] = lambda: float("inf"),
    accuse: Callable[[], Silent] = Silent,
    doubt: Callable[[], Exception | None] = lambda: None,
) -> tuple[World, Callable[[bool], None]]:
    """One rank's side, and what ends it.

    Args:
        place: who it is.
        control: of the world.
        share: every rank's payload.
        store: (name) -> where the ranks of a process group find each other.
        limit: seconds that this rank waits for others; endless where a launcher watches.
        accuse: what to raise after that.
        doubt: what to raise where a wait is in vain before that, or None.

    Returns:
        the side; and what ends its process groups, given whether ranks failed.
    """
    ends: list[Callable[[bool], None]] = []

    def close(failed: bool) -> None:  # noqa: FBT001 - the one thing there is to say
        while ends:
            # A group that a function has ended itself is no error any more.
            with suppress(RuntimeError, ValueError, AssertionError):
                ends.pop()(failed)

    def meet(at: int, ready: Callable[[], bool] | None = None) -> int:
        number = cells.arrive(control, place.rank, at)
        together = ready or cells.everybody(control, place.rank, at, number)
        cells.wait(control, timeout=limit(), ready=together, accuse=accuse, doubt=doubt)
        return number

    def barrier(ready: Callable[[], bool] | None = None) -> None:
        meet(cells.BARRIER, ready)
        cells.running(control, place.rank)

    def compare(size: int) -> list[int]:
        cells.bring(control, place.rank, cells.COLLECTIVE, size)
        return cells.brought(control, meet(cells.COLLECTIVE))

    together = collectives.Collectives(
        store=store,
        rank=place.rank,
        ranks=place.ranks,
        timeout=place.timeout,
        meet=compare,
        leave=lambda: cells.running(control, place.rank),
    )
    world = World(
        rank=place.rank,
        ranks=place.ranks,
        device=place.device,
        timeout=place.timeout,
        share=share,
        barrier=barrier,
        all_reduce=together.all_reduce,
        agree=together.agree,
        store=store,
        at_end=ends.append,
    )
    world.at_end(lambda _: together.close())
    return world, close
