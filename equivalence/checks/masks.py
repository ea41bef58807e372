"""Published masks against the legal blocks of their rows.

Equal first: a row whose words are the reference's own is right. Any other is read block by block.
Structure comes before choice, and is decided even where a NaN leaves the choice undecided.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from equivalence.checks import maskevidence, maskreadings, maskwords
from equivalence.checks.published import (
    Known,
    Published,
    columns_of,
    held_ids,
    know,
    see,
    written,
)
from equivalence.checks.rows import (
    IDENTICAL,
    OPEN,
    TIED,
    UNDECIDED,
    Decided,
    code,
    failing,
    name,
    set_first,
)
from equivalence.verdict import Finding
from refimpl import forms
from refimpl.blocks import row_blocks


def decide(published: Published) -> Decided:
    """Name every row identical, tied, undecided, or the first rule it breaks.

    Raises:
        ValueError: a window leaves the scores, or sees more columns than the mask has.
    """
    codes = torch.full_like(published.visible, IDENTICAL, dtype=torch.int8)
    power, selecting = False, 0
    for rows in row_blocks(len(codes), published.row_cells):
        part = published.take(rows)
        known = know(part)
        codes[rows] = _name_rows(part, known)
        selects = known.count > part.topk_blocks
        selecting += int(selects.sum())
        # Even where all blocks tie, the newest is owed and no more than have a place.
        power |= bool(selects.any())
    empty = int((published.visible <= 0).sum())
    return Decided(
        codes=codes,
        counts={
            "selecting": selecting,
            "short": len(codes) - selecting - empty,
            "empty": empty,
            "positions": int(published.visible.clamp(min=0).sum()),
        },
        power=power,
        explain=partial(_explain, published, codes),
    )


def beside(decided: Decided, ids: Published, other: Decided, mask: Published) -> Decided:
    """Block ids that must say what the mask of the same run says, where both are legal.

    Args:
        decided: of the ids.
        ids: as the kernel wrote them.
        other: of the mask.
        mask: as the kernel wrote it.
    """
    free = ~failing(decided.codes) & ~failing(other.codes) & (decided.codes != UNDECIDED)
    # Two choices of the reference's own are one.
    free &= (decided.codes != IDENTICAL) | (other.codes != IDENTICAL)
    codes = decided.codes.clone()
    for i in free.nonzero()[:, 0].tolist():
        if not torch.equal(columns_of(ids, i), columns_of(mask, i)):
            codes[i] = code("mask-extra")
    apart = codes != decided.codes

    def explain(i: int) -> Finding:
        if not bool(apart[i]):
            return decided.explain(i)
        return Finding(
            stage=ids.stage,
            rule="mask-extra",
            row=int(ids.ids[i]),
            place=maskevidence.place_of(ids.take(slice(i, i + 1))),
            reading="mask and block ids of the same run admit different blocks",
        )

    return replace(decided, codes=codes, explain=explain)


def _name_rows(part: Published, known: Known) -> Tensor:
    """The class or rule of every row, int8 [r]."""
    codes = torch.full_like(known.count, IDENTICAL, dtype=torch.int8)
    at = _unlike(part, known).nonzero()[:, 0]
    if len(at):
        codes[at] = _name_others(part.take(at), known.take(at))
    open_rows = ~failing(codes)
    if part.as_ids and part.contract.order == "ascending":
        set_first(codes, open_rows, _descents(part).any(1), code("order"))
    if part.picks is not None:
        set_first(codes, open_rows, _lost_picks(part, known).any(1), code("mask-missing"))
        set_first(codes, open_rows, _unpicked(part, known), code("mask-extra"))
    set_first(codes, open_rows, known.nan, UNDECIDED)
    return codes


def _unlike(part: Published, known: Known) -> Tensor:
    """Rows that are not the reference's own word by word; of ids all are read."""
    if part.as_ids:
        return torch.ones_like(known.nan)
    everything = torch.full_like(part.visible, part.columns)
    looked = part.visible if part.contract.dead == "ignore" else everything
    return maskwords.differing(want=written(part, known.kept), got=part.got, visible=looked)


def _name_others(part: Published, known: Known) -> Tensor:
    """The class or rule of rows by what they admit, int8 [r]."""
    seen = see(part, known)
    some, full = seen.some, seen.full
    codes = torch.full_like(known.count, IDENTICAL, dtype=torch.int8)
    open_rows = torch.ones_like(known.nan)
    set_first(codes, open_rows, seen.strange.any(1), code("out-of-window"))
    set_first(codes, open_rows, (seen.times > 1).any(1), code("duplicate"))
    set_first(codes, open_rows, seen.odd.any(1), code("bits"))
    set_first(codes, open_rows, known.nan, UNDECIDED)
    lacks = (known.must & ~full).any(1) | (full.sum(1) < known.need)
    set_first(codes, open_rows, some.sum(1) > known.need, code("mask-extra"))
    set_first(codes, open_rows, lacks, code("mask-missing"))
    set_first(codes, open_rows, (some & ~(known.must | known.ties)).any(1), code("mask-extra"))
    other = TIED if part.contract.ties == "any" else code("wrong-tie")
    other = other if part.ranges is None else OPEN
    set_first(codes, open_rows, (full != known.kept).any(1), other)
    # A legal row may hold the poison's bits by chance.
    codes[failing(codes) & seen.unwritten.any(1)] = code("unwritten")
    return codes


def _descents(part: Published) -> Tensor:
    """Slots of ids that hold less than the slot before them, pads ranking last, bool [r, n - 1]."""
    ids = part.got.masked_fill(~held_ids(part), forms.FAR_PAD)
    return ids[:, 1:] < ids[:, :-1]


def _lost_picks(part: Published, known: Known) -> Tensor:
    """Picks of selecting rows that their own run's mask does not admit, bool [r, k]."""
    assert part.picks is not None  # noqa: S101 - the caller has looked
    picks = part.picks
    near = (picks >= 0) & (picks < part.visible[:, None])
    near &= (known.count > part.topk_blocks)[:, None]
    column = torch.where(near, picks, 0)
    if part.as_ids:
        inside = see(part, known).inside
        column = torch.where(near, column // part.block_size, inside.shape[1])
        admitted = functional.pad(inside, (0, 1)).gather(1, column) > 0
    else:
        # A mask without columns has no picks near.
        admitted = maskwords.admitted(functional.pad(part.got, (0, 1)), column)
    return near & ~admitted


def _unpicked(part: Published, known: Known) -> Tensor:
    """Selecting rows with more columns than picks, where a block is a column and all are owed."""
    assert part.picks is not None  # noqa: S101 - the caller has looked
    exact = part.block_size == 1 and part.picks.shape[1] == part.topk_blocks
    if not exact or part.contract.ties == "all":
        return torch.zeros_like(known.nan)
    picks = part.picks.sort(1).values
    fresh = torch.ones_like(picks, dtype=torch.bool)
    fresh[:, 1:] = picks[:, 1:] != picks[:, :-1]
    many = (fresh & (picks >= 0) & (picks < part.visible[:, None])).sum(1)
    return (see(part, known).some.sum(1) > many) & (known.count > part.topk_blocks)


def _explain(published: Published, codes: Tensor, i: int) -> Finding:
    """The finding of row i, from the blocks that decided it."""
    part = published.take(slice(i, i + 1))
    known = know(part)
    if int(codes[i]) == UNDECIDED:
        return maskevidence.of_nan(part)
    rule = name(int(codes[i]))
    if name(int(_name_others(part, known)[0])) == rule:
        seen = see(part, known)
        lines = maskevidence.of_mask(part, known, seen, rule)
        near = maskreadings.neighbour(published, failing(codes), i)
        reading = maskreadings.of_row(part, known, seen, rule, near=near)
    elif rule == "order":
        lines, reading = maskevidence.of_order(part, _descents(part)[0])
    else:
        lost = _lost_picks(part, known)[0]
        lines, reading = maskevidence.of_picks(part, lost)
    return Finding(
        stage=part.stage,
        rule=rule,
        row=int(part.ids[0]),
        place=maskevidence.place_of(part),
        evidence=lines,
        reading=reading,
    )
