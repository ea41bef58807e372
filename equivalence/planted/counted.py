"""Planted faults of kernels whose rows depend on the call: how many rows, which, over what memory.

Each is a candidate of `ragged_topk`, or of `mqa_logits` where it is about logits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count

import torch
from torch import Tensor

from equivalence.candidate import Candidate
from refimpl import scoring
from refimpl.bits import as_int
from refimpl.topk import PAD

_SWITCH, _MOST, _SPLIT = 64, 32, 4


@dataclass(frozen=True, kw_only=True)
class CountedFault:
    """A candidate that is wrong in some calls.

    Attributes:
        name: what goes wrong.
        make: a new candidate; one may count its calls.
        rule: what the first finding about it must be called.
        says: a part of that finding's reading.
        op: what it is a candidate of.
        kin: the fault of a real kernel that it is a model of, or "".
    """

    name: str
    make: Callable[[], Candidate]
    rule: str
    says: str
    op: str = "ragged_topk"
    kin: str = ""


def right(*, scores: Tensor, row_start: Tensor, row_end: Tensor, k: int) -> Tensor:
    """Right picks of finite scores; ties fall as `torch.topk` has them."""
    column = torch.arange(scores.shape[1], device=scores.device)
    start, end = row_start[:, None], row_end[:, None]
    inside = (column >= start) & (column < end)
    best = scores.masked_fill(~inside, -torch.inf).topk(k).indices - start
    slot, visible = column[:k], end - start
    return torch.where(visible <= k, slot, best).masked_fill(slot >= visible, PAD).int()


def random_ties(*, scores: Tensor, row_start: Tensor, row_end: Tensor, k: int) -> Tensor:
    """Legal under order=any,ties=any, and another row each time: ties and order are drawn."""
    picks = right(scores=scores, row_start=row_start, row_end=row_end, k=k)
    for row in (row_end - row_start > k).nonzero()[:, 0].tolist():
        window = scores[row, int(row_start[row]) : int(row_end[row])]
        mixed = torch.randperm(len(window))
        best = window[mixed].sort(descending=True, stable=True).indices[:k]
        picks[row] = mixed[best][torch.randperm(k)]
    return picks


def losing(where: Callable[..., Tensor], **call: Tensor) -> Tensor:
    """Right, but without the best pick in rows of over k + 1 columns that `where(**call)` names."""
    k = int(call["k"])
    longer = right(**{**call, "k": k + 1})  # type: ignore[arg-type]  # k is the one number
    picks = right(**call)  # type: ignore[arg-type]  # likewise
    wrong = where(**call) & (call["row_end"] - call["row_start"] > k + 1)
    return torch.where(wrong[:, None], longer[:, 1:], picks)


def _from_row(*, row_end: Tensor, **_: object) -> Tensor:
    return torch.arange(len(row_end), device=row_end.device) >= _SWITCH


def _after_short(*, row_start: Tensor, row_end: Tensor, k: int, **_: object) -> Tensor:
    short = row_end - row_start <= k
    return torch.cat([torch.zeros_like(short[:1]), short[:-1]])


def _stale_flag(*, scores: Tensor, **_: object) -> Tensor:
    return scores.new_empty(len(scores)) > 0


def _everywhere(*, row_end: Tensor, **_: object) -> Tensor:
    return torch.ones_like(row_end, dtype=torch.bool)


def _truncated(*, scores: Tensor, row_start: Tensor, row_end: Tensor, k: int) -> Tensor:
    """More than 32 rows take a kernel that sees no column past the first 2 k of a row."""
    end = row_end if len(scores) <= _MOST else torch.minimum(row_end, row_start + 2 * k)
    return right(scores=scores, row_start=row_start, row_end=end, k=k)


def _unwritten(*, scores: Tensor, row_start: Tensor, row_end: Tensor, k: int) -> Tensor:
    """Rows from 64 on are never stored."""
    picks = right(scores=scores, row_start=row_start, row_end=row_end, k=k)
    out = torch.empty_like(picks)
    out[:_SWITCH] = picks[:_SWITCH]
    return out


def _to_the_end(*, scores: Tensor, row_start: Tensor, row_end: Tensor, k: int) -> Tensor:
    """A row that ends in the last 64 columns of the buffer is read to the buffer's end."""
    width = scores.shape[1]
    end = torch.where(row_end == width - _SWITCH, width, row_end)
    return right(scores=scores, row_start=row_start, row_end=end, k=k)


def _ascending(*, scores: Tensor, row_start: Tensor, row_end: Tensor, k: int) -> Tensor:
    """No window is taken to begin before that of the row before it."""
    start = row_start.cummax(0).values.minimum(row_end)
    return right(scores=scores, row_start=start, row_end=row_end, k=k)


def _by_longest(*, scores: Tensor, row_start: Tensor, row_end: Tensor, k: int) -> Tensor:
    """Beside a row of more than 3 k columns, others are read to their first 2 k columns."""
    long = int((row_end - row_start).max()) > 3 * k
    end = torch.minimum(row_end, row_start + 2 * k) if long else row_end
    picks = right(scores=scores, row_start=row_start, row_end=end, k=k)
    long_rows = (row_end - row_start > 3 * k)[:, None]
    exact = right(scores=scores, row_start=row_start, row_end=row_end, k=k)
    return torch.where(long_rows, exact, picks)


def _packed(*, scores: Tensor, row_start: Tensor, row_end: Tensor, k: int) -> Tensor:
    """The stride of a row is taken to be its width."""
    packed = scores.as_strided(scores.shape, (scores.shape[1], 1), scores.storage_offset())
    return right(scores=packed, row_start=row_start, row_end=row_end, k=k)


def _reordered_sum(**call: object) -> Tensor:
    """More than 4 rows are summed in another order: the last bit of every logit is another."""
    logits = scoring.mqa_logits(**call)  # type: ignore[arg-type]  # the op's own call
    if len(logits) <= _SPLIT:
        return logits
    return (as_int(logits) ^ 1).view(torch.float32)


def _alternating() -> Candidate:
    """Every second call is wrong."""
    calls = count()

    def candidate(**call: Tensor) -> Tensor:
        return losing(_everywhere, **call) if next(calls) % 2 else right(**call)  # type: ignore[arg-type]  # likewise

    return candidate


def _loses(where: Callable[..., Tensor]) -> Callable[[], Candidate]:
    return lambda: partial(losing, where)


COUNTED: tuple[CountedFault, ...] = (
    CountedFault(
        name="row 64 of a call on loses a winner",
        make=_loses(_from_row),
        rule="row-variance",
        says="is right in calls of up to 64 rows and wrong in one of 65",
        kin="vLLM top_k_per_row_prefill takes another sort from row 12288 of a launch on",
    ),
    CountedFault(
        name="a call of more than 32 rows drops winners",
        make=lambda: _truncated,
        rule="row-variance",
        says="is right in calls of up to 32 rows and wrong in one of 33",
        kin="vllm-project/vllm#51782",
    ),
    CountedFault(
        name="histogram left dirty by a short row",
        make=_loses(_after_short),
        rule="row-variance",
        says="alone is right; after row",
        kin="flashinfer-ai/flashinfer#2325",
    ),
    CountedFault(
        name="rows from 64 on are not written",
        make=lambda: _unwritten,
        rule="row-variance",
        says="is right in calls of up to 64 rows and wrong in one of 65",
        kin="ROCm/aiter#4244",
    ),
    CountedFault(
        name="logits change with the number of rows",
        make=lambda: _reordered_sum,
        rule="row-variance",
        says="is right in calls of up to 4 rows and wrong in one of 5",
        op="mqa_logits",
    ),
    CountedFault(
        name="the longest row of a call chooses the kernel of all",
        make=lambda: _by_longest,
        rule="row-variance",
        says="alone is right; ",
        kin="vLLM top_k_per_row_decode goes by the padded width of a call",
    ),
    CountedFault(
        name="windows are taken to ascend",
        make=lambda: _ascending,
        rule="row-variance",
        says="alone is right; after row",
    ),
    CountedFault(
        name="the buffer's width is read in place of the row's",
        make=lambda: _to_the_end,
        rule="row-variance",
        says="wider: the buffer's width is read in place of the row's",
    ),
    CountedFault(
        name="rows are taken to be packed",
        make=lambda: _packed,
        rule="row-variance",
        says="is right where rows are packed and wrong where they lie 64 columns further apart",
    ),
    CountedFault(
        name="a flag is read before it is written",
        make=_loses(_stale_flag),
        rule="row-variance",
        says="something is read before it is written",
    ),
    CountedFault(
        name="every second call differs",
        make=_alternating,
        rule="nondeterminism",
        says="call 2 of the same rows gave row",
    ),
    CountedFault(
        name="wrong everywhere, the same in every schedule",
        make=_loses(_everywhere),
        rule="lost-winner",
        says="lost to lower scores",
    ),
)
