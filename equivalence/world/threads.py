"""Ranks as threads of this process: no start-up, the same bytes, and the same hand on a fault."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equivalence import layout
from equivalence.errors import UsageError
from equivalence.replay import Outcome
from equivalence.world import call, exports, reports, silence
from equivalence.world import control as cells
from equivalence.world.link import Link
from equivalence.world.transport import MOST, TIMEOUT, Silent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from equivalence.world.control import Control


@dataclass(kw_only=True, eq=False)
class _Living:
    """What the threads share until a rank fails.

    Attributes:
        control: where each of them is.
        timeout: seconds that a rank waits for the others, in this run.
        told: what ranks handed in, by the place and how often they came there.
        links: by rank.
    """

    control: Control
    timeout: float
    told: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)


class Threads:
    """A pool of ranks in this process.

    As of processes, what they export lasts from run to run until a rank fails.
    """

    def __init__(self, ranks: int, *, timeout: float = TIMEOUT) -> None:
        """Ranks 0 .. ranks - 1, each of which waits for the others for at most timeout seconds.

        Raises:
            UsageError: there are fewer than one or more than MOST.
        """
        if not 1 <= ranks <= MOST:
            raise UsageError(f"{ranks} ranks as threads: there are 1 to {MOST}")
        self.ranks = ranks
        self.timeout = timeout
        self._living: _Living | None = None

    def run(
        self,
        function: Callable[..., Mapping[str, Tensor] | Tensor | None],
        *,
        inputs: Mapping[str, Tensor] | None = None,
        timeout: float | None = None,
        **settings: Any,  # noqa: ANN401 - the function's own
    ) -> list[Outcome]:
        """Call `function(link, **inputs, **settings)` on every rank; an Outcome a rank."""
        living, self._living = self._living or _begin(self.ranks), None
        living.timeout = self.timeout if timeout is None else timeout
        failed: dict[int, dict[str, Any]] = {}
        made: dict[int, Outcome] = {}
        for rank in range(self.ranks):
            cells.begin(living.control, rank)
            cells.running(living.control, rank)

        def one(rank: int) -> None:
            link = living.links[rank]
            try:
                outputs, left = call.outputs(function, link, inputs=inputs or {}, settings=settings)
                made[rank] = Outcome(outputs=outputs, paths=tuple(left))
            # Whatever ends a rank ends the others' waiting, and is told as its outcome.
            except BaseException as error:  # noqa: BLE001 - for that reason
                failed[rank] = _report(living, rank, error)
                cells.end(living.control)
            cells.finished(living.control, rank)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not failed:
            self._living = living
        return reports.told(failed, self.ranks, made=made.__getitem__)


def run(
    count: int,
    function: Callable[..., Mapping[str, Tensor] | Tensor | None],
    *,
    inputs: Mapping[str, Tensor] | None = None,
    timeout: float | None = None,
    **settings: Any,  # noqa: ANN401 - the function's own
) -> list[Outcome]:
    """Call a function once on `count` ranks that share nothing with any other call."""
    return Threads(count).run(function, inputs=inputs, timeout=timeout, **settings)


def _report(living: _Living, rank: int, error: BaseException) -> dict[str, Any]:
    """What is told of a rank that raised: as of a process, without the line."""
    report = call.failure(error, place=False)
    return {**report, "where": silence.where(living.control, rank)}


def _begin(ranks: int) -> _Living:
    """Ranks that have exported nothing."""
    control = cells.over(memoryview(bytearray(cells.size(ranks))), ranks)
    living = _Living(control=control, timeout=TIMEOUT)
    living.links += [_link(living, rank) for rank in range(ranks)]
    return living


def _link(living: _Living, rank: int) -> Link:
    """One rank's side."""
    share = partial(_share, living, rank)
    return Link(
        rank=rank,
        ranks=living.control.ranks,
        device=torch.device("cpu"),
        transport="threads",
        export=exports.table(rank, share, partial(_memory, share)),
        barrier=partial(_meet, living, rank, cells.BARRIER),
        all_reduce=partial(_all_reduce, living, rank),
        agree=lambda number: min(_exchange(living, rank, cells.COLLECTIVE, number)),
    )


def _memory(share: exports.Share, name: str, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Zeros of every rank."""
    own = torch.zeros(shape, dtype=torch.uint8)
    return tuple(each["memory"] for each in share(f"memory {name}", {"memory": own}))


def _share(
    living: _Living, rank: int, name: str, payload: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Every rank's payload."""
    said = _exchange(living, rank, cells.EXCHANGE, (name, payload))
    if len({other for other, _ in said}) > 1:
        each = ", ".join(f"rank {r} {other!r}" for r, (other, _) in enumerate(said))
        raise UsageError(f"ranks exchange different things: {each}")
    return [dict(payload) for _, payload in said]


def _all_reduce(living: _Living, rank: int, tensor: Tensor) -> None:
    """Add up, each on its own; nobody changes a tensor before all have been read."""
    parts = _exchange(living, rank, cells.COLLECTIVE, tensor)
    elsewhere = [n for n, part in enumerate(parts) if not isinstance(part, Tensor)]
    if elsewhere:
        raise ValueError(
            f"rank {elsewhere[0]} adds nothing up in this round: it does another thing"
        )
    sizes = sorted({tuple(part.shape) for part in parts})
    if len(sizes) > 1:
        raise ValueError(f"tensors of {' and '.join(map(str, map(list, sizes)))} are added up")
    plain = [layout.as_bytes(part) for part in parts]
    total = plain[0].clone()
    for part in plain[1:]:
        total += part
    _exchange(living, rank, cells.COLLECTIVE, tensor)
    plain[rank].copy_(total)


def _exchange(living: _Living, rank: int, place: int, value: Any) -> list[Any]:  # noqa: ANN401 - what ranks say
    """Hand in a value, wait for every rank's of the same round, and take them all."""
    number = cells.arrived(living.control, place, rank, rank) + 1
    told = living.told.setdefault((place, number), [None] * living.control.ranks)
    told[rank] = value
    _meet(living, rank, place)
    # Whoever has begun this round has taken what was told in the one before.
    living.told.pop((place, number - 1), None)
    return told


def _meet(living: _Living, rank: int, place: int) -> None:
    """Come to a place and wait for every rank there."""
    control = living.control
    number = cells.arrive(control, rank, place)
    cells.wait(
        control,
        timeout=living.timeout,
        ready=cells.everybody(control, rank, place, number),
        accuse=lambda: silence.accused(control, timeout=living.timeout),
        doubt=lambda: _doubt(living),
    )
    cells.running(control, rank)


def _doubt(living: _Living) -> Silent | None:
    """What to raise where a rank has returned without coming."""
    found = silence.found(living.control, timeout=living.timeout)
    return found and Silent(found[1], rank=found[0])
