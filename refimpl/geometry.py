"""Which columns a query row may pick, and how engines cut rows into chunks."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def ragged_windows(
    *, extend_lens: Tensor | Sequence[int], seq_lens: Tensor | Sequence[int], ratio: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Windows of a prefill batch whose keys are concatenated request after request.

    Extends [3, 2] of sequences [10, 4] give row_start [0, 0, 0, 10, 10] and
    row_end [8, 9, 10, 13, 14]: the last rows of a sequence are new, each sees itself.

    Args:
        extend_lens: new rows of each request, int [B].
        seq_lens: tokens of each request with the new ones, int [B].
        ratio: tokens a key column stands for; a column exists once its last token does.

    Returns:
        row_start, row_end: half-open windows in absolute columns, int32 [T].
        row_to_request: int32 [T].

    Raises:
        ValueError: when lengths do not pair up, or a request extends by less than 0 or more
            than its length.
    """
    device = next((x.device for x in (extend_lens, seq_lens) if isinstance(x, Tensor)), None)
    extend = torch.as_tensor(extend_lens, dtype=torch.int64, device=device)
    total = torch.as_tensor(seq_lens, dtype=torch.int64, device=device)
    if extend.dim() != 1 or extend.shape != total.shape:
        raise ValueError(
            f"extend_lens {list(extend.shape)} and seq_lens {list(total.shape)} are not one "
            "length a request"
        )
    wrong = ((extend < 0) | (extend > total)).nonzero().flatten().tolist()
    if wrong:
        at = wrong[0]
        raise ValueError(
            f"request {at} extends by {int(extend[at])} of {int(total[at])} tokens; "
            "an extend is 0 or more and at most the length"
        )
    requests = torch.arange(extend.numel(), device=extend.device)
    owner = requests.repeat_interleave(extend)
    first_row = extend.cumsum(0) - extend
    position = (total - extend - first_row)[owner] + torch.arange(
        owner.numel(), device=owner.device
    )
    columns = total // ratio
    start = (columns.cumsum(0) - columns)[owner]
    end = start + compressed_lengths(positions=position, ratio=ratio)
    return start.to(torch.int32), end.to(torch.int32), owner.to(torch.int32)


def compressed_lengths(*, positions: Tensor, ratio: int) -> Tensor:
    """Visible columns of queries at `positions` (int [T]), `ratio` tokens a column; int32 [T].

    Column j covers tokens j * ratio up to (j + 1) * ratio. A padding row (-1) sees none.
    """
    return ((positions + 1) // ratio).clamp_min(0).to(torch.int32)


def score_ends(*, row_start: Tensor, row_end: Tensor, k: int) -> Tensor:
    """Where scoring ends where rows of at most k columns are not scored at all; int32 [T].

    Their top-k is 0 .. visible-1 whatever the scores; the others are scored to row_end.

    Source: SGLang 0.5.23 V/indexer.py:709-712, the flat route of V4.
    """
    return torch.where(row_end - row_start <= k, row_start, row_end)


def compressed_slots(*, token_slots: Tensor, seq_lens: Tensor, ratio: int = 1) -> Tensor:
    """The slot of every key column of a batch, request after request; int64 [sum seq // ratio].

    Column j of a request stands where its first token does: token_slots[j * ratio] // ratio.

    Args:
        token_slots: the slot of each token, int [B, tokens].
        seq_lens: tokens of each request, int [B].
        ratio: tokens a key column stands for.

    Source: SGLang 0.5.23 V41/scoring.py:178-198 `prefill_k_slots`.
    """
    columns = (seq_lens // ratio).long()
    owner = torch.arange(len(columns), device=columns.device).repeat_interleave(columns)
    first = columns.cumsum(0) - columns
    column = torch.arange(len(owner), device=owner.device) - first[owner]
    return token_slots[owner, column * ratio].long() // ratio


def qsa_visible_blocks(*, positions: Tensor, seq_lens: Tensor, block_size: int = 4) -> Tensor:
    """Whole blocks a QSA row may pick, int32 [T]: max(0, min((pos + 1) // 4, seq_len // 4)).

    Args:
        positions: token positions, int [T], -1 for padding.
        seq_lens: length of each row's request, int [T].
        block_size: tokens a block.
    """
    seen = compressed_lengths(positions=positions, ratio=block_size)
    return torch.minimum(seen, (seq_lens // block_size).to(torch.int32)).clamp_min(0)


@dataclass(frozen=True, kw_only=True)
class PlanStyle:
    """How one engine counts the scores of a chunk of rows.

    Attributes:
        element_bytes: bytes a score is counted as, whatever its dtype.
        width_multiple: columns are rounded up to this before they are counted; 1 leaves the
            padding of a row out.
        least_width: columns counted at least.
        row_quantum: rows of a chunk are floored to a multiple, never below one.
        quantum_heads: query heads of one quantum, where it follows the heads of a row: of H
            heads it is quantum_heads // H rows, at least one. 0 where it does not.
        unsplit_below: a launch of fewer scores is one chunk, whatever the budget.
        budget_bytes: the default budget; None where it is a share of free memory, so that a
            record must keep the one really used.
    """

    element_bytes: int = 4
    width_multiple: int = 1
    least_width: int = 0
    row_quantum: int = 1
    quantum_heads: int = 0
    unsplit_below: int = 0
    budget_bytes: int | None = None


PLAN_STYLES: Final[Mapping[str, PlanStyle]] = MappingProxyType(
    {
        # SGLang 0.5.23 dsa_indexer.py:1624-1626 and mqa_logits_utils.py:71-91
        "dsa": PlanStyle(unsplit_below=8_000_000),
        # SGLang 0.5.23 dsv4/index_logits.py:54; 4 rows are the quantum of 32 heads
        "v4.1": PlanStyle(
            width_multiple=256, row_quantum=4, quantum_heads=128, budget_bytes=2 << 30
        ),
        # vLLM 0.33.0 v1/attention/backends/mla/indexer.py:1359-1413
        "vllm": PlanStyle(budget_bytes=512 << 20),
        # vLLM 0.33.0 qwen4_exp qsa_select_paged_prefill:579-652
        "qsa": PlanStyle(width_multiple=64, least_width=64, budget_bytes=512 << 20),
    }
)


def plan_width(*, columns: int, style: PlanStyle, widest: int | None = None) -> int:
    """Columns a row is counted as; `widest` is the width of the page table, where that caps it."""
    steps = -(-columns // style.width_multiple)
    width = max(style.least_width, steps * style.width_multiple)
    return width if widest is None else min(width, widest)


def chunk_plan(
    *,
    rows: int,
    columns: int,
    style: PlanStyle,
    budget_bytes: int | None = None,
    widest: int | None = None,
    heads: int | None = None,
) -> list[tuple[int, int]]:
    """Half-open row ranges, in order, that an engine scores one after another.

    Columns are never cut and a chunk holds at least one row, so one chunk may exceed the
    budget. What fits is one chunk.

    Args:
        rows: query rows of the launch.
        columns: key columns of its widest row. Engines that narrow a later chunk to its own
            rows still plan by this.
        style: the engine, as in `PLAN_STYLES`.
        budget_bytes: bytes of scores a chunk may take; the style's own when None.
        widest: width of the page table, for a style that pads up to it.
        heads: query heads of a row, for a style whose quantum follows them; its row_quantum
            when None.

    Raises:
        ValueError: when neither the call nor the style has a budget.
    """
    budget = style.budget_bytes if budget_bytes is None else budget_bytes
    if budget is None:
        raise ValueError("this style has no budget of its own: give the budget_bytes it ran with")
    quantum = style.row_quantum
    if heads is not None and style.quantum_heads:
        quantum = max(1, style.quantum_heads // heads)
    row_bytes = style.element_bytes * plan_width(columns=columns, style=style, widest=widest)
    launched = -(-rows // quantum) * quantum
    if rows * columns < style.unsplit_below or launched * row_bytes <= budget:
        step = rows
    else:
        step = max(quantum, budget // row_bytes // quantum * quantum)
    return [(start, min(start + step, rows)) for start in range(0, rows, max(1, step))]
