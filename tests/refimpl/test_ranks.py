"""Rows split over ranks come back, and top-k merged from ranks is the top-k of all keys."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from refimpl import ranks, topk
from refimpl.bits import as_int

SPLITS = st.sampled_from(get_args(ranks.Split))
CP = st.integers(1, 8)
DTYPES = [torch.float8_e4m3fn, torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.int64]


def int32(*rows: list[int]) -> Tensor:
    """Rows of numbers."""
    return torch.tensor(rows, dtype=torch.int32)


# --- rows ----------------------------------------------------------------------------------------


def test_interleaved_rows_go_round() -> None:
    """Row i to rank i % 3."""
    owned = ranks.split_rows(rows=8, ranks=3)
    assert [rows.tolist() for rows in owned] == [[0, 3, 6], [1, 4, 7], [2, 5]]


def test_zigzag_rows_are_two_blocks_a_rank() -> None:
    """Blocks 0 and 5, 1 and 4, 2 and 3 of six, of which the first two are a row longer."""
    owned = ranks.split_rows(rows=14, ranks=3, kind="zigzag")
    assert [rows.tolist() for rows in owned] == [
        [0, 1, 2, 12, 13],
        [3, 4, 5, 10, 11],
        [6, 7, 8, 9],
    ]


@given(rows=st.integers(0, 40), cp=CP, kind=SPLITS)
def test_every_row_has_one_rank(rows: int, cp: int, kind: Any) -> None:  # noqa: ANN401 - a literal
    """Ranks own all rows, each once, in order; interleaved shares differ by a row at most."""
    owned = [part.tolist() for part in ranks.split_rows(rows=rows, ranks=cp, kind=kind)]
    assert len(owned) == cp
    assert sorted(row for part in owned for row in part) == list(range(rows))
    assert all(part == sorted(part) for part in owned)
    sizes = [len(part) for part in owned]
    assert max(sizes) - min(sizes) <= (1 if kind == "interleave" else 2)


@given(
    rows=st.integers(0, 20),
    cp=CP,
    kind=SPLITS,
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 9),
)
def test_gathered_rows_are_the_rows(
    rows: int,
    cp: int,
    kind: Any,  # noqa: ANN401 - a literal
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Byte for byte, NaNs of every payload included, and in any order of ranks."""
    random = torch.Generator().manual_seed(seed)
    flat = torch.randint(0, 256, (rows, 3 * dtype.itemsize), generator=random, dtype=torch.uint8)
    x = (flat % 2 if dtype is torch.bool else flat).view(dtype)
    owned = ranks.split_rows(rows=rows, ranks=cp, kind=kind)
    shards, ids = ranks.shard_rows(x, owned), ranks.row_ids(owned)
    assert (ids.dtype, ids.shape) == (torch.int32, shards.shape[:2])
    order = torch.randperm(cp, generator=random)
    for own, of in ((shards, ids), (as_int(shards)[order].view(dtype), ids[order])):
        got = ranks.gather_rows(shards=own, row_ids=of, rows=rows)
        assert (got.dtype, got.shape) == (dtype, x.shape)
        assert torch.equal(as_int(got), as_int(x))


@pytest.mark.parametrize(
    ("ids", "rows", "message"),
    [
        (int32([0, 2], [1, 2]), 3, "row 2 is owned twice: by rank 0 slot 1 and rank 1 slot 1"),
        (int32([0, 0], [1, 2]), 3, "row 0 is owned twice: by rank 0 slot 0 and rank 0 slot 1"),
        (int32([0, 2], [3, -1]), 4, "row 1 is owned by no rank"),
        (int32([0, 2], [1, 3]), 3, "rank 1 slot 1 holds row 3: there are 3 rows"),
        (int32([0, -2], [1, 3]), 3, "rank 0 slot 1 holds row -2: there are 3 rows"),
        (
            int32([0, 1, 2]),
            3,
            "shards are [2, 2, 1] and row_ids [1, 3]: they are [R, n, W] and [R, n]",
        ),
    ],
)
def test_rows_without_one_owner_are_refused(ids: Tensor, rows: int, message: str) -> None:
    """Before any byte is moved; the sentence names rank and row."""
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - its whole text is compared
        ranks.gather_rows(shards=torch.zeros(2, 2, 1), row_ids=ids, rows=rows)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"ranks": 0}, "ranks is 0: it is 1 or more"),
        (
            {"ranks": 2, "kind": "blocks"},
            "kind is 'blocks': rows are split by interleave or zigzag",
        ),
    ],
)
def test_a_split_that_is_none_is_refused(how: dict[str, Any], message: str) -> None:
    """In one sentence."""
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - its whole text is compared
        ranks.split_rows(rows=3, **how)
    assert str(raised.value) == message


# --- tokens --------------------------------------------------------------------------------------


def test_tokens_go_round_in_runs() -> None:
    """Runs of two over three ranks: tokens 0-1, 2-3, 4-5, then 6-7 are rank 0's again."""
    token = torch.arange(14)
    owner = ranks.owner_of(token, ranks=3, interleave=2)
    assert owner.tolist() == [0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2, 0, 0]
    local = ranks.local_ids(token, ranks=3, interleave=2)
    assert local.tolist() == [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 4, 5]


@given(tokens=st.integers(0, 300), cp=CP, interleave=st.sampled_from([1, 2, 3, 64]))
def test_a_rank_counts_its_tokens_in_order(tokens: int, cp: int, interleave: int) -> None:
    """Local numbers run from 0 through the tokens that a rank owns, and lead back to them."""
    how = {"ranks": cp, "interleave": interleave}
    token = torch.arange(tokens)
    owner, local = ranks.owner_of(token, **how), ranks.local_ids(token, **how)
    for rank in range(cp):
        mine = [t for t in range(tokens) if (t // interleave) % cp == rank]
        assert token[owner == rank].tolist() == mine
        assert local[owner == rank].tolist() == list(range(len(mine)))
        back = ranks.global_ids(torch.arange(len(mine)), rank=rank, **how)
        assert back.tolist() == mine
        assert int(ranks.local_lens(torch.tensor(tokens), rank=rank, **how)) == len(mine)


def test_pads_have_no_token() -> None:
    """-1 stays -1 both ways, and dtypes stay."""
    pads = int32([-1, 3])
    assert torch.equal(ranks.global_ids(pads, rank=1, ranks=4), int32([-1, 13]))
    assert torch.equal(ranks.local_ids(pads, ranks=3), int32([-1, 1]))


# --- merged top-k --------------------------------------------------------------------------------


def local(
    scores: Tensor,
    lens: Tensor,
    *,
    cp: int,
    interleave: int,
    most: int,
    **order: Any,  # noqa: ANN401 - keywords
) -> dict[str, Any]:
    """What each rank gives of scores [T, L]: its best `most` of the tokens that it owns."""
    picks, values = [], []
    for rank in range(cp):
        how = {"ranks": cp, "interleave": interleave}
        own = int(ranks.local_lens(torch.tensor(scores.shape[1]), rank=rank, **how))
        tokens = ranks.global_ids(torch.arange(own), rank=rank, **how)
        mine = as_int(scores)[:, tokens].view(scores.dtype)
        best = topk.ragged_topk(
            scores=mine,
            row_start=torch.zeros_like(lens),
            row_end=ranks.local_lens(lens, rank=rank, **how),
            k=most,
            **order,
        )
        spare = torch.nn.functional.pad(as_int(mine), (0, 1))
        picks.append(best)
        values.append(spare.gather(1, best.clamp(min=0).long()).view(scores.dtype))
    return {"scores": torch.stack(values), "picks": torch.stack(picks), "context_lens": lens}


def drawn(seed: int, columns: int) -> tuple[Tensor, Tensor]:
    """Scores with many ties, and lengths, short and empty ones among them."""
    random = torch.Generator().manual_seed(seed)
    palette = torch.tensor([-torch.inf, -1.0, -0.0, 0.0, 0.0, 1.0, 2.0, torch.inf, torch.nan])
    cells = palette[torch.randint(0, len(palette), (7, columns), generator=random)]
    lens = torch.randint(0, columns + 1, (7,), generator=random, dtype=torch.int32)
    lens[:6] = torch.tensor([columns, 0, 3, 6, -1, columns]).clamp(max=columns)
    cells[0] = torch.where(cells[0].isnan() | (torch.arange(columns) % 7 > 0), -torch.inf, cells[0])
    cells[5] = -torch.inf
    return cells.to(torch.bfloat16 if seed % 2 else torch.float32), lens


ORDERS = {
    "order": ("score", "ascending"),
    "ties": ("lowest", "highest"),
    "nan": ("first", "last"),
    "short_rows": ("identity", "any"),
    "empty_rows": ("pad", "first"),
    "minus_inf": ("pick", "pad"),
    "zero_sign": ("distinct", "equal"),
}


def check_merge(
    batch: tuple[Tensor, Tensor], *, cp: int, interleave: int, k: int, order: dict[str, Any]
) -> None:
    """What ranks give, merged, is the top-k of all keys."""
    scores, lens = batch
    # A rank's short row is its own matter: what it owes are its tokens, in any order.
    alone = {**order, "empty_rows": "pad", "short_rows": "any"}
    parts = local(scores, lens, cp=cp, interleave=interleave, most=k, **alone)
    got = ranks.merge_topk(**parts, k=k, interleave=interleave, **order)
    want = topk.ragged_topk(
        scores=scores, row_start=torch.zeros_like(lens), row_end=lens, k=k, **order
    )
    assert got.dtype is torch.int32
    assert got.tolist() == want.tolist()


@given(
    batch=st.builds(drawn, st.integers(0, 1 << 20), st.sampled_from([1, 9, 40, 200])),
    cp=CP,
    interleave=st.sampled_from([1, 2, 64]),
    k=st.integers(1, 24),
    order=st.fixed_dictionaries({name: st.sampled_from(both) for name, both in ORDERS.items()}),
)
def test_the_merge_is_the_topk_of_all_keys(
    batch: tuple[Tensor, Tensor], cp: int, interleave: int, k: int, order: dict[str, Any]
) -> None:
    """Pick for pick, with ties, NaN, -inf, short and empty rows, under every order and tie rule."""
    check_merge(batch, cp=cp, interleave=interleave, k=k, order=order)


@pytest.mark.parametrize("interleave", [1, 2, 64])
@pytest.mark.parametrize("cp", range(1, 9))
def test_the_merge_is_the_topk_under_any_two_rules(cp: int, interleave: int) -> None:
    """Of 200 columns, five picks a row: every pair of values of two rules, the others strict."""
    batch = drawn(cp, 200)
    strict = {name: both[0] for name, both in ORDERS.items()}
    for one, other in combinations(ORDERS, 2):
        for pair in product(ORDERS[one], ORDERS[other]):
            order = strict | dict(zip((one, other), pair, strict=True))
            check_merge(batch, cp=cp, interleave=interleave, k=5, order=order)


def test_ranks_may_give_more_than_k() -> None:
    """The best two of four each, and a graph's padding row of length -1."""
    scores = torch.tensor([[1.0, 5.0, 3.0, 5.0, 0.0, 2.0, 5.0, 4.0]] * 2)
    lens = torch.tensor([8, -1], dtype=torch.int32)
    parts = local(scores, lens, cp=2, interleave=1, most=4)
    got = ranks.merge_topk(**parts, k=2)
    assert got.tolist() == [[1, 3], [-1, -1]]


@pytest.mark.parametrize(
    ("picks", "message"),
    [
        ([[0, 1, 3], [0, 1, -1]], "rank 0 row 0 slot 2 picks token 3 of its 3"),
        ([[0, 1, 2], [0, 2, -1]], "rank 1 row 0 slot 1 picks token 2 of its 2"),
        ([[0, 1, 2], [-7, 1, -1]], "rank 1 row 0 slot 0 picks token -7 of its 2"),
        ([[0, 2, 0], [0, 1, -1]], "rank 0 row 0 picks token 0 twice"),
    ],
)
def test_a_token_is_picked_by_its_owner_and_once(picks: list[list[int]], message: str) -> None:
    """Of five tokens rank 0 owns three and rank 1 two."""
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - its whole text is compared
        ranks.merge_topk(
            scores=torch.zeros(2, 1, 3),
            picks=torch.tensor(picks, dtype=torch.int32)[:, None],
            context_lens=torch.tensor([5], dtype=torch.int32),
            k=3,
        )
    assert str(raised.value) == message
