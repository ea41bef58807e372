"""QSA rows are the scalar twin's, and nothing outside what a row sees reaches them."""

import re
from typing import Any

import pytest
import torch
import twin_qsa
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from refimpl import blocks
from refimpl.geometry import qsa_visible_blocks
from refimpl.qsa import expand_blocks, qsa_indexer, qsa_picks
from refimpl.scoring import qsa_logits

GARBAGE = (float("inf"), float("nan"), float("-inf"), 12345.0)


def ints(*values: object) -> Tensor:
    """An int32 tensor."""
    return torch.tensor(values, dtype=torch.int32)


@st.composite
def picked(draw: st.DrawFn) -> tuple[list[list[int]], list[int], list[int], int]:
    """Rows of block ids with holes, positions, visible blocks, block size."""
    size, n = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 5))
    positions = draw(st.lists(st.integers(-1, 60), min_size=1, max_size=4))
    visible = [draw(st.integers(-1, (p + 1) // size)) for p in positions]
    ids = [draw(st.lists(st.integers(-1, 20), min_size=n, max_size=n)) for _ in positions]
    return ids, positions, visible, size


@given(picked())
def test_packed_rows_are_the_twin_s(
    case: tuple[list[list[int]], list[int], list[int], int],
) -> None:
    """Blocks as they stand, the open group, pads, and the count."""
    ids, positions, visible, size = case
    got = expand_blocks(
        block_ids=ints(*ids),
        positions=ints(*positions),
        visible_blocks=ints(*visible),
        block_size=size,
    )
    assert (got.dtype, got.is_contiguous()) == (torch.int32, True)
    assert got.tolist() == [
        twin_qsa.packed_row(*row, size) for row in zip(ids, positions, visible, strict=True)
    ]


@pytest.mark.parametrize(
    ("ids", "position", "visible", "row"),
    [
        ([2, 0], 14, 3, [8, 9, 10, 11, 0, 1, 2, 3, 12, 13, 14, 11]),
        ([2, -1], 14, 3, [8, 9, 10, 11, -1, -1, -1, -1, 12, 13, 14, 11]),
        ([-1, 1], 11, 3, [-1, -1, -1, -1, 4, 5, 6, 7, -1, -1, -1, 8]),
        ([0, -1], 5, 1, [0, 1, 2, 3, 4, 5, -1, -1, -1, -1, -1, 6]),
        ([0, 99], 5, 1, [0, 1, 2, 3, 4, 5, -1, -1, -1, -1, -1, 6]),
        ([-1, -1], 1, 0, [0, 1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 2]),
        ([-1, -1], -1, 0, [-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0]),
        ([-7, 1], 7, 2, [-1, -1, -1, -1, 4, 5, 6, 7, -1, -1, -1, 8]),
        # The tail follows the position alone.
        ([0, -1], 13, 1, [0, 1, 2, 3, 12, 13, -1, -1, -1, -1, -1, 6]),
    ],
)
def test_packed_rows_by_hand(ids: list[int], position: int, visible: int, row: list[int]) -> None:
    """A hole stays inside the counted prefix; what stands past the visible blocks is not read."""
    got = expand_blocks(block_ids=ints(ids), positions=ints(position), visible_blocks=ints(visible))
    assert got.tolist() == [row]


def test_the_engine_s_row_is_2052_wide() -> None:
    """512 blocks are 2,048 tokens, three more of the open group, and the count."""
    ids = torch.randperm(700, generator=torch.Generator().manual_seed(0))[:512].int()
    row = expand_blocks(block_ids=ids[None], positions=ints(2802), visible_blocks=ints(700))
    assert row.shape == (1, 2052)
    assert row[0, 2048:].tolist() == [2800, 2801, 2802, 2051]
    assert torch.equal(row[0, :2048].view(512, 4)[:, 3], ids * 4 + 3)


def test_rows_do_not_depend_on_how_they_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of one row give what one piece gives."""
    call: dict[str, Any] = {
        "block_ids": torch.arange(24, dtype=torch.int32).view(6, 4) % 5,
        "positions": ints(3, 9, 20, -1, 6, 17),
        "visible_blocks": ints(1, 2, 5, 0, 1, 4),
    }
    whole = expand_blocks(**call)
    monkeypatch.setattr(blocks, "CELLS", 1)
    assert torch.equal(expand_blocks(**call), whole)


@st.composite
def scored(draw: st.DrawFn) -> tuple[list[list[float]], list[int], list[int], int]:
    """Tied scores, positions, visible blocks, k."""
    columns, k = draw(st.integers(1, 9)), draw(st.integers(1, 6))
    positions = draw(st.lists(st.integers(-1, 4 * columns + 2), min_size=1, max_size=4))
    seq_len = draw(st.integers(1, 4 * columns))
    visible = qsa_visible_blocks(
        positions=ints(*positions), seq_lens=ints(*[seq_len] * len(positions))
    ).tolist()
    cells = st.lists(st.sampled_from([0.0, 1.0, 2.5]), min_size=columns, max_size=columns)
    return [draw(cells) for _ in positions], positions, visible, k


@given(case=scored(), garbage=st.sampled_from(GARBAGE))
def test_picks_are_the_twin_s_whatever_the_workspace_held(
    case: tuple[list[list[float]], list[int], list[int], int], garbage: float
) -> None:
    """Best first, ties at the lowest block; cells past what a row sees are never read."""
    cells, positions, visible, k = case
    logits = torch.tensor(cells)
    logits[torch.arange(logits.shape[1]) >= ints(*visible)[:, None]] = garbage
    got = qsa_picks(logits=logits, positions=ints(*positions), visible_blocks=ints(*visible), k=k)
    ids = [twin_qsa.picked_blocks(row, seen, k) for row, seen in zip(cells, visible, strict=True)]
    assert got["block_ids"].tolist() == ids
    assert got["packed"].tolist() == [
        twin_qsa.packed_row(*row) for row in zip(ids, positions, visible, strict=True)
    ]


def test_a_short_row_does_not_read_its_scores() -> None:
    """NaN everywhere; 3 of 3 blocks are 0, 1, 2, and attention reads every token once."""
    got = qsa_picks(
        logits=torch.full((1, 4), torch.nan), positions=ints(13), visible_blocks=ints(3), k=3
    )
    assert got["block_ids"].tolist() == [[0, 1, 2]]
    assert twin_qsa.attended(got["packed"][0].tolist()) == list(range(14))


def layer(**changes: Any) -> dict[str, Any]:  # noqa: ANN401 - what `qsa_indexer` takes
    """Two requests of two rows, pages of 4 blocks."""
    random = torch.Generator().manual_seed(3)
    call = {
        "q": torch.randn(4, 4, 32, generator=random).bfloat16(),
        "k_cache": torch.randn(5, 4, 1, 32, generator=random).bfloat16(),
        "page_table": ints([3, 1], [0, 4]),
        "visible_blocks": ints(7, 7, 4, 5),
        "positions": ints(29, 30, 18, 19),
        "topk": 3,
        "page_size": 4,
    }
    return call | changes


def test_a_layer_is_its_parts() -> None:
    """Logits as they are scored, picks as they are picked; decode needs no query_start_loc."""
    got = qsa_indexer(**layer(), order="ascending")
    scored_by = {name: layer()[name] for name in ("q", "k_cache", "page_table", "visible_blocks")}
    edges = ints(0, 2, 4)
    logits = qsa_logits(**scored_by, query_start_loc=edges, page_size=4)
    picks = qsa_picks(
        logits=logits,
        positions=layer()["positions"],
        visible_blocks=layer()["visible_blocks"],
        k=3,
        order="ascending",
    )
    given_edges = qsa_indexer(**layer(query_start_loc=edges), order="ascending")
    for name, tensor in {"logits": logits, **picks}.items():
        assert torch.equal(got[name], tensor)
        assert torch.equal(given_edges[name], tensor)
    uneven = qsa_indexer(**layer(query_start_loc=ints(0, 1, 4)))
    assert not torch.equal(uneven["logits"], logits)


def test_decode_rows_are_prefill_rows() -> None:
    """One row a request of `exact` scores: what the prefill call gives for these rows."""
    whole = qsa_indexer(**layer(), arithmetic="exact")
    last = torch.tensor([1, 3])
    rows = {name: layer()[name][last] for name in ("q", "visible_blocks", "positions")}
    alone = qsa_indexer(**layer(**rows), arithmetic="exact")
    assert all(torch.equal(tensor, whole[name][last]) for name, tensor in alone.items())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: qsa_indexer(**layer(page_table=ints([3], [1], [0]))),
            "q has 4 rows and page_table 3 requests: without query_start_loc each has equally many",
        ),
        (
            lambda: qsa_picks(
                logits=torch.zeros(1, 2), positions=ints(14), visible_blocks=ints(3), k=1
            ),
            "row 0 sees columns 0 to 3: scores have 2",
        ),
    ],
)
def test_what_does_not_fit_is_named(call: Any, message: str) -> None:  # noqa: ANN401 - a thunk
    """In one sentence."""
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
