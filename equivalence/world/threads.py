"""Ranks as threads of this process: no start-up, the same bytes, and the same hand on a fault."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equivalence import plain, receipt
from equivalence.errors import UsageError
from equivalence.replay import Outcome
from equivalence.world.link import Link

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

TIMEOUT_S = 30.0
"""How long a rank waits for the others."""
MOST = 64
"""Threads that a pool has at most."""


class RankLost(RuntimeError):  # noqa: N818 - it says what happened, as TimeoutError does
    """Another rank ended, or did not come; the message names it."""


@dataclass(kw_only=True, eq=False)
class _World:
    """What the threads share.

    Attributes:
        ranks: how many there are.
        timeout: seconds that a rank waits.
        counts: rounds that each rank has begun.
        lost: why a rank ended, by rank.
        told: what each rank handed in, by round.
        memory: what was exported, by name and shape.
    """

    ranks: int
    timeout: float = TIMEOUT_S
    counts: list[int] = field(default_factory=list)
    lost: dict[int, str] = field(default_factory=dict)
    told: dict[int, list[Any]] = field(default_factory=dict)
    memory: dict[tuple[str, tuple[int, ...]], tuple[Tensor, ...]] = field(default_factory=dict)
    moved: threading.Condition = field(default_factory=threading.Condition)


class Threads:
    """A pool of ranks in this process; what they export lasts as long as it does.

    A rank that failed ends the call for all, and the next call begins anew with the same memory.
    """

    def __init__(self, count: int, *, timeout: float = TIMEOUT_S) -> None:
        """Ranks 0 .. count - 1, each of which waits for the others for at most timeout seconds.

        Raises:
            UsageError: there are fewer than one or more than MOST.
        """
        if not 1 <= count <= MOST:
            raise UsageError(f"{count} ranks as threads: there are 1 to {MOST}")
        self.count = count
        self.timeout = timeout
        self._memory: dict[tuple[str, tuple[int, ...]], tuple[Tensor, ...]] = {}

    def run(
        self,
        function: Callable[..., Mapping[str, Tensor] | Tensor | None],
        *,
        inputs: Mapping[str, Tensor] | None = None,
        timeout: float | None = None,
        **settings: Any,  # noqa: ANN401 - the function's own
    ) -> list[Outcome]:
        """Call `function(link, **inputs, **settings)` on every rank; an Outcome a rank."""
        world = _World(
            ranks=self.count,
            timeout=self.timeout if timeout is None else timeout,
            counts=[0] * self.count,
            memory=self._memory,
        )
        outcomes = [Outcome(rule="crash", message="it did not run")] * self.count

        def rank(number: int) -> None:
            outcomes[number] = _outcome(world, number, function, inputs or {}, settings)

        threads = [threading.Thread(target=rank, args=(n,)) for n in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcomes


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


def _outcome(
    world: _World,
    rank: int,
    function: Callable[..., Mapping[str, Tensor] | Tensor | None],
    inputs: Mapping[str, Tensor],
    settings: Mapping[str, Any],
) -> Outcome:
    """What one rank's call gave."""
    with receipt.collected() as left:
        try:
            with torch.no_grad():
                made = function(_link(world, rank), **inputs, **settings)
        # Whatever ends a rank ends the others' waiting, and is told as its outcome.
        except BaseException as error:  # noqa: BLE001 - for that reason
            message = plain.line(f"rank {rank}: {type(error).__name__}: {error}")
            with world.moved:
                world.lost[rank] = message
                world.moved.notify_all()
            rule = "timeout" if isinstance(error, TimeoutError) else "crash"
            return Outcome(rule=rule, message=message)
    with world.moved:
        world.lost[rank] = f"rank {rank} has returned"
        world.moved.notify_all()
    outputs = {"result": made} if isinstance(made, Tensor) else dict(made or {})
    return Outcome(outputs=outputs, paths=tuple(left))


def _link(world: _World, rank: int) -> Link:
    """One rank's side."""

    def barrier() -> None:
        _exchange(world, rank, None)

    return Link(
        rank=rank,
        ranks=world.ranks,
        device=torch.device("cpu"),
        transport="threads",
        export=partial(_export, world),
        barrier=barrier,
        all_reduce=partial(_all_reduce, world, rank),
        agree=lambda number: min(_exchange(world, rank, number)),
    )


def _export(world: _World, name: str, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    """The memory of that name and shape."""
    with world.moved:
        if (name, shape) not in world.memory:
            made = torch.zeros(world.ranks, *shape, dtype=torch.uint8)
            world.memory[name, shape] = tuple(made)
        return world.memory[name, shape]


def _all_reduce(world: _World, rank: int, tensor: Tensor) -> None:
    """Add up, each on its own; nobody changes a tensor before all have been read."""
    parts = _exchange(world, rank, tensor)
    elsewhere = [n for n, part in enumerate(parts) if not isinstance(part, Tensor)]
    if elsewhere:
        raise ValueError(
            f"rank {elsewhere[0]} adds nothing up in this round: it does another thing"
        )
    sizes = sorted({tuple(part.shape) for part in parts})
    if len(sizes) > 1:
        raise ValueError(f"tensors of {' and '.join(map(str, map(list, sizes)))} are added up")
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    _exchange(world, rank, None)
    tensor.copy_(total)


def _exchange(world: _World, rank: int, value: Any) -> list[Any]:  # noqa: ANN401 - what ranks say
    """Hand in a value, wait for every rank's of the same round, and take them all."""
    deadline = time.monotonic() + world.timeout
    with world.moved:
        turn = world.counts[rank]
        told = world.told.setdefault(turn, [None] * world.ranks)
        told[rank] = value
        world.counts[rank] = turn + 1
        world.moved.notify_all()
        while min(world.counts) <= turn:
            late = [n for n, count in enumerate(world.counts) if count <= turn]
            gone = [world.lost[n] for n in late if n in world.lost]
            if gone:
                raise RankLost(f"{gone[0]}; round {turn} waits for it")
            left = deadline - time.monotonic()
            if left <= 0:
                names = " ".join(map(str, late))
                raise TimeoutError(
                    f"rank {names} did not come to round {turn} in {world.timeout:g} s"
                )
            world.moved.wait(left)
        # Whoever has begun the next round has taken what was told in the one before.
        world.told.pop(turn - 1, None)
        return told
