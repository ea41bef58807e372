"""The index plan of a ragged batch: windows, offsets, descriptors and slot spans, as integers.

Everything a layer asks of the batch's lengths and page tables. Engines built it layer by layer,
request by request (`per_layer`), then once a batch, all at once (`build`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TypeAlias

import torch
from torch import Tensor

from equivalence.errors import UsageError
from equivalence.paths.layer import check_whole
from refimpl.geometry import ragged_windows


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """What a scheduler says of a prefill batch.

    Attributes:
        extend_lens: int32 [B], new tokens of each request.
        seq_lens: int32 [B], all its tokens.
        page_table: int32 [B, pages], its physical pages; entries past the needed ones are dead.
        page_size: keys a page.
        ratio: tokens a key stands for.
    """

    extend_lens: Tensor
    seq_lens: Tensor
    page_table: Tensor
    page_size: int = 64
    ratio: int = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """What every layer of a batch indexes with; no tensor shares memory with the batch.

    Attributes:
        row_start: int32 [T], the first column of a row's window.
        row_end: int32 [T], one past its last.
        row_to_request: int32 [T].
        topk_indices_offset: int32 [T], where the row's request begins in a gathered KV whose
            requests are whole pages.
        windows: int32 [B, 4], of each request: first row, rows, first column, columns.
        slot_spans: int64 [S, 3], of each page in use: first column, first slot, keys.
        span_bounds: int32 [B + 1], the first span of each request, and their number.
    """

    row_start: Tensor
    row_end: Tensor
    row_to_request: Tensor
    topk_indices_offset: Tensor
    windows: Tensor
    slot_spans: Tensor
    span_bounds: Tensor

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Every tensor by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


Planner: TypeAlias = Callable[[Batch], Plan]


def build(batch: Batch) -> Plan:
    """Plan a batch with a few calls over all its rows and pages at once.

    Raises:
        UsageError: the lengths do not pair up, or a request needs more pages than its table has.
    """
    check(batch)
    start, end, owner = ragged_windows(
        extend_lens=batch.extend_lens, seq_lens=batch.seq_lens, ratio=batch.ratio
    )
    extend, columns = batch.extend_lens.long(), batch.seq_lens.long() // batch.ratio
    pages = -(-columns // batch.page_size)
    bounds = torch.cat([pages.new_zeros(1), pages.cumsum(0)])
    request = torch.arange(len(pages), device=pages.device).repeat_interleave(pages)
    page = torch.arange(len(request), device=pages.device) - bounds[request]
    first = columns.cumsum(0) - columns
    slots = batch.page_table[request, page].long() * batch.page_size
    keys = (columns[request] - page * batch.page_size).clamp(max=batch.page_size)
    descriptors = [extend.cumsum(0) - extend, extend, first, columns]
    return Plan(
        row_start=start,
        row_end=end,
        row_to_request=owner,
        topk_indices_offset=(bounds[owner.long()] * batch.page_size).int(),
        windows=torch.stack(descriptors, dim=1).int(),
        slot_spans=torch.stack([first[request] + page * batch.page_size, slots, keys], dim=1),
        span_bounds=bounds.int(),
    )


def per_layer(batch: Batch) -> Plan:
    """The same plan request by request, as layers built it for themselves; raises as `build`."""
    check(batch)
    rows: list[list[int]] = []
    windows, spans, bounds = [], [], [0]
    first_row = first_column = offset = 0
    lengths = zip(batch.extend_lens.tolist(), batch.seq_lens.tolist(), strict=True)
    for request, (extend, seq) in enumerate(lengths):
        columns = seq // batch.ratio
        for position in range(seq - extend, seq):
            seen = (position + 1) // batch.ratio
            rows.append([first_column, first_column + seen, request, offset])
        windows.append([first_row, extend, first_column, columns])
        table = batch.page_table[request].tolist()
        for begin in range(0, columns, batch.page_size):
            slot = table[begin // batch.page_size] * batch.page_size
            spans.append([first_column + begin, slot, min(batch.page_size, columns - begin)])
        bounds.append(len(spans))
        first_row, first_column = first_row + extend, first_column + columns
        offset = len(spans) * batch.page_size
    device = batch.seq_lens.device
    by_row = torch.tensor(rows, dtype=torch.int32, device=device).reshape(-1, 4).t().contiguous()
    return Plan(
        row_start=by_row[0],
        row_end=by_row[1],
        row_to_request=by_row[2],
        topk_indices_offset=by_row[3],
        windows=torch.tensor(windows, dtype=torch.int32, device=device).reshape(-1, 4),
        slot_spans=torch.tensor(spans, dtype=torch.int64, device=device).reshape(-1, 3),
        span_bounds=torch.tensor(bounds, dtype=torch.int32, device=device),
    )


def check(batch: Batch) -> None:
    """Refuse lengths that do not pair up, or a page table that is too narrow.

    Raises:
        UsageError: in one sentence, with both values.
    """
    check_whole("page_size", batch.page_size)
    check_whole("ratio", batch.ratio)
    extend, total, table = batch.extend_lens, batch.seq_lens, batch.page_table
    if extend.dim() != 1 or extend.shape != total.shape or table.shape[:-1] != total.shape:
        raise UsageError(
            f"extend_lens {list(extend.shape)}, seq_lens {list(total.shape)} and page_table"
            f" {list(table.shape)} are not of one batch"
        )
    wrong = ((extend < 0) | (extend > total)).nonzero().flatten().tolist()
    if wrong:
        at = wrong[0]
        raise UsageError(f"request {at} extends by {int(extend[at])} of {int(total[at])} tokens")
    needed = -(-(total.long() // batch.ratio) // batch.page_size)
    short = (needed > table.shape[1]).nonzero().flatten().tolist()
    if short:
        at = short[0]
        raise UsageError(
            f"request {at} needs {int(needed[at])} pages of {batch.page_size} keys;"
            f" its table has {table.shape[1]}"
        )
