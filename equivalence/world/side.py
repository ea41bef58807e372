"""One rank's side of a world: what its transport is given, made over the control memory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch._C._distributed_c10d import Store

from equivalence.world import collectives
from equivalence.world import control as cells
from equivalence.world.control import Control
from equivalence.world.transport import World


@dataclass(frozen=True, kw_only=True)
class Place:
    """Who a rank is.

    Attributes:
        rank: its number.
        ranks: how many there are.
        transport: by name.
        device: as the user named it, or None.
        timeout: seconds that a rank may be silent.
        tag: of the world.
        store: the file through which gloo's ranks find each other, or "".
    """

    rank: int
    ranks: int
    transport: str
    device: str | None
    timeout: float
    tag: str
    store: str = ""


def over(
    place: Place,
    control: Control,
    *,
    share: Callable[[str, Mapping[str, Any]], list[dict[str, Any]]],
    store: Callable[[], Store],
    limit: Callable[[], float] = lambda: float("inf"),
    accuse: Callable[[], str] = str,
) -> tuple[World, Callable[[], None]]:
    """One rank's side, and what ends it.

    Args:
        place: who it is.
        control: of the world.
        share: every rank's payload.
        store: where gloo's ranks find each other.
        limit: seconds that this rank waits for others; endless where a launcher watches.
        accuse: the sentence after that.
    """

    def meet(at: int, ready: Callable[[], bool] | None = None) -> None:
        number = cells.arrive(control, place.rank, at)
        together = ready or cells.everybody(control, place.rank, at, number)
        cells.wait(control, timeout=limit(), ready=together, accuse=accuse)

    def barrier(ready: Callable[[], bool] | None = None) -> None:
        meet(cells.BARRIER, ready)
        cells.running(control, place.rank)

    together = collectives.Collectives(
        store=store,
        rank=place.rank,
        ranks=place.ranks,
        timeout=place.timeout,
        meet=lambda: meet(cells.COLLECTIVE),
        leave=lambda: cells.running(control, place.rank),
    )
    world = World(
        rank=place.rank,
        ranks=place.ranks,
        device=place.device,
        timeout=place.timeout,
        tag=place.tag,
        share=share,
        wait=barrier,
        barrier=barrier,
        all_reduce=together.all_reduce,
        agree=together.agree,
        group=together.group,
    )
    return world, together.close
