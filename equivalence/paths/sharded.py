"""One layer over several ranks, played one after another in one process.

Context parallel gives each rank some query rows, key-sharded decode some keys; what comes out is
gathered or merged by `refimpl.ranks` and is the layer of one rank.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from equivalence.errors import UsageError
from equivalence.paths import tail
from equivalence.paths.layer import check_whole
from refimpl import bits, blocks, fast, forms, layer, pages, scoring
from refimpl import ranks as sharing
from refimpl import topk as selector

Path: TypeAlias = Callable[..., Mapping[str, Tensor]]
"""A candidate of prefill_indexer that returns a mapping."""
_REFERENCE: Path = partial(layer.prefill_indexer, accumulate=fast.accumulate)
_PADS = {torch.int32: -1}


def context_parallel(
    *,
    ranks: int = 4,
    split: sharing.Split = "interleave",
    path: Path = _REFERENCE,
    gather: Callable[..., Tensor] = sharing.gather_rows,
    **call: Any,  # noqa: ANN401 - the inputs and parameters of prefill_indexer
) -> dict[str, Tensor]:
    """A candidate of prefill_indexer: each rank computes its rows, `ranks.gather_rows` joins them.

    Every rank has all keys. Masks of ranks are as wide as their own longest row; the columns that
    they lack are dead.

    Args:
        ranks: how many there are.
        split: how rows are split.
        path: computes the rows of a rank.
        gather: a candidate of gather_rows.
        call: the op's inputs and parameters, and settings of `path`.

    Returns:
        The outputs of `path` for all rows.

    Raises:
        UsageError: there is no rank, or the layer publishes some rows only.
    """
    check_whole("ranks", ranks)
    if call.get("rows") is not None:
        raise UsageError("context_parallel publishes all rows: it takes no 'rows'")
    rows, device = len(call["q"]), call["q"].device
    owned = sharing.split_rows(rows=rows, ranks=ranks, kind=split, device=device)
    told = [path(**_cut(call, mine)) for mine in owned]
    return {
        name: gather(
            shards=_stacked([part[name] for part in told]),
            row_ids=sharing.row_ids(owned),
            rows=rows,
        )
        for name in told[0]
    }


def key_sharded(
    *,
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    topk: int,
    page_size: int = 64,
    mask: Tensor | None = None,
    block_ids: Tensor | None = None,
    block_size: int = blocks.BLOCK,
    ranks: int = 4,
    interleave: int = 1,
    merge: Callable[..., Tensor] = sharing.merge_topk,
    **order: Any,  # noqa: ANN401 - the freedoms of topk.ragged_topk, passed on by name
) -> dict[str, Tensor]:
    """A candidate of decode_indexer: each rank has pages of its own tokens and picks from them.

    A rank scores its tokens, takes its best `topk` and hands picks and scores on to
    `ranks.merge_topk`. A consumer's mask is cut by tokens too.

    Args:
        q: this and the other inputs and parameters are those of the op.
        kv_cache: as above.
        weights: as above.
        context_lens: as above.
        block_table: as above.
        topk: as above.
        page_size: as above.
        mask: as above.
        block_ids: as above.
        block_size: as above.
        ranks: how many there are.
        interleave: tokens that follow one another on a rank.
        merge: a candidate of merge_topk.
        order: how `topk.ragged_topk` orders and breaks ties.

    Returns:
        logits [B * next_n, max_pages * page_size], raw_indices and page_indices.

    Raises:
        UsageError: a setting is below 1, or the layer publishes a mask or pins tokens.
    """
    check_whole("ranks", ranks)
    check_whole("interleave", interleave)
    for name in ("topk_blocks", "init_tokens", "local_tokens", "rows"):
        if order.pop(name, None):
            raise UsageError(f"key_sharded takes no {name!r}: no rank sees every token")
    lens, columns = context_lens.reshape(-1), block_table.shape[1] * page_size
    admitted = _admitted(mask if block_ids is None else block_ids, lens, columns, block_size)
    if admitted is not None:
        order["minus_inf"] = "pad"
    logits = weights.new_full((len(lens), columns), -torch.inf)
    picks, scores = [], []
    for rank in range(ranks):
        how = {"rank": rank, "ranks": ranks, "interleave": interleave}
        count = int(sharing.local_lens(torch.tensor(columns), **how))
        tokens = sharing.global_ids(torch.arange(count, device=q.device), **how)
        length = sharing.local_lens(context_lens, **how).int()
        held, table = _own_pages(
            kv_cache, block_table, tokens, page_size=page_size, head_dim=q.shape[-1]
        )
        cells = scoring.paged_mqa_logits(
            q=q,
            kv_cache=held,
            weights=weights,
            context_lens=length,
            block_table=table,
            page_size=page_size,
            accumulate=fast.accumulate,
        )[:, :count]
        logits[:, tokens] = cells
        if admitted is not None:
            cells = cells.masked_fill(~admitted[:, tokens], -torch.inf)
        # A short row of a rank is none of all ranks.
        best = selector.ragged_topk(
            scores=cells,
            row_start=torch.zeros_like(lens),
            row_end=length.reshape(-1),
            k=topk,
            **{**order, "short_rows": "any", "empty_rows": "pad"},
        )
        picks.append(best)
        scores.append(functional.pad(cells, (0, 1)).gather(1, best.clamp(min=0).long()))
    raw = merge(
        scores=torch.stack(scores),
        picks=torch.stack(picks),
        context_lens=lens,
        k=topk,
        interleave=interleave,
        **order,
    )
    request = torch.arange(len(block_table), device=q.device).repeat_interleave(q.shape[1])
    slots = pages.translate_pages(
        raw_indices=raw, page_table=block_table, page_size=page_size, row_to_request=request
    )
    return {"logits": logits, "raw_indices": raw, "page_indices": slots}


def _cut(call: Mapping[str, Any], rows: Tensor) -> dict[str, Any]:
    """The call with these rows, masks and scoring ends among what is cut."""
    short = tail.cut(call, rows)
    more = (name for name in ("mask", "block_ids", "score_end") if call.get(name) is not None)
    return {**short, **{name: call[name][rows] for name in more}}


def _stacked(shards: list[Tensor]) -> Tensor:
    """Outputs of ranks as [R, n, W]: the shorter and narrower ones are filled up."""
    rows, width = (max(part.shape[d] for part in shards) for d in (0, 1))
    pad = _PADS.get(shards[0].dtype, 0)
    return torch.stack(
        [
            functional.pad(part, (0, width - part.shape[1], 0, rows - part.shape[0]), value=pad)
            for part in shards
        ]
    )


def _admitted(mask: Tensor | None, lens: Tensor, columns: int, block_size: int) -> Tensor | None:
    """The columns that a consumer may pick, bool [T, columns]; None where the layer is none."""
    if mask is None:
        return None
    return forms.read(mask, visible=lens, columns=columns, block_size=block_size)


def _own_pages(
    cache: Tensor, table: Tensor, tokens: Tensor, *, page_size: int, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Pages that hold these tokens of every request one after another, and their table."""
    values, scales = bits.split_planar_pages(cache, head_dim=head_dim, page_size=page_size)
    # What stands in the table past a request's length need not be a page.
    page = table[:, tokens // page_size].long().clamp(0, len(values) - 1)
    at = tokens % page_size
    each = max(1, -(-len(tokens) // page_size))
    spare = each * page_size - len(tokens)
    keys = functional.pad(bits.as_int(values)[page, at], (0, 0, 0, spare))
    own = functional.pad(scales[page, at], (0, spare)).contiguous().view(torch.uint8)
    keys = keys.view(len(table) * each, page_size * head_dim)
    held = torch.cat([keys, own.view(len(keys), page_size * bits.SCALE_BYTES)], dim=1)
    order = torch.arange(len(held), dtype=torch.int32, device=table.device)
    return held, order.view(len(table), each)
