"""What the launcher hears from its ranks during one run, and the outcomes that follow."""

import os
import selectors
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from equivalence import wording
from equivalence.receipt import Receipt
from equivalence.replay import Outcome
from equivalence.world import control as cells
from equivalence.world import parcel, silence, wire
from equivalence.world.control import Control

_TICK = 0.05
_STARTS = 2
"""Ranks start twice together: to make their links, and to call the function."""


@dataclass(kw_only=True, eq=False)
class Found:
    """What came of a run.

    Attributes:
        reports: by rank, in the order they came.
        memory: the outputs' memory by rank, a descriptor each.
        dead: ranks whose process ended, with where they were.
        silent: the rank that kept others waiting, if it was one, and the sentence for it.
        refused: why ranks could not be given this function, or "".
    """

    reports: dict[int, dict[str, Any]] = field(default_factory=dict)
    memory: dict[int, int] = field(default_factory=dict)
    dead: dict[int, str] = field(default_factory=dict)
    silent: tuple[int | None, str] | None = None
    refused: str = ""

    @property
    def failed(self) -> bool:
        """Whether these ranks may run nothing more."""
        raised = any("rule" in report for report in self.reports.values())
        return bool(self.dead or self.silent or self.refused or raised)


def collect(
    links: Sequence[socket.socket], control: Control, *, timeout: float, start: float
) -> Found:
    """Hear ranks until each has told its outcome, or one has died or is silent.

    Args:
        links: the connection to each rank.
        control: of the world.
        timeout: seconds that a rank may be silent.
        start: seconds that it may take to start, where they are more.
    """
    found = Found()
    try:
        _collect(found, links, control, timeout=timeout, start=start)
    except BaseException:
        discard(found)
        raise
    return found


def _collect(
    found: Found,
    links: Sequence[socket.socket],
    control: Control,
    *,
    timeout: float,
    start: float,
) -> None:
    """Hear ranks, as `collect` says, and keep what they tell."""
    waiting: dict[int, dict[str, Any]] = {}
    started: set[int] = set()
    starts = 0
    with selectors.DefaultSelector() as selector:
        for rank, link in enumerate(links):
            selector.register(link, selectors.EVENT_READ, rank)
        while len(found.reports) < len(links):
            for key, _ in selector.select(_TICK):
                rank = key.data
                heard = wire.receive(links[rank])
                if heard is None:
                    found.dead[rank] = silence.where(control, rank)
                elif "share" in heard[0]:
                    waiting[rank] = heard[0]
                elif "ready" in heard[0]:
                    started.add(rank)
                else:
                    _keep(found, rank, heard[0]["report"], heard[1])
            if found.dead or found.refused:
                return
            if len(started) == len(links) or found.failed:
                starts += 1
                _begin(links, control, started, found)
            _answer(links, waiting, found)
            limit = timeout if starts >= _STARTS else max(timeout, start)
            found.silent = silence.found(control, timeout=limit, start=start)
            if found.silent is not None:
                return


def discard(found: Found) -> None:
    """Close what ranks handed over, where nobody reads it."""
    while found.memory:
        os.close(found.memory.popitem()[1])


def outcomes(found: Found, statuses: Mapping[int, int] | None, ranks: int) -> list[Outcome]:
    """One outcome a rank.

    Args:
        found: what came of a run.
        statuses: how ranks ended, as far as that is known; None where their host died.
        ranks: how many there are.
    """
    if found.dead or found.silent:
        discard(found)
        return [_end_of_all(found, statuses, ranks)] * ranks
    try:
        return told(
            found.reports,
            ranks,
            made=lambda rank: outcome(found.reports[rank], found.memory.pop(rank, None)),
        )
    finally:
        discard(found)


def told(
    reports: Mapping[int, Mapping[str, Any]], ranks: int, *, made: Callable[[int], Outcome]
) -> list[Outcome]:
    """One outcome a rank; where one waited in vain, it speaks for all.

    Args:
        reports: of ranks that failed at least, the one that failed first before the others.
        ranks: how many there are.
        made: (rank) -> the outcome of one that did not fail.
    """
    failed = {rank: report for rank, report in reports.items() if "rule" in report}
    for report in failed.values():
        if report["rule"] == "timeout":
            message, rank = report["message"], report["rank"]
            return [Outcome(rule="timeout", message=message, rank=rank)] * ranks
    first, sentence = next(
        ((r, _sentence(r, report)) for r, report in failed.items() if "released" not in report),
        (None, "another rank failed"),
    )

    def failure(rank: int) -> Outcome:
        report = failed[rank]
        if "released" in report:
            message = f"{sentence}; this rank waited {report['where']}"
            return Outcome(rule=report["rule"], message=message, rank=first)
        blamed = report.get("rank", rank)
        return Outcome(rule=report["rule"], message=_sentence(rank, report), rank=blamed)

    return [failure(rank) if rank in failed else made(rank) for rank in range(ranks)]


def outcome(report: Mapping[str, Any], handle: int | None) -> Outcome:
    """The outcome of a rank that did not fail.

    Args:
        report: as the rank's call gave it.
        handle: of its outputs' memory; closed here.
    """
    paths = tuple(Receipt(**{**path, "rows": tuple(path["rows"])}) for path in report["paths"])
    return Outcome(outputs=parcel.unpack(report["layout"], handle), paths=paths)


def _sentence(rank: int, report: Mapping[str, Any]) -> str:
    """How a rank failed by itself; who waited in vain names others, not itself."""
    verbs = {"crash": f"rank {rank} raised ", "timeout": ""}
    return verbs.get(report["rule"], f"rank {rank} failed: ") + str(report["message"])


def _end_of_all(found: Found, statuses: Mapping[int, int] | None, ranks: int) -> Outcome:
    """The outcome of every rank where some died or were silent."""
    if not found.dead:
        assert found.silent is not None  # noqa: S101 - one of both has ended the run
        return Outcome(rule="timeout", message=found.silent[1], rank=found.silent[0])
    if statuses is None:
        message = "the process that started the ranks has died, and all of them with it"
        return Outcome(rule="crash", message=message)
    told = [
        f"rank {rank} {silence.died(statuses[rank]) if rank in statuses else 'ended'} {place}"
        for rank, place in sorted(found.dead.items())
    ]
    others = [rank for rank in range(ranks) if rank not in found.dead]
    rest = f"; {wording.ranks(others)} {'was' if len(others) == 1 else 'were'} ended"
    message = f"{', '.join(told)}{rest if others else ''}"
    return Outcome(rule="crash", message=message, rank=min(found.dead))


def _keep(found: Found, rank: int, report: dict[str, Any], handles: Sequence[int]) -> None:
    """Keep what a rank reported."""
    if "usage" in report:
        found.refused = found.refused or report["message"]
    found.reports[rank] = report
    for handle in handles[1:]:
        os.close(handle)
    if handles:
        found.memory[rank] = handles[0]


def _begin(
    links: Sequence[socket.socket], control: Control, started: set[int], found: Found
) -> None:
    """Let all ranks go on, or release them where one has failed."""
    for rank in started:
        cells.running(control, rank)
        with suppress(OSError):  # a dead rank is heard of next
            wire.send(links[rank], {"released": True} if found.failed else {"go": rank})
    started.clear()


def _answer(
    links: Sequence[socket.socket], waiting: dict[int, dict[str, Any]], found: Found
) -> None:
    """Answer ranks that share something, once all do; release them where one has failed."""
    said: dict[str, Any] = {"released": True}
    if not found.failed:
        if len(waiting) < len(links):
            return
        names = {message["share"] for message in waiting.values()}
        said = {"payloads": [waiting[rank]["payload"] for rank in range(len(links))]}
        if len(names) > 1:
            each = ", ".join(f"rank {r} {waiting[r]['share']!r}" for r in range(len(links)))
            said = {"why": f"ranks exchange different things: {each}"}
    for rank in waiting:
        with suppress(OSError):  # a dead rank is heard of next
            wire.send(links[rank], said)
    waiting.clear()
