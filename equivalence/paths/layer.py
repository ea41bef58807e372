"""One call of prefill_indexer, and the steps every dense path takes: score, keep, pick, translate.

A step works on a slice of rows and writes into outputs of all rows. Of a source layer picking is
publishing too; a consumer picks inside its mask.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equivalence.errors import UsageError
from equivalence.paths import masked, parts
from equivalence.paths.call import read
from equivalence.paths.parts import Logits, Scorer, Selector
from equivalence.wording import form
from refimpl import blocks, forms, pages

_CELLS = 1 << 19


@dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """One call of the op prefill_indexer.

    Attributes:
        q: e4m3 [T, H, D].
        k: e4m3 [L, D], the keys of all requests one after another.
        k_scale: fp32 [L].
        weights: fp32 [T, H].
        row_start: int32 [T], a row's first column.
        row_end: int32 [T], one past its last; a backward window is empty.
        topk: picks a row.
        columns: of kept logits, "absolute" or "row-relative".
        width: cells of a row of kept logits; L where it is None.
        page_size: keys a page of block_table.
        block_table: int32 [R, pages], gives page_indices of request-local columns.
        row_to_request: int32 [T]; without it row i reads table row i.
        k_slots: int32 or int64 [L], gives page_indices of absolute columns.
        topk_indices_offset: int32 [T], gives ragged_indices.
        mask: bool [T, lc] or uint8 [T, lc / 8], the columns that a consumer may pick.
        block_ids: int32 [T, n], the same as blocks.
        topk_blocks: blocks that a row of a source layer publishes; None publishes nothing.
        rows: int32 [P], ascending, the rows that are published; all where it is None.
        block_size: columns a block.
    """

    q: Tensor
    k: Tensor
    k_scale: Tensor
    weights: Tensor
    row_start: Tensor
    row_end: Tensor
    topk: int
    columns: str = "absolute"
    width: int | None = None
    page_size: int = 64
    block_table: Tensor | None = None
    row_to_request: Tensor | None = None
    k_slots: Tensor | None = None
    topk_indices_offset: Tensor | None = None
    mask: Tensor | None = None
    block_ids: Tensor | None = None
    topk_blocks: int | None = None
    rows: Tensor | None = None
    block_size: int = blocks.BLOCK

    @property
    def inside(self) -> Tensor | None:
        """The mask that a consumer picks inside, in whatever form."""
        return self.block_ids if self.mask is None else self.mask

    def visible(self, rows: slice) -> Tensor:
        """Columns that each of these rows sees, int32."""
        end = self.row_end[rows].clamp(max=len(self.k))
        return (end - self.row_start[rows]).clamp(min=0)


def layer_of(call: Mapping[str, Any], path: Callable[..., Any]) -> Layer:
    """The call of a path as a Layer, without the path's own settings.

    Raises:
        UsageError: an input is missing or unknown, or a parameter is out of range.
    """
    layer = read(Layer, call, path, op="prefill_indexer")
    check_whole("topk", layer.topk)
    if layer.columns not in {"absolute", "row-relative"}:
        raise UsageError(f"columns is {layer.columns!r}: it is 'absolute' or 'row-relative'")
    _check_masks(layer)
    return layer


def _check_masks(layer: Layer) -> None:
    check_whole("block_size", layer.block_size)
    one_of = ("mask", "block_ids", "topk_blocks")
    given = [name for name in one_of if getattr(layer, name) is not None]
    if len(given) > 1:
        raise UsageError(
            f"the layer has {' and '.join(given)}: it picks inside one mask or publishes one"
        )
    if layer.topk_blocks is not None:
        check_whole("topk_blocks", layer.topk_blocks)
    elif layer.rows is not None:
        raise UsageError("rows are published rows: they take topk_blocks")
    if layer.rows is not None and len(layer.rows) and int(layer.rows.max()) >= len(layer.q):
        raise UsageError(f"rows publish row {int(layer.rows.max())}: q has {len(layer.q)} rows")
    if layer.inside is not None and len(layer.inside) != len(layer.q):
        raise UsageError(f"{given[0]} has {len(layer.inside)} rows: q has {len(layer.q)}")


def allocate(layer: Layer, *, keep_logits: bool) -> dict[str, Tensor]:
    """Unwritten outputs of the call: the selected buffer, one of each form it has, and a mask.

    Raises:
        UsageError: logits are kept in rows that are narrower than a window.
    """
    rows, outputs = len(layer.q), {}
    if keep_logits:
        width = len(layer.k) if layer.width is None else layer.width
        past = layer.visible(slice(None))
        if layer.columns == "absolute":
            past = torch.where(past > 0, layer.row_start + past, 0)
        if layer.width is not None and rows and int(past.max()) > width:
            raise UsageError(
                f"width is {width}: the {layer.columns} windows need {int(past.max())} cells"
            )
        outputs["logits"] = layer.weights.new_empty((rows, width))
    outputs["raw_indices"] = layer.row_start.new_empty((rows, layer.topk))
    if layer.topk_indices_offset is not None:
        outputs["ragged_indices"] = torch.empty_like(outputs["raw_indices"])
    if layer.block_table is not None or layer.k_slots is not None:
        outputs["page_indices"] = torch.empty_like(outputs["raw_indices"])
    if layer.topk_blocks is not None:
        visible = layer.visible(slice(None))
        visible = visible if layer.rows is None else visible[layer.rows.long()]
        shape = len(visible), forms.aligned(visible=visible)
        outputs["mask"] = visible.new_empty(shape, dtype=torch.bool)
    return outputs


def score(layer: Layer, rows: slice, scorer: str | Scorer) -> Logits:
    """The scores of these rows.

    Raises:
        UsageError: no scorer has that name, or it returned something else.
    """
    got = parts.scorer(scorer)(
        q=layer.q[rows],
        k=layer.k,
        k_scale=layer.k_scale,
        weights=layer.weights[rows],
        row_start=layer.row_start[rows],
        row_end=layer.row_end[rows],
    )
    where = f"scorer {parts.name_of(scorer)}, rows {rows.start}-{rows.stop}"
    if not isinstance(got, Logits):
        raise UsageError(f"{where}: it returned {type(got).__name__}, it returns Logits")
    count = rows.stop - rows.start
    least = _least_width(layer, rows, got)
    values, column = got.values, got.column
    fits = values.dim() == 2 and len(values) == count and values.shape[1] >= least  # noqa: PLR2004 - a matrix
    if not fits or values.dtype is not torch.float32:
        want = f"want float32 [{count}, {least} or more]"
        raise UsageError(f"{where}: values: {want}, got {form(values)}")
    if column.dtype is not torch.int32 or column.shape != (count,):
        raise UsageError(f"{where}: column: want int32 [{count}], got {form(column)}")
    return got


def keep(layer: Layer, rows: slice, logits: Logits, outputs: dict[str, Tensor]) -> None:
    """Copy the windows of these rows to the kept logits, where they are kept."""
    if "logits" not in outputs:
        return
    kept = outputs["logits"][rows]
    width, start, count = kept.shape[1], layer.row_start[rows], layer.visible(rows)
    base = start if layer.columns == "absolute" else torch.zeros_like(start)
    if not logits.values.shape[1]:
        kept.fill_(-torch.inf)
        return
    step = max(1, _CELLS // max(1, width))
    for r in range(0, len(kept), step):
        some = slice(r, r + step)
        cell = torch.arange(width, device=kept.device) - base[some, None]
        inside = (cell >= 0) & (cell < count[some, None])
        at = torch.where(inside, cell + logits.column[some, None], 0)
        kept[some] = torch.where(inside, logits.values[some].gather(1, at), -torch.inf)


def select(
    layer: Layer,
    rows: slice,
    logits: Logits,
    selector: str | Selector,
    outputs: dict[str, Tensor],
) -> None:
    """Pick for these rows, publish their mask, and translate the picks with the rows' own metadata.

    A consumer's mask is applied to the scores in place, and a pick at -inf becomes a pad.
    """
    visible = layer.visible(rows)
    raw = outputs["raw_indices"][rows]
    if "mask" in outputs:
        _publish(layer, rows, logits, outputs["mask"])
    inside = None if layer.inside is None else layer.inside[rows]
    if inside is not None:
        masked.apply(logits, inside, visible=visible, block_size=layer.block_size)
    parts.selector(selector)(scores=logits.values, column=logits.column, visible=visible, out=raw)
    if inside is not None:
        masked.pad(logits, raw, visible=visible)
    if layer.topk_indices_offset is not None:
        outputs["ragged_indices"][rows] = pages.offset_indices(
            raw_indices=raw, topk_indices_offset=layer.topk_indices_offset[rows]
        )
    if layer.block_table is not None:
        table, request = layer.block_table, layer.row_to_request
        # A row that sees nothing may name any request.
        outputs["page_indices"][rows] = pages.translate_pages(
            raw_indices=raw,
            page_table=table[rows] if request is None else table,
            page_size=layer.page_size,
            row_to_request=None if request is None else torch.where(visible > 0, request[rows], 0),
        )
    elif layer.k_slots is not None:
        slots = layer.k_slots if len(layer.k_slots) else layer.k_slots.new_zeros(1)
        outputs["page_indices"][rows] = pages.map_slots(
            raw_indices=raw, row_start=layer.row_start[rows], slot_map=slots
        )


def _publish(layer: Layer, rows: slice, logits: Logits, out: Tensor) -> None:
    """Write the mask of those of these rows that are published, into bool [P, lc]."""
    first, last = rows.start, rows.stop
    own = torch.arange(first, last, device=out.device)
    if layer.rows is not None:
        first, last = torch.searchsorted(layer.rows.long(), own.new_tensor([first, last])).tolist()
        own = layer.rows[first:last].long()
    masked.publish(
        logits,
        own - rows.start,
        visible=layer.visible(rows),
        topk_blocks=layer.topk_blocks or 0,
        block_size=layer.block_size,
        out=out[first:last],
    )


def _least_width(layer: Layer, rows: slice, logits: Logits) -> int:
    """Columns that the scores need; read from the device only where there are fewer than keys."""
    if logits.values.dim() and logits.values.shape[-1] >= len(layer.k):
        return len(layer.k)
    visible = layer.visible(rows)
    if logits.column.shape != visible.shape:
        return 0
    return int(torch.where(visible > 0, logits.column + visible, 0).max())


def check_whole(name: str, value: object) -> None:
    """Refuse what is no whole number above 0.

    Raises:
        UsageError: it is none.
    """
    if type(value) is not int or value < 1:
        raise UsageError(f"{name} is {value!r}: it is a whole number, 1 or more")
