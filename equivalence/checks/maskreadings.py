"""Readings of a wrong mask: one sentence naming the likely cause, where the evidence shows it."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from equivalence.checks import maskwords
from equivalence.checks.published import Known, Published, Seen, columns_of, held_ids, know, spread
from refimpl import bits, blocks

_BYTE = 8
_Reading = Callable[[], str]


def of_row(part: Published, known: Known, seen: Seen, rule: str, *, near: int | None) -> str:
    """What the mask of the only row looks like.

    Args:
        part: one row.
        known: of it.
        seen: of it.
        rule: the rule it breaks.
        near: the number of the row whose mask it holds, see `neighbour`.
    """
    if rule in ("unwritten", "bits"):
        return ""
    want = spread(part, known.kept[0], int(part.visible[0]))
    got = columns_of(part, 0)
    tried: tuple[_Reading, ...] = (
        lambda: _of_previous(part, known),
        lambda: _of_polarity(known, want, got, part.topk_blocks),
        lambda: _of_bytes(part, want),
        lambda: _of_bit_order(part, want, got),
        lambda: _of_start(part, known, want),
        lambda: _of_grid(part, want, got),
        lambda: _of_threshold(known, seen),
        lambda: _of_neighbour(part, near),
        lambda: _of_padding(part, known, seen),
        lambda: _of_repeat(seen),
        lambda: _of_one_bit(part, want, got),
        lambda: _of_nan(known, seen),
        lambda: _of_newest(known, seen),
        lambda: _of_minus_inf(known, seen),
        lambda: _of_parts(seen),
        lambda: _of_ties(part, known, seen, rule),
        lambda: _of_loss(known, seen, rule),
        lambda: _of_window(part, rule),
    )
    return next((told for reading in tried if (told := reading())), "")


def _of_previous(part: Published, known: Known) -> str:
    """A stale mask: the row holds what it held a step earlier, and that is not right now."""
    if part.previous is None or part.previous.shape[1] != part.got.shape[1]:
        return ""
    if bool(maskwords.differing(want=part.previous, got=part.got, visible=part.visible)[0]):
        return ""
    return "the row holds its mask of the previous step" if int(known.count[0]) else ""


def _of_polarity(known: Known, want: Tensor, got: Tensor, topk_blocks: int) -> str:
    if int(known.count[0]) <= topk_blocks or bool((want == got).any()):
        return ""
    return "the mask is the complement of the reference in the whole window: True means masked"


def _of_bytes(part: Published, want: Tensor) -> str:
    """A bool mask that came as uint8."""
    if part.got.dtype is not torch.uint8 or part.got.shape[1] < len(want):
        return ""
    told = "one byte a column: a uint8 mask holds eight columns a byte"
    return told if torch.equal(part.got[0, : len(want)] != 0, want) else ""


def _of_bit_order(part: Published, want: Tensor, got: Tensor) -> str:
    if part.got.dtype is not torch.uint8 or torch.equal(want, got):
        return ""
    octets = maskwords.cells(part.got, columns=part.columns).view(-1, _BYTE)
    turned = octets.flip(1).flatten()[: len(want)] != 0
    if not torch.equal(turned, want):
        return ""
    return "every byte is right from its other end: the bits are packed highest first"


def _of_start(part: Published, known: Known, want: Tensor) -> str:
    """Columns or blocks counted from column 0 of the scores."""
    start = int(part.column[0])
    if part.as_ids:
        moved = start // part.block_size
        ids = part.got[0][held_ids(part)[0]].sort().values - moved
        kept = known.kept[0].nonzero()[:, 0]
        fits = moved > 0 and len(ids) == len(kept) and bool((ids == kept).all())
        told = f"every block is {moved:,} too high"
    else:
        held = maskwords.cells(part.got, columns=part.columns)[0] != 0
        n = min(len(want), len(held) - start)
        fits = start > 0 and n > 0 and bool(want[:n].any()) and not bool(held[:start].any())
        fits = fits and torch.equal(held[start : start + n], want[:n])
        told = f"every column is {start:,} too high"
    return f"{told}: counted from column 0, not from the row's start {start}" if fits else ""


def _of_grid(part: Published, want: Tensor, got: Tensor) -> str:
    """Blocks that begin where they would if the first one began at column 0 of the scores."""
    start, visible = int(part.column[0]), len(want)
    before = start % part.block_size
    if part.as_ids or not before:
        return ""
    window = functional.pad(part.window(0), (before, 0), value=-torch.inf)[None]
    grid = blocks.kept_blocks(
        block_scores=blocks.block_scores(
            scores=window,
            row_start=torch.zeros_like(part.visible),
            row_end=part.visible + before,
            nan="ignore" if part.ranks_nan == "ignore" else "propagate",
            block_size=part.block_size,
        ),
        blocks=-(-(part.visible + before) // part.block_size),
        topk_blocks=part.topk_blocks,
        ties=part.contract.ties,
        short_rows=part.contract.short_rows,
        zero_sign=part.contract.zero_sign,
    )[0]
    if not torch.equal(spread(part, grid, before + visible)[before:], got):
        return ""
    return f"its blocks are counted from column 0 of the scores, not from the row's start {start}"


def neighbour(published: Published, wrong: Tensor, i: int) -> int | None:
    """The number of the row before or after whose mask row i of the block holds.

    Two rows may differ in their last columns alone: then a second wrong row must fit likewise.

    Args:
        published: the block.
        wrong: bool [B], rows that fail.
        i: one of them.
    """
    rows = range(len(published.ids))
    want, got = _reference(published, i), columns_of(published, i)
    for by in (-1, 1):
        # A row that admits nothing holds nobody's mask.
        if i + by not in rows or not bool(got.any()):
            continue
        other = _reference(published, i + by)
        n = min(len(want), len(other))
        fits, telling = torch.equal(other[:n], got[:n]), not torch.equal(other[:n], want[:n])
        beside = [k for k in (i - 1, i + 1) if k in rows and k + by in rows and bool(wrong[k])]
        steady = _fits(other, got) and any(
            _fits(_reference(published, k + by), columns_of(published, k)) for k in beside
        )
        if (fits and telling) or steady:
            return int(published.ids[i + by])
    return None


def _reference(published: Published, i: int) -> Tensor:
    """The columns bool [visible] that the reference admits in row i of the block."""
    part = published.take(slice(i, i + 1))
    return spread(part, know(part).kept[0], int(part.visible[0]))


def _fits(want: Tensor, got: Tensor) -> bool:
    """Whether columns are another row's, False past its window."""
    return torch.equal(functional.pad(want, (0, max(0, len(got) - len(want))))[: len(got)], got)


def _of_neighbour(part: Published, near: int | None) -> str:
    if near is None:
        return ""
    row = int(part.ids[0])
    return f"row {row} holds the mask of row {near}: as when a tail is off by one"


def _of_padding(part: Published, known: Known, seen: Seen) -> str:
    """The last block of the mask's padding stands where the newest one is missing."""
    newest = int(known.count[0]) - 1
    if newest < 0 or bool(seen.full[0, newest]):
        return ""
    if part.as_ids:
        past = part.got[0][seen.strange[0]].tolist()
    else:
        held = maskwords.cells(part.got, columns=part.columns)[0] != 0
        held[: int(part.visible[0])] = False
        past = sorted({column // part.block_size for column in held.nonzero()[:, 0].tolist()})
    if len(past) != 1 or past[0] <= newest:
        return ""
    return (
        f"block {past[0]}, past the row's columns, stands in the place of its newest block "
        f"{newest}: as when padding columns are counted"
    )


def _of_repeat(seen: Seen) -> str:
    twice = (seen.times[0] > 1).nonzero()[:, 0].tolist()
    if len(twice) != 1:
        return ""
    times = int(seen.times[0, twice[0]])
    return f"block {twice[0]} stands {times:,} times: as when free slots repeat the last block"


def _of_threshold(known: Known, seen: Seen) -> str:
    must, ties, full = known.must[0], known.ties[0], seen.full[0]
    free = int(known.need[0]) - int(must.sum())
    tied = int(ties.sum())
    if not torch.equal(full, must | ties) or tied <= free:
        return ""
    room = "1 has room" if free == 1 else f"{free:,} have room"
    return (
        f"admits the whole tie at the cutoff, {tied:,} blocks where {room}: as score >= cutoff does"
    )


def _of_one_bit(part: Published, want: Tensor, got: Tensor) -> str:
    other = (want != got).nonzero()[:, 0].tolist()
    if part.as_ids or len(other) != 1 or part.block_size == 1:
        return ""
    state = "admitted" if bool(got[other[0]]) else "not admitted"
    return f"a single bit differs from the reference: column {other[0]:,} is {state}"


def _of_nan(known: Known, seen: Seen) -> str:
    lost = known.must[0] & ~seen.full[0]
    if not bool(lost.any()) or not bool(known.scores[0][lost].isnan().all()):
        return ""
    return "the blocks of a NaN are left out"


def _of_newest(known: Known, seen: Seen) -> str:
    newest = int(known.count[0]) - 1
    if newest < 0 or bool(seen.some[0, newest]):
        return ""
    return f"the newest block {newest} is left out: it is published whatever it scores"


def _of_minus_inf(known: Known, seen: Seen) -> str:
    extra = seen.some[0] & ~known.must[0] & ~known.ties[0]
    if not bool(extra.any()) or not bool(known.scores[0][extra].isneginf().all()):
        return ""
    return "blocks without a score above -inf are published"


def _of_parts(seen: Seen) -> str:
    parts = int((seen.some[0] & ~seen.full[0]).sum())
    if not parts:
        return ""
    return f"{parts:,} {'block is' if parts == 1 else 'blocks are'} admitted in part"


def _of_ties(part: Published, known: Known, seen: Seen, rule: str) -> str:
    if rule == "wrong-tie":
        return "the blocks at the cutoff are not the ones the contract names"
    lost = known.must[0] & ~seen.full[0]
    if part.contract.ties != "all" or not bool(lost.any()):
        return ""
    keys = bits.order_key(known.scores[0], zero_sign=part.contract.zero_sign, nan="first")
    others = keys[: int(known.count[0]) - 1][known.must[0, : int(known.count[0]) - 1]]
    if not bool((keys[lost] == others.min()).all()):
        return ""
    return "blocks at the cutoff are left out, and ties=all admits every one of them"


def _of_loss(known: Known, seen: Seen, rule: str) -> str:
    lost = int((known.must[0] & ~seen.full[0]).sum())
    if rule != "mask-missing" or int(seen.some[0].sum()) < int(known.need[0]) or not lost:
        return ""
    return f"{lost:,} of {int(known.need[0]):,} blocks lost to lower scores"


def _of_window(part: Published, rule: str) -> str:
    if rule != "out-of-window":
        return ""
    what = "blocks" if part.as_ids else "columns"
    return f"admits {what} past the row's {int(part.visible[0])} visible columns"
