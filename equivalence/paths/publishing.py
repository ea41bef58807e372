"""One call of publish_mask, and the step that every way to publish takes: choose, then write."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from equivalence.errors import UsageError
from equivalence.paths.call import read
from equivalence.paths.layer import check_whole
from refimpl import blocks, forms


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """One call of the op publish_mask.

    Attributes:
        scores: [T, L] fp32, bf16 or fp16.
        row_start: int32 [T].
        row_end: int32 [T].
        topk_blocks: blocks a row publishes at most.
        block_size: columns a block.
        rows: int32 [P], the rows that are published; all where it is None.
    """

    scores: Tensor
    row_start: Tensor
    row_end: Tensor
    topk_blocks: int
    block_size: int = blocks.BLOCK
    rows: Tensor | None = None

    def visible(self, rows: Tensor) -> Tensor:
        """Columns that each of these rows sees, int32 [n]."""
        start, end = self.row_start[rows], self.row_end[rows]
        return blocks.visible_of(row_start=start, row_end=end, columns=self.scores.shape[1])

    @property
    def every(self) -> Tensor:
        """The number of every row, int64 [T]."""
        return torch.arange(len(self.scores), device=self.scores.device)

    @property
    def published(self) -> Tensor:
        """The numbers of the rows that are published, int64 [P]."""
        return self.every if self.rows is None else self.rows.long()


Keeper: TypeAlias = Callable[[Call, Tensor], Tensor]
"""f(call, rows int64 [n]) -> the blocks that these rows keep, bool [n, B]"""


def reference_blocks(call: Call, rows: Tensor) -> Tensor:
    """The strict choice: the best blocks, the lowest of tied ones, and always the newest."""
    best = blocks.block_scores(
        scores=call.scores[rows],
        row_start=call.row_start[rows],
        row_end=call.row_end[rows],
        block_size=call.block_size,
    )
    counts = blocks.block_counts(visible=call.visible(rows), block_size=call.block_size)
    return blocks.kept_blocks(block_scores=best, blocks=counts, topk_blocks=call.topk_blocks)


def torch_blocks(call: Call, rows: Tensor) -> Tensor:
    """`amax` over blocks, the newest at +inf, then `torch.topk`: tied blocks as it likes.

    Its contract is ties=any and short_rows=any; -0 and +0 are alike, and a NaN block is lost.

    Source: SGLang 0.5.23 dsv4/candidate_blocks.py:162-182 `select_candidate_block_ids`.
    """
    visible, size = call.visible(rows), call.block_size
    counts = blocks.block_counts(visible=visible, block_size=size)
    many = int(counts.max()) if len(counts) else 0
    column = torch.arange(many * size, device=visible.device)
    at = (call.row_start[rows, None] + column).clamp(0, max(0, call.scores.shape[1] - 1))
    cells = call.scores[rows].gather(1, at)
    cells = cells.masked_fill(column >= visible[:, None], -torch.inf)
    best = cells.view(len(cells), many, size).amax(2)
    newest = torch.arange(many, device=visible.device) == counts[:, None] - 1
    best = best.masked_fill(newest, torch.inf)
    top = best.topk(min(call.topk_blocks, many), dim=1)
    kept = torch.zeros_like(best, dtype=torch.bool)
    return kept.scatter_(1, top.indices, top.values > -torch.inf)


KEEPERS: Mapping[str, Keeper] = MappingProxyType(
    {"reference": reference_blocks, "torch": torch_blocks}
)


def call_of(call: Mapping[str, Any], path: Callable[..., Any]) -> Call:
    """The call of a path, without the path's own settings.

    Raises:
        UsageError: an input is missing or unknown, or topk_blocks or block_size is below 1.
    """
    given = read(Call, call, path, op="publish_mask")
    check_whole("topk_blocks", given.topk_blocks)
    check_whole("block_size", given.block_size)
    return given


def publish(
    call: Call,
    rows: Tensor,
    form: forms.Form,
    keeper: str | Keeper,
    *,
    columns: int | None = None,
) -> Tensor:
    """The mask of these rows, in row blocks straight into the tensor that is given back."""
    keep = named(keeper, KEEPERS, "keeper")
    visible = call.visible(rows)
    wide = forms.aligned(visible=visible) if columns is None else columns
    counts = blocks.block_counts(visible=visible, block_size=call.block_size)
    ids = min(call.topk_blocks, int(counts.max())) if len(counts) else 0
    out = forms.empty(form=form, rows=len(rows), columns=wide, ids=ids, device=rows.device)
    for part in blocks.row_blocks(len(rows), call.scores.shape[1]):
        forms.write_blocks(
            out[part],
            keep(call, rows[part]),
            visible=visible[part],
            columns=wide,
            form=form,
            block_size=call.block_size,
        )
    return out


def named(part: Any, table: Mapping[str, Any], kind: str) -> Any:  # noqa: ANN401 - a function
    """The function of this name, or the function itself.

    Raises:
        UsageError: none has that name.
    """
    if isinstance(part, str) and part not in table:
        raise UsageError(f"no {kind} named {part!r}: one of {', '.join(table)}")
    return table[part] if isinstance(part, str) else part
