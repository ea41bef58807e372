"""The dense prefill indexer both ways: one call for all rows, and row chunks under a byte budget.

Both score, pick and translate with the same parts, so what differs between them is the cut alone;
and of a source layer where its mask is written, see `masks.pieces` and `layer.publish`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias, get_args

from torch import Tensor

from equivalence.errors import UsageError
from equivalence.paths import masks, parts
from equivalence.paths.layer import Layer, allocate, check_whole, keep, layer_of, score, select
from equivalence.paths.parts import Logits, Scorer, Selector
from refimpl.geometry import PLAN_STYLES, chunk_plan

Observe: TypeAlias = Callable[[slice, Logits], None]
"""Told the rows of a chunk and their scores, before anything is picked from them."""
Way: TypeAlias = Literal["original", "chunked", "pipelined"]


def original(
    *,
    scorer: str | Scorer = "reference",
    selector: str | Selector = "reference",
    keep_logits: bool = False,
    observe: Observe | None = None,
    **call: Any,  # noqa: ANN401 - the inputs and parameters of prefill_indexer
) -> dict[str, Tensor]:
    """Score all rows in one call, then pick; a mask is published in pieces, then concatenated.

    Args:
        scorer: a name in `parts.SCORERS`, or a function like them.
        selector: a name in `parts.SELECTORS`, or a function like them.
        keep_logits: return the logits too.
        observe: told the scores.
        call: the fields of `Layer`.

    Returns:
        raw_indices int32 [T, topk], and page_indices and ragged_indices where the inputs lead to
        them; of a source layer mask bool [T, lc], of the rows that nobody asks for too.
        With keep_logits also logits fp32 [T, width], -inf outside the windows, before any mask.

    Raises:
        UsageError: an input is missing or unknown, topk is below 1, a part has no such name, or
            the scorer returned something else than scores of its rows.
    """
    layer = layer_of(call, original)
    cut = [slice(0, len(layer.q))] if len(layer.q) else []
    made = {} if cut else allocate(layer, keep_logits=keep_logits)

    def told(rows: slice, logits: Logits) -> None:
        if observe is not None:
            observe(rows, logits)
        if layer.topk_blocks is not None:
            made.update(_in_pieces(layer, logits))

    outputs = _run(
        replace(layer, topk_blocks=None, rows=None),
        cut,
        scorer=scorer,
        selector=selector,
        keep_logits=keep_logits,
        observe=told,
    )
    return outputs | made


def chunked(
    *,
    style: str = "v4.1",
    budget_bytes: int | None = None,
    scorer: str | Scorer = "reference",
    selector: str | Selector = "reference",
    keep_logits: bool = False,
    observe: Observe | None = None,
    **call: Any,  # noqa: ANN401 - the inputs and parameters of prefill_indexer
) -> dict[str, Tensor]:
    """Score and pick one row chunk after another, into one shared selected buffer.

    A chunk is scored against all columns, and its scores are gone before the next one's come.
    What fits the budget is one chunk.

    Args:
        style: how the engine cuts, a name in `geometry.PLAN_STYLES`.
        budget_bytes: of the scores of a chunk; the style's own when None.
        scorer: as in `original`.
        selector: as in `original`.
        keep_logits: as in `original`.
        observe: told the scores of each chunk.
        call: the fields of `Layer`.

    Returns:
        As `original`, but the mask is of the rows that are published alone, bool [P, lc].

    Raises:
        UsageError: as `original`, and for an unknown style or a budget that is none.
    """
    layer = layer_of(call, chunked)
    cut = row_chunks(
        rows=len(layer.q),
        columns=len(layer.k),
        heads=layer.q.shape[1],
        style=style,
        budget_bytes=budget_bytes,
    )
    return _run(
        layer, cut, scorer=scorer, selector=selector, keep_logits=keep_logits, observe=observe
    )


def row_chunks(
    *,
    rows: int,
    columns: int,
    heads: int,
    style: str = "v4.1",
    budget_bytes: int | None = None,
    alive: int = 1,
) -> list[slice]:
    """The row chunks of a call, in order; `alive` of them share the budget.

    Raises:
        UsageError: the style is unknown or has no budget of its own and none is given, or the
            budget is no positive whole number.
    """
    if style not in PLAN_STYLES:
        raise UsageError(f"no plan style named {style!r}: one of {', '.join(PLAN_STYLES)}")
    plan = PLAN_STYLES[style]
    budget = plan.budget_bytes if budget_bytes is None else budget_bytes
    if budget is None:
        raise UsageError(f"style {style} has no budget of its own: give budget_bytes")
    check_whole("budget_bytes", budget)
    cut = chunk_plan(
        rows=rows, columns=columns, style=plan, budget_bytes=budget // alive, heads=heads
    )
    return [slice(first, end) for first, end in cut]


def peak_bytes(
    *,
    rows: int,
    columns: int,
    heads: int,
    way: Way = "chunked",
    style: str = "v4.1",
    budget_bytes: int | None = None,
    scorer: str = "reference",
) -> int:
    """Bytes of the scores that are alive at once, as the scorer lays them out in memory.

    The original holds all rows, `chunked` its largest chunk, `pipelined` its largest two
    neighbours. Not counted: the outputs, kept logits, and what the parts take beside their result
    (`parts.SCRATCH_BYTES` at most for those of `parts`), nor the pieces of the original's mask,
    which are as many bytes as the mask (`masks.peak_bytes`).

    Args:
        rows: query rows of the call.
        columns: keys of the call.
        heads: query heads of a row.
        way: the path.
        style: as in `chunked`; the original has none.
        budget_bytes: as in `chunked`.
        scorer: a name; `parts.STORAGES` has those that pad.

    Raises:
        UsageError: as `row_chunks`, and for a way there is none of.
    """
    if way not in get_args(Way):
        raise UsageError(f"no way named {way!r}: one of {', '.join(get_args(Way))}")
    alive = 2 if way == "pipelined" else 1
    cut = [slice(0, rows)]
    if way != "original":
        cut = row_chunks(
            rows=rows,
            columns=columns,
            heads=heads,
            style=style,
            budget_bytes=budget_bytes,
            alive=alive,
        )
    storage = parts.STORAGES.get(scorer, parts.Storage())
    each = [storage.cells(rows=c.stop - c.start, columns=columns, heads=heads) for c in cut]
    return 4 * max((sum(each[i : i + alive]) for i in range(len(each))), default=0)


def _in_pieces(layer: Layer, logits: Logits) -> dict[str, Tensor]:
    """The mask of all rows as publish_mask gives it."""
    return masks.pieces(
        scores=logits.values,
        row_start=logits.column,
        row_end=logits.column + layer.visible(slice(None)),
        topk_blocks=layer.topk_blocks,
        block_size=layer.block_size,
    )


def _run(
    layer: Layer,
    cut: Sequence[slice],
    *,
    scorer: str | Scorer,
    selector: str | Selector,
    keep_logits: bool,
    observe: Observe | None,
) -> dict[str, Tensor]:
    outputs = allocate(layer, keep_logits=keep_logits)
    for rows in cut:
        logits = score(layer, rows, scorer)
        keep(layer, rows, logits, outputs)
        if observe is not None:
            observe(rows, logits)
        select(layer, rows, logits, selector, outputs)
        # Else the scores of two chunks are alive while the next is scored.
        del logits
    return outputs
