"""Where every rank says that current tokens stand: which locations are wrong, and by how much."""

from functools import partial

from torch import Tensor

from equivalence import poisons
from equivalence.checks.composed.known import bytes_of, key_of
from equivalence.checks.composed.told import SHOWN, Told, groups
from equivalence.checks.composed.wanted import Step
from equivalence.verdict import Evidence, Finding, Stage
from refimpl import batch as batches


def decide(step: Step, got: Tensor) -> tuple[Stage, list[Finding]]:
    """Compare the locations that every rank gives, and the ranks with each other.

    Args:
        step: what they composed.
        got: int32 [cp, T].
    """
    want = batches.row_locations(step.batch)
    size, cells = step.batch.page_size, len(step.batch.slot_pages) * step.batch.page_size
    told = Told()
    holders: dict[bytes, list[int]] = {}
    for rank, mine in enumerate(got):
        places = (mine != want).nonzero()[:, 0]
        key = key_of(bytes_of(mine)) if len(places) else b""
        holders.setdefault(key, []).append(rank)
        if not len(places):
            continue
        told.failing |= set((want[places] // size).tolist())
        found = _of_locations(rank, want, mine, places, size=size, cells=cells)
        told.add(found.rule, partial(_same, found))
    if len(holders) > 1:
        reading = groups(holders, "table of locations")
        found = Finding(stage="row_locations", rule="diverged", reading=reading)
        told.add("diverged", partial(_same, found))
    # Pages are what a case is for: right locations alone decide nothing.
    return told.stage(len(got), power=False), told.findings


def _same(found: Finding) -> Finding:
    return found


def _of_locations(
    rank: int, want: Tensor, got: Tensor, places: Tensor, *, size: int, cells: int
) -> Finding:
    """The wrong locations of one rank."""
    one, two = want[places].long(), got[places].long()
    moved = two - one
    lines = []
    for i in range(min(SHOWN, len(places))):
        for label, side in (("want", one), ("got", two)):
            at = int(side[i])
            note = f"slot {at // size} token {at % size}" if 0 <= at < cells else "nowhere"
            lines.append(
                Evidence(label=label, place=f"token {int(places[i])}", value=str(at), note=note)
            )
    if len(places) > SHOWN:
        lines.append(Evidence(label="", place=f"and {len(places) - SHOWN:,} more"))
    outside, other = (two < 0) | (two >= cells), bool((one // size != two // size).any())
    reading = ""
    if bool((two == poisons.INDEX[0]).all()):
        rule = "unwritten"
    elif bool(outside.any()):
        rule = "out-of-window"
    else:
        rule = "page-mismatch" if other else "bits"
    if rule != "unwritten" and bool((moved == moved[0]).all()):
        pages, rest = divmod(int(moved[0]), size)
        unit = "page" if abs(pages) == 1 else "pages"
        by = f"{int(moved[0]):+,}" if rest else f"{pages:+,} {unit}"
        reading = f"every wrong one is off by {by}"
    return Finding(
        stage="row_locations",
        rule=rule,
        place=f"rank {rank}   {len(places):,} of {len(want):,} locations",
        evidence=tuple(lines),
        reading=reading,
    )
