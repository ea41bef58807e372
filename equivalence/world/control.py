"""A world's control memory: who waits where, and the barrier that counts.

It is one array of int64 in shared memory. Arrivals have a cell for each place, receiver and sender
with one writer each, so that no addition is lost: a rank writes its data first, then adds one for
every peer and itself, then waits until every sender has added as often. A lock is taken and given
back twice before and after: release and acquire on machines that reorder stores (x86 keeps the
order of stores anyway).
"""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from equivalence.world.transport import Released, Silent

BARRIER, COLLECTIVE, EXCHANGE = range(3)
STARTING, READY, RUNNING, ENDED = range(3, 7)
PLACES = ("barrier", "collective", "exchange")
_WIDE = 8
"""A state and its number share a cell, so that both are read at once."""

_HALVES = 2
_YIELDS = 20
_SHORTEST, _LONGEST = 20e-6, 1e-3
_LOCK = threading.Lock()


@dataclass(frozen=True, kw_only=True, eq=False)
class Control:
    """The cells, as every process of a world sees them.

    These are the flag, then by rank the states, times and bases, then the arrivals, then the sizes.

    Attributes:
        cells: int64.
        ranks: how many there are.
    """

    cells: memoryview
    ranks: int


@dataclass(frozen=True, kw_only=True)
class State:
    """What a rank does.

    Attributes:
        what: a place it waits in, or STARTING, READY, RUNNING or ENDED.
        number: of the place it waits for, else barriers done; over the life of the world.
        since: seconds of the monotonic clock.
    """

    what: int
    number: int
    since: float


def size(ranks: int) -> int:
    """Bytes of the control memory of so many ranks."""
    return 8 * (_sizes(ranks) + _HALVES * ranks)


def over(memory: memoryview, ranks: int) -> Control:
    """The control memory in these bytes."""
    return Control(cells=memory.cast("q"), ranks=ranks)


def begin(control: Control, rank: int) -> None:
    """Before a run, while this rank is idle: what is told is counted from here on."""
    for place in range(len(PLACES)):
        control.cells[_base(control, place, rank)] = arrived(control, place, rank, rank)
    _enter(control, rank, STARTING, 0)


def ready(control: Control, rank: int) -> None:
    """This rank could start."""
    _enter(control, rank, READY, 0)


def running(control: Control, rank: int) -> None:
    """This rank goes on by itself."""
    _enter(control, rank, RUNNING, arrived(control, BARRIER, rank, rank))


def finished(control: Control, rank: int) -> None:
    """This rank's function has returned or raised."""
    _enter(control, rank, ENDED, arrived(control, BARRIER, rank, rank))


def end(control: Control) -> None:
    """End the world: whoever waits is released."""
    control.cells[0] = 1


def has_ended(control: Control) -> bool:
    """Whether the world has been ended."""
    return control.cells[0] != 0


def state(control: Control, rank: int) -> State:
    """What a rank does at this moment."""
    number, what = divmod(control.cells[1 + rank], _WIDE)
    return State(
        what=what, number=number, since=control.cells[1 + control.ranks + rank] / 1_000_000_000
    )


def arrived(control: Control, place: int, receiver: int, sender: int) -> int:
    """How often a sender has told a receiver that it came to a place."""
    return int(control.cells[_row(control, place, receiver) + sender])


def lacking(control: Control, rank: int, waits: State) -> list[int]:
    """The ranks for which a waiting one waits."""
    return [
        sender
        for sender in range(control.ranks)
        if arrived(control, waits.what, rank, sender) < waits.number
    ]


def bring(control: Control, rank: int, place: int, size: int) -> None:
    """Before this rank arrives at a place: how much it brings."""
    coming = arrived(control, place, rank, rank) + 1
    control.cells[_half(control, coming) + rank] = size


def brought(control: Control, number: int) -> list[int]:
    """How much each rank brought the last time that all arrived, and as often as this."""
    first = _half(control, number)
    return control.cells[first : first + control.ranks].tolist()


def told(control: Control, place: int, rank: int, number: int) -> int:
    """A number as it is counted in this run."""
    return int(number - control.cells[_base(control, place, rank)])


def arrive(control: Control, rank: int, place: int) -> int:
    """Tell every rank that this one came to a place; what it wrote before is there for them.

    Returns:
        how often it came there.
    """
    number = arrived(control, place, rank, rank) + 1
    _enter(control, rank, place, number)
    _fence()
    for receiver in range(control.ranks):
        control.cells[_row(control, place, receiver) + rank] = number
    return number


def wait(
    control: Control,
    *,
    timeout: float,
    ready: Callable[[], bool],
    accuse: Callable[[], Silent] = Silent,
    doubt: Callable[[], Exception | None] = lambda: None,
) -> None:
    """Wait in the place where this rank arrived.

    Args:
        control: of the world.
        timeout: seconds.
        ready: whether the wait is over.
        accuse: what to raise where it lasts too long.
        doubt: what to raise where the wait is in vain already, or None.

    Raises:
        Released: the world has ended.
        Silent: it lasted too long.
    """
    deadline = time.monotonic() + timeout
    looks, pause = 0, _SHORTEST
    while True:
        # Asked first: who is gone by then has told all that it ever tells.
        vain = doubt() if pause == _LONGEST else None
        if ready():
            break
        if has_ended(control):
            raise Released
        if vain is not None:
            raise vain
        looks += 1
        if looks < _YIELDS:
            os.sched_yield()
            continue
        if time.monotonic() > deadline:
            raise accuse()
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)
    _fence()


def everybody(control: Control, rank: int, place: int, number: int) -> Callable[[], bool]:
    """Whether every rank has come to a place as often, as this one was told."""
    first = _row(control, place, rank)
    row = control.cells[first : first + control.ranks]
    return lambda: min(row) >= number


def _enter(control: Control, rank: int, what: int, number: int) -> None:
    control.cells[1 + control.ranks + rank] = time.monotonic_ns()
    control.cells[1 + rank] = what + _WIDE * number


def _fence() -> None:
    for _ in range(2):
        with _LOCK:
            pass


def _base(control: Control, place: int, rank: int) -> int:
    return 1 + (2 + place) * control.ranks + rank


def _first(ranks: int) -> int:
    return 1 + (2 + len(PLACES)) * ranks


def _sizes(ranks: int) -> int:
    return _first(ranks) + len(PLACES) * ranks * ranks


def _half(control: Control, number: int) -> int:
    """Where sizes are: whoever brings the next one leaves those that others still read."""
    return _sizes(control.ranks) + number % _HALVES * control.ranks


def _row(control: Control, place: int, receiver: int) -> int:
    return _first(control.ranks) + (place * control.ranks + receiver) * control.ranks
