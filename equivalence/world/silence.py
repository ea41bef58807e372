"""Sentences about ranks that keep the others waiting, and where a rank was when it died."""

import signal
import time
from collections.abc import Sequence

from equivalence import wording
from equivalence.world import control as cells
from equivalence.world.control import Control, State
from equivalence.world.transport import Silent

START = 60.0
"""Seconds that a rank may take to import a function; its time limit begins with the call."""


def found(
    control: Control, *, timeout: float, start: float = START, ended: bool = True
) -> tuple[int | None, str] | None:
    """The first rank that keeps others waiting, or is silent itself, and the sentence for it.

    The rank is None where all are in one place and none gets out of it: then it is nobody's.

    Args:
        control: of the world.
        timeout: seconds that a rank may wait for another, or do nothing that can be seen.
        start: seconds that a rank may take to start, where they are more.
        ended: whether a rank that has ended counts at once: it comes to no place any more.
    """
    now = time.monotonic()
    # States of all before arrivals: who has ended had told its arrivals by then.
    states = [cells.state(control, rank) for rank in range(control.ranks)]
    # A rank that failed has told so before it ended: that is no silence.
    ended = ended and not cells.has_ended(control)
    lacks = {
        rank: missing
        for rank, each in enumerate(states)
        if waits(each) and (missing := cells.lacking(control, rank, each))
    }
    limit = max(timeout, start)
    late = [rank for rank, each in enumerate(states) if _late(each, now, timeout, limit)]
    if late and states[late[0]].what == cells.STARTING:
        return late[0], f"rank {late[0]} did not start within {limit:g} s"
    if late and lacks:
        # Where ranks wait for each other, the fewest keep the others waiting.
        rank = min(lacks, key=lambda waiting: len(lacks[waiting]))
        idle = [other for other in lacks[rank] if not waits(states[other])] or lacks[rank]
        idle = [other for other in idle if other in late] or idle
        return idle[0], _absent(control, rank, idle, states, timeout=timeout)
    busy = [rank for rank in late if not waits(states[rank])]
    if busy:
        return busy[0], f"rank {busy[0]} was silent for {timeout:g} s {where(control, busy[0])}"
    if late:
        return _stuck(control, late, states, timeout=timeout)
    for rank, missing in lacks.items():
        gone = [other for other in missing if ended and states[other].what == cells.ENDED]
        if gone:
            return gone[0], _absent(control, rank, gone, states)
    return None


def waits(each: State) -> bool:
    """Whether a rank is in a place where it waits for others."""
    return each.what < len(cells.PLACES)


def where(control: Control, rank: int) -> str:
    """Where a rank is, as "in barrier 12" or "after barrier 11"."""
    each = cells.state(control, rank)
    if waits(each):
        number = cells.told(control, each.what, rank, each.number)
        return f"in {cells.PLACES[each.what]} {number}"
    done = cells.told(control, cells.BARRIER, rank, each.number)
    return f"after barrier {done}" if done > 0 else "before barrier 1"


def died(status: int) -> str:
    """What a process status says, as "was killed by SIGKILL" or "exited with status 3".

    Args:
        status: the exit status, or the signal's number, negative.
    """
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def accused(control: Control, *, timeout: float) -> Silent:
    """What a rank raises that waits for longer than it may."""
    who = found(control, timeout=timeout, ended=False)
    if who is None:
        return Silent(f"ranks did not come within {timeout:g} s")
    return Silent(who[1], rank=who[0])


def _stuck(
    control: Control, late: Sequence[int], states: Sequence[State], *, timeout: float
) -> tuple[int | None, str]:
    """Ranks to which everybody has come, and which do not go on: gloo or a GPU holds them up."""
    first = states[late[0]]
    place = cells.PLACES[first.what]
    number = cells.told(control, first.what, late[0], first.number)
    same = [
        rank
        for rank in late
        if (states[rank].what, states[rank].number) == (first.what, first.number)
    ]
    if len(same) == control.ranks:
        return None, f"no rank finished {place} {number} within {timeout:g} s"
    return late[0], f"{wording.ranks(same)} did not finish {place} {number} within {timeout:g} s"


def _late(each: State, now: float, timeout: float, start: float) -> bool:
    """Whether nothing has been seen of a rank for too long."""
    if each.what in {cells.ENDED, cells.READY}:
        return False
    return now - each.since > (start if each.what == cells.STARTING else timeout)


def _absent(
    control: Control,
    rank: int,
    missing: Sequence[int],
    states: Sequence[State],
    *,
    timeout: float | None = None,
) -> str:
    """Ranks that do not come to the place where another waits for them."""
    who, waiting = wording.ranks(missing), states[rank]
    place = cells.PLACES[waiting.what]
    number = cells.told(control, waiting.what, rank, waiting.number)
    done = [
        cells.told(control, waiting.what, rank, cells.arrived(control, waiting.what, rank, other))
        for other in missing
    ]
    has = f"{'it has' if len(missing) == 1 else 'they have'} done {' '.join(map(str, done))}"
    if timeout is None:
        return f"{who} ended without {place} {number}, where rank {rank} waits: {has}"
    first = states[missing[0]]
    elsewhere = f" and is {where(control, missing[0])}" if waits(first) else ""
    return f"{who} did not reach {place} {number} within {timeout:g} s: {has}{elsewhere}"
