"""This process as a rank that somebody else started, as torchrun does.

Ranks find each other through the store of their environment; all else is as between processes of
a pool, but that nobody watches them: each one waits for the others no longer than its time limit.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor

from equivalence import layout
from equivalence.errors import UsageError
from equivalence.replay import Outcome
from equivalence.world import call, meeting, naming, processes, reports, segment, silence
from equivalence.world import control as cells
from equivalence.world.transport import Gone, Released, Silent

_PAUSE = 0.002
_MARGIN = 0.5
_FAREWELL = 5.0


def run(
    member: meeting.Member,
    function: Callable[..., Any],
    *,
    inputs: Mapping[str, Tensor],
    timeout: float,
    settings: Mapping[str, Any],
) -> list[Outcome]:
    """Run a function here, as every other rank does, and have all outcomes on every rank.

    Raises:
        UsageError: the settings are no JSON values, or ranks run different things.
    """
    told = naming.settings(settings, inputs)
    name = f"{function.__module__}.{function.__qualname__}"
    if member.lost is not None:
        return [member.lost] * member.ranks
    try:
        with meeting.answered():
            shared = _begun(member, {"function": name, "settings": told}, timeout=timeout)
            own = {key: layout.packed(tensor) for key, tensor in inputs.items()}
            report, handle = call.run(function, shared.link, inputs=own, settings=told)
            if handle is None:
                return _outcomes(member, shared, report)
            try:
                report["layout"]["place"] = segment.place(handle)
                return _outcomes(member, shared, report)
            finally:
                os.close(handle)
    # A world that cannot be made, and ranks that do not come: all is lost.
    except (RuntimeError, MemoryError) as error:
        member.lost = _lost(member, error)
        close(member, failed=True)
        return [member.lost] * member.ranks


def tell(member: meeting.Member, value: int) -> int:
    """The value of rank 0, on every rank.

    Raises:
        Gone: rank 0 has ended without telling one.
        Silent: it does not tell one for half an hour.
    """
    key = f"equivalence/tell/{next(member.serial)}"
    with meeting.answered():
        if not member.rank:
            member.store.set(key, str(value))
            return value
        meeting.wait_for(member, member.store, {0: key}, limit=meeting.PATIENCE)
        return int(member.store.get(key))


def close(member: meeting.Member, *, failed: bool = False) -> None:
    """Leave the world, if there is one.

    Args:
        member: this one.
        failed: whether ranks failed: then nobody waits for what they had begun.
    """
    shared, member.shared = member.shared, None
    if shared is not None:
        cells.end(shared.control)
        shared.close(failed)


def leave(member: meeting.Member) -> None:
    """Leave the ranks for good; rank 0 last, since it may be home to their store."""
    close(member)
    keys = {rank: f"equivalence/left/{rank}" for rank in range(member.ranks)}
    with suppress(Gone, Silent), meeting.answered():
        member.store.set(keys[member.rank], "")
        if not member.rank:
            meeting.wait_for(member, member.store, keys, limit=_FAREWELL)
    processes.leave(member.watched)


def _begun(member: meeting.Member, told: dict[str, Any], *, timeout: float) -> meeting.Shared:
    """The world of a run that every rank has come to.

    Raises:
        UsageError: one runs something else.
    """
    # To start takes longer than a barrier may.
    member.timeout = max(timeout, silence.START)
    shared = member.shared = member.shared or meeting.world(member)
    cells.begin(shared.control, member.rank)
    cells.running(shared.control, member.rank)
    # One rank may have judged alone what the last run gave.
    member.timeout = meeting.PATIENCE
    _same(shared, told)
    member.timeout = timeout
    return shared


def _lost(member: meeting.Member, error: Exception) -> Outcome:
    """The outcome of this run and of all later ones."""
    if isinstance(error, Released):
        ended = meeting.doubt(member)
        if ended is None:
            return Outcome(rule="timeout", message="another rank has left")
        error = ended
    report = call.failure(error)
    return Outcome(rule=report["rule"], message=report["message"], rank=report.get("rank"))


def _same(shared: meeting.Shared, told: dict[str, Any]) -> None:
    """Every rank runs the same.

    Raises:
        UsageError: one runs something else.
    """
    for rank, other in enumerate(shared.share("run", told)):
        if other != told:
            raise UsageError(
                f"rank {shared.place.rank} runs {json.dumps(told)}, "
                f"rank {rank} {json.dumps(other)}: every rank runs the same"
            )


def _outcomes(
    member: meeting.Member, shared: meeting.Shared, report: dict[str, Any]
) -> list[Outcome]:
    """All ranks' outcomes, of which this rank tells its own.

    Raises:
        Silent: a rank does not tell its own.
        Gone: it has ended before.
    """
    control, rank = shared.control, member.rank
    if "rule" in report:
        report["where"] = silence.where(control, rank)
        cells.end(control)
    cells.finished(control, rank)
    turn = next(member.serial)
    heard: dict[int, dict[str, Any]] = {}
    shared.store.set(f"report/{turn}/{rank}", json.dumps(report))
    while len(heard) < member.ranks:
        # Asked first: who is gone by then has told all that it ever tells.
        gone = processes.ended(member.watched)
        for each in set(range(member.ranks)) - set(heard):
            if shared.store.check([f"report/{turn}/{each}"]):
                heard[each] = json.loads(shared.store.get(f"report/{turn}/{each}"))
        lost = set(gone) - set(heard)
        if lost and "released" in report:
            raise Released
        meeting.absent(lost)
        # Whoever waits in vain says so itself, a moment before.
        limit = member.timeout + _MARGIN
        accused = silence.found(control, timeout=limit, ended=False)
        if accused is not None:
            own = report["message"] if report.get("rule") == "timeout" else ""
            raise Silent(own or accused[1], rank=accused[0])
        time.sleep(_PAUSE)
    outcomes = reports.told(
        dict(sorted(heard.items())),
        member.ranks,
        made=lambda rank: reports.outcome(heard[rank], None),
    )
    shared.store.set(f"taken/{turn}/{rank}", "")
    meeting.wait_for(
        member, shared.store, {each: f"taken/{turn}/{each}" for each in range(member.ranks)}
    )
    if any("rule" in each for each in heard.values()):
        close(member, failed=True)
    return outcomes
