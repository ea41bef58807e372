"""This process as a rank that somebody else started, as torchrun does.

Ranks find each other through the store of their environment; all else is as between processes of
a pool, but that nobody watches them: each one waits for the others no longer than its time limit.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from torch import Tensor

from equivalence.errors import UsageError
from equivalence.replay import Outcome
from equivalence.world import call, gather, meeting, naming, parcel, segment, silence
from equivalence.world import control as cells
from equivalence.world.transport import Released, Silent

_PATIENCE = timedelta(hours=6)
_PAUSE = 0.002
_MARGIN = 0.5


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
        # To start takes longer than a barrier may.
        member.timeout = max(timeout, silence.START)
        shared = member.shared = member.shared or meeting.world(member)
        member.timeout = timeout
        cells.begin(shared.control, member.rank)
        cells.running(shared.control, member.rank)
        _same(shared, {"function": name, "settings": told})
        own = {key: tensor.detach().cpu().clone() for key, tensor in inputs.items()}
        report, handle = call.run(
            function, shared.link, inputs=own, settings=told, tag=shared.place.tag, named=True
        )
        if handle is not None:
            os.close(handle)
        return _outcomes(member, shared, report)
    except (Silent, Released, MemoryError) as error:
        rule = "out-of-memory" if isinstance(error, MemoryError) else "timeout"
        member.lost = Outcome(rule=rule, message=str(error) or "another rank has left")
        close(member)
        return [member.lost] * member.ranks


def tell(member: meeting.Member, value: int) -> int:
    """The value of rank 0, on every rank."""
    key = f"equivalence/tell/{next(member.serial)}"
    if not member.rank:
        member.store.set(key, str(value))
        return value
    member.store.wait([key], _PATIENCE)
    return int(member.store.get(key))


def close(member: meeting.Member) -> None:
    """Leave the world."""
    shared, member.shared = member.shared, None
    if shared is not None:
        cells.end(shared.control)
        shared.close()
        segment.sweep(shared.place.tag)


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
    """
    control, rank = shared.control, member.rank
    layout = report.get("layout", {})
    if "rule" in report:
        report["where"] = silence.where(control, rank)
        cells.end(control)
    cells.finished(control, rank)
    turn = next(member.serial)
    reports: dict[int, dict[str, Any]] = {}
    try:
        shared.store.set(f"report/{turn}/{rank}", json.dumps(report))
        while len(reports) < member.ranks:
            for each in set(range(member.ranks)) - set(reports):
                if shared.store.check([f"report/{turn}/{each}"]):
                    reports[each] = json.loads(shared.store.get(f"report/{turn}/{each}"))
            # Whoever waits in vain says so itself, a moment before.
            limit = member.timeout + _MARGIN
            accused = silence.found(control, timeout=limit, ended=False)
            if accused is not None:
                own = report["message"] if report.get("rule") == "timeout" else ""
                raise Silent(own or accused[1])
            time.sleep(_PAUSE)
        outcomes = _told(member, reports)
        shared.store.set(f"taken/{turn}/{rank}", "")
        meeting.wait_for(
            member, shared.store, {each: f"taken/{turn}/{each}" for each in range(member.ranks)}
        )
    finally:
        parcel.discard(layout)
    if any("rule" in each for each in reports.values()):
        close(member)
    return outcomes


def _told(member: meeting.Member, reports: Mapping[int, Mapping[str, Any]]) -> list[Outcome]:
    """The outcomes that ranks reported; one that waited in vain speaks for all."""
    away = [each["message"] for each in reports.values() if each.get("rule") == "timeout"]
    if away:
        return [Outcome(rule="timeout", message=away[0])] * member.ranks
    first = gather.first(dict(sorted(reports.items())))
    return [gather.outcome(reports[rank], None, first=first) for rank in range(member.ranks)]
