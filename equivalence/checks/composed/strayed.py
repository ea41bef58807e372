"""Strays: bytes that ranks changed outside what a composition may write."""

from torch import Tensor

from equivalence.checks.composed.wanted import Step
from equivalence.tally import KEPT
from equivalence.verdict import Evidence, Finding, Stage, Status
from refimpl.compose import KINDS

REGIONS = ("pool", "staging", "dense", "guard")
"""In the order of the numbers that ranks report."""
COLUMNS = ("layer or half", "kind", "region", "page", "byte", "changed")
"""What a row of strays says; of a guard: region it guards, kind, guard, 0 before or 1 after, ..."""


def decide(step: Step, strays: Tensor) -> tuple[Stage, list[Finding]]:
    """One finding a page that changed.

    Args:
        step: what was composed.
        strays: int32 [cp, m, 6], one row a page, see COLUMNS: layer of a pool, half of a staging
            or a dense buffer; the kind among `refimpl.compose.KINDS`; the region; the page; its
            first byte that changed; how many did. Rows of -1 say nothing.
    """
    findings: list[Finding] = []
    ranks: set[int] = set()
    for rank, row in (strays >= 0).any(2).nonzero().tolist():
        ranks.add(rank)
        if len(findings) == KEPT:
            continue
        part, kind, region, page, byte, count = strays[rank, row].tolist()
        where = _where(part, region, page)
        findings.append(
            Finding(
                stage="strays",
                rule="wrote-outside",
                place=f"rank {rank} {_at(KINDS, kind)} {where}",
                evidence=(
                    Evidence(label="first", place=f"byte {byte}", value=f"{count:,} changed"),
                ),
                reading="bytes changed that no step may write",
            )
        )
    cp = step.batch.cp
    status = Status.DIFFERENT if ranks else Status.EQUAL
    rows = int((strays >= 0).any(2).sum())
    return Stage(
        status=status,
        counts={"rows": cp, "identical": cp - len(ranks), "different": len(ranks)},
        power=False,
        rules={"wrote-outside": rows} if rows else {},
    ), findings


def _where(part: int, region: int, page: int) -> str:
    """A page of a region, or the guard on one of its sides."""
    name = _at(REGIONS, region)
    if name == "guard":
        return f"guard {'after' if page else 'before'} the {_at(REGIONS, part)}"
    return f"{name} {'layer' if name == 'pool' else 'half'} {part} page {page}"


def _at(names: tuple[str, ...], number: int) -> str:
    return names[number] if 0 <= number < len(names) else f"number {number}"
