"""QSA prefill selection in a bounded reused workspace, beside a fresh tensor for every chunk."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from equivalence.errors import UsageError
from equivalence.paths import parts, waves
from equivalence.paths.parts import Selector
from equivalence.paths.waves import Order, Way
from equivalence.paths.workspace import Workspace, own_tensors, views_of
from refimpl import fast, scoring
from refimpl.qsa import BLOCK_TOKENS, expand_blocks

Scorer: TypeAlias = Callable[..., None]
"""f(*, q, k_cache, page_table, visible_blocks, query_start_loc, page_size, out) -> None

It writes `out[i, :visible_blocks[i]]` of fp32 [n, width], and nothing else.
"""
Expander: TypeAlias = Callable[..., Tensor]
"""f(*, block_ids, positions, visible_blocks, block_size) -> packed, see `refimpl.qsa`"""


def fresh(**call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - what `layer` takes
    """A candidate of qsa_logits or qsa_indexer, see `layer`: chunks have tensors of their own."""
    return layer(way=own_tensors, **call)


def reused(*, workspaces: Sequence[Workspace] | None = None, **call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - what `layer` takes
    """A candidate of qsa_logits or qsa_indexer, see `layer`: chunks are views of a workspace."""
    return layer(way=views_of(workspaces), **call)


def reference_logits(
    *,
    q: Tensor,
    k_cache: Tensor,
    page_table: Tensor,
    visible_blocks: Tensor,
    query_start_loc: Tensor | None,
    page_size: int,
    out: Tensor,
) -> None:
    """The bits of vLLM's prefill kernel on Hopper; see `scoring.qsa_logits`."""
    values = scoring.qsa_logits(
        q=q,
        k_cache=k_cache,
        page_table=page_table[:, : -(-out.shape[1] // page_size)],
        visible_blocks=visible_blocks,
        query_start_loc=query_start_loc,
        page_size=page_size,
        accumulate=fast.accumulate,
    )
    zero = torch.zeros_like(visible_blocks)
    waves.copy_windows(out=out, to=zero, values=values, column=zero, visible=visible_blocks)


def layer(
    *,
    way: Way,
    q: Tensor,
    k_cache: Tensor,
    page_table: Tensor,
    visible_blocks: Tensor,
    query_start_loc: Tensor | None = None,
    positions: Tensor | None = None,
    page_size: int = 64,
    block_size: int = BLOCK_TOKENS,
    topk: int = 0,
    max_seq_len: int | None = None,
    scorer: Scorer = reference_logits,
    selector: str | Selector = "reference",
    expand: Expander = expand_blocks,
    keep_logits: bool = False,
    budget_bytes: int | None = None,
    micro_batches: int = 1,
    order: Order = waves.alternate,
) -> dict[str, Tensor]:
    """QSA prefill, chunk by chunk: what `scoring.qsa_logits` scores, and `topk` blocks a row.

    Args:
        way: where the chunks go.
        q: bf16 or e4m3 [T, 4, D].
        k_cache: the dtype of q, [pages, page_size, 1, D].
        page_table: int32 [R, table_width].
        visible_blocks: int32 [T].
        query_start_loc: int32 [R + 1], first row of each request; None where R is 1.
        positions: int32 [T] asks for packed rows of the picks.
        page_size: keys a page.
        block_size: tokens a block.
        topk: blocks a row picks; 0 only scores.
        max_seq_len: tokens of the longest request; those of its visible blocks where it is None.
        scorer: writes the visible scores of a view.
        selector: a name in `parts.SELECTORS`, or a function like them.
        expand: makes packed rows of picks.
        keep_logits: whether to return the logits beside picks.
        budget_bytes: as in `workspace.dense`.
        micro_batches: as in `workspace.dense`.
        order: of the chunks.

    Returns:
        raw_indices [T, topk] int32, blocks of the row's request, or with positions block_ids, the
        same, and packed; logits [T, width of the table] fp32, -inf from visible_blocks on, where
        topk is 0 or they are kept.

    Raises:
        UsageError: as `waves.run`, or a row sees more blocks than max_seq_len has, or positions
            are given and no row picks.
    """
    visible, widest = visible_blocks.clamp(min=0), page_table.shape[1] * page_size
    longest = None if max_seq_len is None else -(-max_seq_len // block_size)
    if longest is not None and len(visible) and int(visible.max()) > longest:
        raise UsageError(
            f"max_seq_len {max_seq_len} has {longest} blocks; a row sees {int(visible.max())}"
        )
    if positions is not None and not topk:
        raise UsageError("positions are given and topk is 0: packed rows are made of picks")

    scored, write = keep_logits or not topk, parts.selector(selector)

    def score(rows: slice, view: Tensor) -> None:
        edges = query_start_loc
        if edges is not None:
            edges = edges.clamp(rows.start, rows.stop) - rows.start
        scorer(
            q=q[rows],
            k_cache=k_cache,
            page_table=page_table,
            visible_blocks=visible[rows],
            query_start_loc=edges,
            page_size=page_size,
            out=view,
        )

    kept = visible.new_empty((len(visible), topk))
    logits = torch.full((len(visible), widest if scored else 0), -torch.inf, device=visible.device)
    zero = torch.zeros_like(visible)

    def pick(rows: slice, view: Tensor, scratch: Tensor) -> None:
        mine = {"visible": visible[rows], "column": zero[rows]}
        if scored:
            waves.copy_windows(out=logits[rows], to=zero[rows], values=view, **mine)
        if topk:
            write(scores=view, out=scratch, **mine)
            kept[rows] = scratch

    waves.run(
        way,
        visible=visible,
        widest=widest,
        topk=topk,
        score=score,
        pick=pick,
        longest=longest,
        budget_bytes=budget_bytes,
        micro_batches=micro_batches,
        order=order,
    )
    outputs = {"logits": logits} if scored else {}
    if positions is None:
        return outputs | ({"raw_indices": kept} if topk else {})
    packed = expand(
        block_ids=kept, positions=positions, visible_blocks=visible, block_size=block_size
    )
    return outputs | {"block_ids": kept, "packed": packed}
