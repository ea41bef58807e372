"""What a finding about a published mask shows: blocks, columns, slots or picks, and scores."""

import torch
from torch import Tensor

from equivalence.checks.published import Known, Published, Seen, columns_of, held_ids, spread
from equivalence.checks.rows import score_line
from equivalence.verdict import Evidence, Finding, Status
from equivalence.wording import listing
from refimpl import bits

_SHOWN = 4
_BYTE = 8
Lines = tuple[Evidence, ...]


def place_of(part: Published) -> str:
    """The window of the only row in words, and how many blocks it may publish."""
    first = int(part.column[0])
    return f"columns {first}-{first + int(part.visible[0])}   topk_blocks {part.topk_blocks}"


def of_nan(part: Published) -> Finding:
    """The only row is undecided: a score it must rank is NaN."""
    window = part.window(0)
    column = int(window.isnan().nonzero()[0, 0])
    where = f"column {column} (block {column // part.block_size})"
    return Finding(
        stage=part.stage,
        rule="nan",
        status=Status.UNDECIDED,
        row=int(part.ids[0]),
        place=place_of(part),
        evidence=(score_line("nan", where, window[column]),),
        reading="a NaN in the window ranks nowhere under nan=reject",
    )


def of_mask(part: Published, known: Known, seen: Seen, rule: str) -> Lines:
    """What in the only row's mask breaks the rule."""
    if rule == "duplicate":
        return _of_repeats(part, seen)
    if rule in ("unwritten", "out-of-window", "bits"):
        return _of_places(part, known, seen, rule)
    return _of_choice(part, known, seen, rule)


def of_order(part: Published, descents: Tensor) -> tuple[Lines, str]:
    """The first two slots of the only row that stand the wrong way round."""
    slot = int(descents.nonzero()[0, 0])
    lines = [
        Evidence(label="slot", place=str(s), value=f"holds {int(part.got[0, s])}")
        for s in (slot, slot + 1)
    ]
    return tuple(lines), "the blocks are right, order=ascending is not kept"


def of_picks(part: Published, lost: Tensor) -> tuple[Lines, str]:
    """Picks of the only row outside its mask, or where there are none what it holds beside them."""
    assert part.picks is not None  # noqa: S101 - only picks break this rule
    picks, window = part.picks[0], part.window(0)
    slots = lost.nonzero()[:, 0].tolist()
    columns, label = picks[lost].tolist(), "pick"
    notes = [f"slot {slot}, not in the mask" for slot in slots]
    told = f"{len(slots):,} of {int((picks >= 0).sum()):,} picks not in the mask"
    if not slots:
        held = columns_of(part, 0)
        held[picks[(picks >= 0) & (picks < len(held))]] = False
        columns, label = held.nonzero()[:, 0].tolist(), "extra"
        notes = ["not picked"] * len(columns)
        told = f"{len(columns):,} of the mask's columns not picked"
    lines = [
        score_line(label, _column(part, column), window[column], note)
        for column, note in zip(columns[:_SHOWN], notes, strict=False)
    ]
    lines += _more(label, len(columns))
    return tuple(lines), f"mask and picks of the same run disagree: {told}"


def _of_repeats(part: Published, seen: Seen) -> Lines:
    twice = (seen.times[0] > 1).nonzero()[:, 0].tolist()
    held = held_ids(part)[0]
    lines = []
    for block in twice[:_SHOWN]:
        slots = ((part.got[0] == block) & held).nonzero()[:, 0].tolist()
        lines.append(Evidence(label="block", place=str(block), value=f"in slots {listing(slots)}"))
    return (*lines, *_more("block", len(twice)))


def _of_places(part: Published, known: Known, seen: Seen, rule: str) -> Lines:
    """Slots or columns that break a rule of structure."""
    which = {"unwritten": seen.unwritten, "out-of-window": seen.strange, "bits": seen.odd}[rule][0]
    packed = part.got.dtype is torch.uint8
    each = _BYTE if packed else 1
    places = sorted({place // each for place in which.nonzero()[:, 0].tolist()})
    blocks = int(known.count[0])
    window = f"the window has {int(part.visible[0])} columns"
    note = {
        "unwritten": "the buffer's poison",
        "out-of-window": f"{window}, {blocks} blocks" if part.as_ids else window,
        "bits": "a bool is 0 or 1",
    }[rule]
    label = "slot" if part.as_ids else "byte" if packed else "column"
    row, unit = bits.as_int(part.got[0]), "holds" if part.as_ids else "holds byte"
    lines = [
        Evidence(
            label=label,
            place=f"{p} (columns {p * each}-{p * each + each})" if packed else str(p),
            value=f"{unit} {int(row[p])}",
            note=note,
        )
        for p in places[:_SHOWN]
    ]
    return (*lines, *_more(label, len(places)))


def _of_choice(part: Published, known: Known, seen: Seen, rule: str) -> Lines:
    """How many blocks there are, the cutoff, what is missing and what stands in its place."""
    must, ties, kept = known.must[0], known.ties[0], known.kept[0]
    some, full, allowed = seen.some[0], seen.full[0], must | ties
    missing = must & ~full if bool((must & ~full).any()) else kept & ~full
    extra = some & ~allowed
    if rule == "wrong-tie" or int((some & ties).sum()) > int(known.need[0] - must.sum()):
        extra |= some & ties & ~kept
    keys = bits.order_key(
        known.scores[0],
        zero_sign=part.contract.zero_sign,
        nan="last" if part.ranks_nan == "ignore" else "first",
    )
    lines = [
        Evidence(
            label="blocks",
            place=f"want {int(known.need[0])}",
            value=f"got {int(some.sum())}",
        )
    ]
    others = allowed.clone()
    others[int(known.count[0]) - 1 :] = False
    cutoff = None
    if int(known.count[0]) > part.topk_blocks and bool(others.any()):
        cutoff = int(keys[others].min())
        at = (others & (keys == cutoff)).nonzero()[:, 0].tolist()
        shared = f"shared by blocks {listing(at, most=5)}" if len(at) > 1 else ""
        lines.append(score_line("cutoff", _block(part, at[0]), known.scores[0, at[0]], shared))
    admitted = columns_of(part, 0)
    for label, which in (("missing", missing), ("extra", extra)):
        blocks = which.nonzero()[:, 0]
        ranked = blocks[keys[blocks].sort(descending=label == "missing", stable=True).indices]
        for block in ranked[:_SHOWN].tolist():
            gap = None if cutoff is None else int(keys[block]) - cutoff
            note = _note(part, known, seen, admitted, block, gap=gap, label=label)
            lines.append(score_line(label, _block(part, block), known.scores[0, block], note))
        lines += _more(label, len(ranked))
    return tuple(lines)


def _note(
    part: Published,
    known: Known,
    seen: Seen,
    admitted: Tensor,
    block: int,
    *,
    gap: int | None,
    label: str,
) -> str:
    """What is to be said of a block: a part of it, the newest, or how far from the cutoff."""
    inside, size = int(seen.inside[0, block]), int(seen.size[0, block])
    if 0 < inside < size:
        one = torch.zeros_like(seen.some[0])
        one[block] = True
        own = spread(part, one, len(admitted))
        which = own & (admitted if label == "extra" else ~admitted)
        columns = which.nonzero()[:, 0].tolist()
        return f"{len(columns)} of its {size} columns: {listing(columns)}"
    if block == int(known.count[0]) - 1:
        return "the newest block"
    if gap is None:
        return ""
    if gap == 0:
        return "at the cutoff"
    return f"{gap:+,} ulp {'above' if gap > 0 else 'below'} the cutoff"


def _block(part: Published, block: int) -> str:
    first = block * part.block_size
    last = min(first + part.block_size, int(part.visible[0]))
    return f"block {block} (columns {first}-{last})"


def _column(part: Published, column: int) -> str:
    return f"column {column} (block {column // part.block_size})"


def _more(label: str, many: int) -> list[Evidence]:
    surplus = many - _SHOWN
    return [Evidence(label=label, place=f"and {surplus:,} more")] if surplus > 0 else []
