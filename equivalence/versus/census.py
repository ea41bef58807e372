"""The tie census: of rows that really select, how tied and how close their cutoff is."""

import torch
from torch import Tensor

from equivalence import eligible, ops, schema, stages
from equivalence.case import Case, take_rows
from equivalence.contract import Contract
from equivalence.versus.forwards import Census
from equivalence.versus.spread import spread
from equivalence.windows import Windows
from refimpl import bits, fast, topk

_BLOCK_BYTES = 48 << 20
_CELL_BYTES = 48
_SCORED = 64
"""Rows that the reference scores for the census alone, at most."""
_NEVER = torch.iinfo(torch.int64).min


def look(
    case: Case,
    windows: Windows,
    rows: Tensor,
    *,
    logits: Tensor | None,
    contract: Contract,
) -> Census:
    """The census of some rows of a layer-forward.

    Scores are the original's logits, else those among the inputs, else the reference's of at most
    64 rows.

    Args:
        case: held in memory.
        windows: of every row.
        rows: int64, ascending, the rows to look at.
        logits: [T, W] of the original, where it gave any.
        contract: what counts as a tie.
    """
    k, total = stages.k_of(case), len(windows.start)
    if not k:
        return Census()
    selecting = int((windows.visible > k).sum())
    rows = rows[windows.visible[rows] > k]
    source = "original" if logits is not None else "reference"
    if logits is None and "scores" in case.inputs:
        source = "input"
    scoreless = case.arithmetic is None or ops.find(case.op).score is None
    if source == "reference" and scoreless:
        return Census(rows=total, selecting=selecting)
    if source == "reference":
        rows = rows[:: max(1, -(-len(rows) // _SCORED))]
    step = max(1, _BLOCK_BYTES // (_CELL_BYTES * max(1, stages.columns_of(case))))
    looked = Census(rows=total, selecting=selecting, scores=source)
    for some in torch.split(rows, step) if len(rows) else ():
        looked = added(looked, _of_rows(case, windows, some, logits, contract))
    return looked


def _of_rows(
    case: Case, windows: Windows, rows: Tensor, logits: Tensor | None, contract: Contract
) -> Census:
    """The census of some rows by their scores, as a mask leaves them."""
    if logits is not None:
        scores = logits[rows]
    elif "picks" in case.inputs:
        scores, _ = eligible.of_ranks(case, windows, rows)
    elif "scores" in case.inputs:
        scores = case.inputs["scores"][rows]
    else:
        score, sizes = ops.find(case.op).score, ops.validate(case)
        assert score is not None  # noqa: S101 - the caller has asked
        rows = schema.whole_requests(rows, next_n=sizes.get("n", 1))
        scores = score(take_rows(case, rows), fast.accumulate)
    scores, admitted = eligible.ranked(case, windows, rows, scores)
    return of(
        scores,
        column=windows.column[rows],
        visible=windows.visible[rows],
        k=stages.k_of(case),
        contract=contract,
        admitted=admitted,
    )


def of(
    scores: Tensor,
    *,
    column: Tensor,
    visible: Tensor,
    k: int,
    contract: Contract | None = None,
    admitted: Tensor | None = None,
) -> Census:
    """The census of rows by their scores.

    Rows that select nothing, hold a NaN in their window, or have fewer than k columns to pick
    from are left out.

    Args:
        scores: [n, W] fp32, bf16 or fp16.
        column: [n], where each row's window begins in `scores`.
        visible: [n], how many columns it has.
        k: picks a row.
        contract: how zeros, NaN and -inf rank.
        admitted: bool [n, W], cells that may be picked; None where the window says all.
    """
    free = contract or Contract()
    at = torch.arange(scores.shape[1], device=scores.device)
    inside = (at >= column[:, None]) & (at < (column + visible)[:, None])
    looked = (visible > k) & ~(scores.isnan() & inside).any(1)
    keys = bits.order_key(scores, zero_sign=free.zero_sign)
    inside &= topk.eligible(keys, minus_inf=free.minus_inf, dtype=scores.dtype)
    if admitted is not None:
        inside &= admitted & topk.eligible(keys, minus_inf="pad", dtype=scores.dtype)
    looked &= inside.sum(1) >= k
    keys = torch.where(inside, keys.long(), _NEVER)[looked]
    if not len(keys):
        return Census()
    cutoff = keys.topk(k, dim=1).values[:, -1:]
    tied = (keys == cutoff).sum(1)
    cut = (keys >= cutoff).sum(1) > k
    below = torch.where(keys < cutoff, keys, _NEVER).amax(1)
    margin = (cutoff[:, 0] - below)[below != _NEVER]
    # The keys of +0 and -0.
    zero = (cutoff[:, 0] == 0) | (cutoff[:, 0] == -1)
    return Census(
        looked_at=len(keys),
        cut=int(cut.sum()),
        cut_at_zero=int((cut & zero).sum()),
        multiplicity=spread(tied.tolist()),
        margin=spread(margin.tolist()),
    )


def added(one: Census, two: Census) -> Census:
    """Both together."""
    names = {one.scores, two.scores} - {""}
    return Census(
        rows=one.rows + two.rows,
        selecting=one.selecting + two.selecting,
        looked_at=one.looked_at + two.looked_at,
        cut=one.cut + two.cut,
        cut_at_zero=one.cut_at_zero + two.cut_at_zero,
        multiplicity=one.multiplicity + two.multiplicity,
        margin=one.margin + two.margin,
        scores=" and ".join(sorted(names)),
    )
