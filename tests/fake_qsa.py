"""The two launchers of vLLM's QSA kernel file, strict about their calls, in refimpl."""

import torch
from torch import Tensor

from refimpl import scoring
from refimpl.qsa import expand_blocks


def prefill_logits(  # noqa: PLR0917 - as vLLM calls it
    q: Tensor,
    k_cache: Tensor,
    page_table: Tensor,
    query_start_loc: Tensor,
    visible_blocks: Tensor,
    logits_workspace: Tensor,
    max_query_len: int,
    logits_width: int,
    query_offset: int,
    num_queries: int,
) -> Tensor:
    """Rows of the step, seen cells alone, at the head of the workspace."""
    assert query_start_loc.dtype is visible_blocks.dtype is torch.int32
    assert query_start_loc.shape == (len(page_table) + 1,)
    assert visible_blocks.shape == (len(q),)
    assert 0 <= query_offset < query_offset + num_queries <= len(q)
    assert 0 < logits_width <= page_table.shape[1] * k_cache.shape[1]
    assert logits_workspace.dim() == 1
    assert max_query_len >= int(query_start_loc.diff().max())
    rows = slice(query_offset, query_offset + num_queries)
    whole = scoring.qsa_logits(
        q=q[rows].contiguous(),
        k_cache=k_cache,
        page_table=page_table,
        visible_blocks=visible_blocks[rows],
        query_start_loc=query_start_loc.clamp(rows.start, rows.stop) - rows.start,
        page_size=k_cache.shape[1],
    )
    view = logits_workspace[: num_queries * logits_width].view(num_queries, logits_width)
    seen = torch.arange(logits_width) < visible_blocks[rows, None]
    return view.copy_(torch.where(seen, whole[:, :logits_width], view))


def expand_qsa_block_indices(  # noqa: PLR0917 - as vLLM calls it
    block_indices: Tensor,
    query_positions: Tensor,
    visible_blocks: Tensor,
    compress_ratio: int,
    token_topk: int,
    out: Tensor,
) -> None:
    """The packed rows."""
    assert token_topk == block_indices.shape[1] * compress_ratio
    assert out.shape == (len(query_positions), token_topk + compress_ratio)
    out.copy_(
        expand_blocks(
            block_ids=block_indices,
            positions=query_positions,
            visible_blocks=visible_blocks,
            block_size=compress_ratio,
        )
    )


_prefill_logits = prefill_logits
"""As the file calls it."""
