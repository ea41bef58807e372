"""Rows split over ranks and gathered again, and top-k merged from ranks that each hold some keys.

Context parallel: a rank scores some query rows against all keys. Key-sharded decode: a rank
scores every row against the tokens it owns, which are those with
`(token // interleave) % ranks == rank`; a rank counts its own tokens from 0.
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from refimpl import bits, topk
from refimpl.topk import PAD

Split = Literal["interleave", "zigzag"]


def split_rows(
    *, rows: int, ranks: int, kind: Split = "interleave", device: torch.device | None = None
) -> list[Tensor]:
    """The rows of each rank, int64, ascending.

    `interleave` gives row i to rank i % ranks. `zigzag` cuts 2 * ranks blocks, the first ones a
    row longer where it does not come out even: rank r has blocks r and 2 * ranks - 1 - r.

    Raises:
        ValueError: ranks is below one, or the kind unknown.

    Source: SGLang 0.5.23 cp/interleave.py:17-26, cp/zigzag.py:17-29.
    """
    _expect_ranks(ranks)
    if kind not in get_args(Split):
        raise ValueError(f"kind is {kind!r}: rows are split by {' or '.join(get_args(Split))}")
    row = torch.arange(rows, device=device)
    if kind == "interleave":
        return [row[rank::ranks] for rank in range(ranks)]
    blocks = row.tensor_split(2 * ranks)
    return [torch.cat([blocks[rank], blocks[-1 - rank]]) for rank in range(ranks)]


def row_ids(owned: Sequence[Tensor]) -> Tensor:
    """The rows of each rank as int32 [R, n], the longest rank's n; -1 pads follow."""
    return torch.nn.utils.rnn.pad_sequence(
        [rows.int() for rows in owned], batch_first=True, padding_value=PAD
    )


def shard_rows(x: Tensor, owned: Sequence[Tensor]) -> Tensor:
    """The rows [rows, W] of each rank as [R, n, W]; zeros stand where a rank has no more."""
    ids = row_ids(owned).to(x.device)
    cells = bits.as_int(x)
    shards = cells.new_zeros(*ids.shape, x.shape[1])
    for shard, rows in zip(shards, owned, strict=True):
        shard[: len(rows)] = cells[rows]
    return shards.view(x.dtype)


def gather_rows(*, shards: Tensor, row_ids: Tensor, rows: int) -> Tensor:
    """The rows of all ranks in one tensor, moved by their bytes.

    Args:
        shards: [R, n, W], any dtype.
        row_ids: int32 [R, n], which row a rank's slot holds; -1 where it holds none.
        rows: of the result.

    Returns:
        [rows, W] of the dtype of shards.

    Raises:
        ValueError: a row number is out of range, or a row has two owners or none.
    """
    if shards.dim() != 3 or shards.shape[:2] != row_ids.shape:  # noqa: PLR2004 - ranks, slots, cells
        raise ValueError(
            f"shards are {list(shards.shape)} and row_ids {list(row_ids.shape)}: "
            "they are [R, n, W] and [R, n]"
        )
    _expect_one_owner(row_ids, rows)
    ids = row_ids.flatten().long()
    held = ids != PAD
    cells = bits.as_int(shards).flatten(0, 1)
    out = cells.new_empty(rows, cells.shape[1])
    out[ids[held]] = cells[held]
    return out.view(shards.dtype)


def owner_of(tokens: Tensor, *, ranks: int, interleave: int = 1) -> Tensor:
    """The rank that owns each token."""
    return tokens // interleave % ranks


def global_ids(local: Tensor, *, rank: int | Tensor, ranks: int, interleave: int = 1) -> Tensor:
    """The tokens that a rank counts as `local`; pads -1 stay pads."""
    token = (local // interleave * ranks + rank) * interleave + local % interleave
    return torch.where(local == PAD, PAD, token).to(local.dtype)


def local_ids(tokens: Tensor, *, ranks: int, interleave: int = 1) -> Tensor:
    """What the owner of each token counts it as; pads -1 stay pads."""
    local = tokens // (interleave * ranks) * interleave + tokens % interleave
    return torch.where(tokens == PAD, PAD, local).to(tokens.dtype)


def local_lens(lens: Tensor, *, rank: int | Tensor, ranks: int, interleave: int = 1) -> Tensor:
    """How many of the first `lens` tokens a rank owns."""
    whole, rest = lens // (interleave * ranks), lens % (interleave * ranks)
    return whole * interleave + (rest - rank * interleave).clamp(min=0, max=interleave)


def merge_topk(
    *,
    scores: Tensor,
    picks: Tensor,
    context_lens: Tensor,
    k: int,
    interleave: int = 1,
    **order: Any,  # noqa: ANN401 - the freedoms of topk.ragged_topk, passed on by name
) -> Tensor:
    """The top-k of the union of what ranks picked, `topk.ragged_topk` of their tokens.

    It is the top-k of all keys where every rank gives its best min(k, its tokens).

    Args:
        scores: [R, T, m] fp32, bf16 or fp16, of the picks.
        picks: int32 [R, T, m], tokens as their rank counts them, pads -1.
        context_lens: int32 [T], tokens of each row; a negative length is none.
        k: picks a row.
        interleave: tokens that follow one another on a rank.
        order: as in `topk.ragged_topk`.

    Returns:
        int32 [T, k], pads -1.

    Raises:
        ValueError: a rank picks a token that it does not own, or one twice.

    Source: vLLM 0.33.0 sparse_attn_indexer.py:95 `_merge_dcp_topk_global`.
    """
    expect_own(picks, context_lens, interleave)
    rank = torch.arange(len(picks), device=picks.device)[:, None, None]
    tokens = global_ids(picks, rank=rank, ranks=len(picks), interleave=interleave)
    return merge_tokens(scores=scores, tokens=tokens, context_lens=context_lens, k=k, **order)


def merge_tokens(
    *,
    scores: Tensor,
    tokens: Tensor,
    context_lens: Tensor,
    k: int,
    **order: Any,  # noqa: ANN401 - the freedoms of topk.ragged_topk, passed on by name
) -> Tensor:
    """`merge_topk` of picks that are tokens of the row already, int32 [R, T, m]; not checked."""
    rows = len(context_lens)
    token = tokens.long().transpose(0, 1).flatten(1)
    cells = bits.as_int(scores).transpose(0, 1).flatten(1)
    # In the order of tokens, so that the lowest place of tied ones is the lowest token.
    far = torch.iinfo(token.dtype).max
    token, at = torch.where(token == PAD, far, token).sort(dim=1)
    count = (token != far).sum(1)
    best = topk.ragged_topk(
        scores=cells.gather(1, at).view(scores.dtype),
        row_start=torch.zeros_like(count),
        row_end=count,
        k=k,
        **{**order, "short_rows": "any", "empty_rows": "pad"},
    )
    held = torch.nn.functional.pad(token, (0, 1)).gather(1, best.clamp(min=0).long())
    merged = torch.where(best == PAD, PAD, held).int()
    # Of no columns at all only the identity and the empty rows are left.
    fixed = topk.ragged_topk(
        scores=scores.new_empty(rows, 0),
        row_start=torch.zeros_like(context_lens),
        row_end=context_lens,
        k=k,
        **order,
    )
    unread = context_lens <= (k if order.get("short_rows", "identity") == "identity" else 0)
    return torch.where(unread[:, None], fixed, merged)


def _expect_ranks(ranks: int) -> None:
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}: it is 1 or more")


def _expect_one_owner(row_ids: Tensor, rows: int) -> None:
    strange = (row_ids != PAD) & ((row_ids < 0) | (row_ids >= rows))
    if strange.any():
        rank, slot = strange.nonzero()[0].tolist()
        raise ValueError(
            f"rank {rank} slot {slot} holds row {int(row_ids[rank, slot])}: there are {rows} rows"
        )
    ids = row_ids.flatten().long()
    owners = torch.zeros(rows + 1, dtype=torch.int64, device=ids.device)
    owners.index_add_(0, torch.where(ids == PAD, rows, ids), torch.ones_like(ids))
    owners = owners[:rows]
    if (owners > 1).any():
        row = int((owners > 1).nonzero()[0])
        (rank, slot), (other, place) = (row_ids == row).nonzero()[:2].tolist()
        raise ValueError(
            f"row {row} is owned twice: by rank {rank} slot {slot} and rank {other} slot {place}"
        )
    if (owners == 0).any():
        raise ValueError(f"row {int((owners == 0).nonzero()[0])} is owned by no rank")


def expect_own(picks: Tensor, lens: Tensor, interleave: int) -> None:
    """Raise a ValueError unless every rank picks its own tokens, each once.

    Args:
        picks: int32 [R, T, m], tokens as their rank counts them, pads -1.
        lens: [T], tokens of each row.
        interleave: tokens that follow one another on a rank.
    """
    ranks = len(picks)
    rank = torch.arange(ranks, device=picks.device)[:, None]
    own = local_lens(lens, rank=rank, ranks=ranks, interleave=interleave)
    strange = (picks != PAD) & ((picks < 0) | (picks >= own[:, :, None]))
    if strange.any():
        at, row, slot = strange.nonzero()[0].tolist()
        raise ValueError(
            f"rank {at} row {row} slot {slot} picks token {int(picks[at, row, slot])} of its "
            f"{int(own[at, row])}"
        )
    ordered = picks.sort(dim=2).values
    twice = (ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] != PAD)
    if twice.any():
        at, row, slot = twice.nonzero()[0].tolist()
        raise ValueError(f"rank {at} row {row} picks token {int(ordered[at, row, slot])} twice")
