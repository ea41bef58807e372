"""A right mask and all that an edit of it may look at: scores, windows and blocks."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equivalence.case import Case
from equivalence.planted.plants import seeded
from refimpl import blocks, forms

_BYTE = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class Right:
    """A right mask and what it was published from; P rows.

    Attributes:
        mask: bool [P, lc], packed uint8 [P, lc / 8] or block ids int32 [P, n].
        form: of the mask.
        scores: [T, L] of all rows.
        start: int32 [P], first column of each row.
        visible: int32 [P], columns it sees.
        rows: int64 [P], its number in the call.
        topk_blocks: blocks a row publishes at most.
        size: columns a block.
        seed: of what an edit chooses.
    """

    mask: Tensor
    form: forms.Form
    scores: Tensor
    start: Tensor
    visible: Tensor
    rows: Tensor
    topk_blocks: int
    size: int
    seed: int

    @property
    def columns(self) -> int:
        """Columns lc of a mask of cells; of ids, the longest row's rounded up to 8."""
        each = {"bool": 1, "packed": _BYTE}.get(self.form, 0)
        return self.mask.shape[1] * each or forms.aligned(visible=self.visible)

    @property
    def counts(self) -> Tensor:
        """Blocks of each row, int32 [P]."""
        return blocks.block_counts(visible=self.visible, block_size=self.size)

    @property
    def admitted(self) -> Tensor:
        """Columns that each row admits, bool [P, lc]; False past its window."""
        return forms.read(
            self.mask, visible=self.visible, columns=self.columns, block_size=self.size
        )

    @property
    def kept(self) -> Tensor:
        """Blocks that each row publishes, bool [P, B]."""
        return forms.whole_blocks(self.admitted, visible=self.visible, block_size=self.size)

    @property
    def best(self) -> Tensor:
        """Scores of the blocks, [P, B]."""
        return self.scored(start=self.start, visible=self.visible)

    @property
    def number(self) -> Tensor:
        """0 .. B - 1."""
        return torch.arange(self.kept.shape[1], device=self.mask.device)

    @property
    def newest(self) -> Tensor:
        """Each row's newest block, bool [P, B]."""
        return self.number == self.counts[:, None] - 1

    @property
    def selects(self) -> Tensor:
        """Rows that leave blocks out, bool [P, 1]."""
        return (self.counts > self.topk_blocks)[:, None]

    def scored(self, *, start: Tensor, visible: Tensor, size: int | None = None) -> Tensor:
        """Block scores of other windows of the same rows."""
        return blocks.block_scores(
            scores=self.scores[self.rows],
            row_start=start,
            row_end=start + visible,
            block_size=self.size if size is None else size,
        )

    def choose(self, best: Tensor, **how: Any) -> Tensor:  # noqa: ANN401 - of blocks.kept_blocks
        """The blocks that are kept by other scores, or other counts of blocks or places."""
        given = {"blocks": self.counts, "topk_blocks": self.topk_blocks, **how}
        return blocks.kept_blocks(block_scores=best, **given)

    def cells(self, admitted: Tensor) -> Tensor:
        """Columns bool [P, lc] as a mask of this form, dead ones too."""
        out = torch.zeros_like(self.mask)
        forms.write(out, admitted, visible=self.visible, form=self.form)
        return out

    def render(self, kept: Tensor) -> Tensor:
        """Blocks bool [P, B] as a mask of this form."""
        ids = max(self.mask.shape[1], int(kept.sum(1).max())) if len(kept) else 0
        out = forms.empty(
            form=self.form, rows=len(kept), columns=self.columns, ids=ids, device=kept.device
        )
        columns, size = self.columns, self.size
        forms.write_blocks(
            out, kept, visible=self.visible, columns=columns, form=self.form, block_size=size
        )
        return out

    def row(self, able: Tensor) -> int | None:
        """The first row in the seed's order of those that are able, bool [P]."""
        return next((row for row in seeded(len(able), self.seed) if bool(able[row])), None)


def right_of(case: Case, mask: Tensor, *, seed: int = 0) -> Right:
    """A right mask of the rows that a case declares, as its edits take it."""
    start, end = case.inputs["row_start"], case.inputs["row_end"]
    scores, declared = case.inputs["scores"], case.inputs.get("rows")
    rows = torch.arange(len(scores), device=scores.device) if declared is None else declared.long()
    topk_blocks, size = case.params["topk_blocks"], case.params.get("block_size", blocks.BLOCK)
    assert isinstance(topk_blocks, int)  # noqa: S101 - a case's own parameter
    assert isinstance(size, int)  # noqa: S101 - a case's own parameter
    visible = blocks.visible_of(row_start=start, row_end=end, columns=scores.shape[1])
    held: dict[torch.dtype, forms.Form] = {torch.bool: "bool", torch.uint8: "packed"}
    ids: forms.Form = "ascending" if bool((mask == forms.FAR_PAD).any()) else "unordered"
    return Right(
        mask=mask,
        form=held.get(mask.dtype, ids),
        scores=scores,
        start=start[rows],
        visible=visible[rows],
        rows=rows,
        topk_blocks=topk_blocks,
        size=size,
        seed=seed,
    )
