"""Packed rows of a QSA path are those of the whole layer, whatever its workspace held."""

from typing import Any

import pytest
import torch
import twin_qsa
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from equivalence.errors import UsageError
from equivalence.paths import qsa, workspace
from refimpl.bits import as_int
from refimpl.qsa import expand_blocks, qsa_indexer

GARBAGE = (float("inf"), float("nan"), -1.2345e33, 0.0)
PAGE, TOPK = 4, 5


def layer(lengths: list[tuple[int, int]], *, seed: int = 0) -> dict[str, Any]:
    """Requests of (new rows, tokens), a padding row in front; keys repeat, so that scores tie."""
    random = torch.Generator().manual_seed(seed)
    ends = torch.tensor([1, *(n for n, _ in lengths)]).cumsum(0)
    positions = torch.cat([torch.tensor([-1]), *[torch.arange(t - n, t) for n, t in lengths]])
    requests, pages = len(lengths) + 1, max(-(-t // (4 * PAGE)) for _, t in lengths)
    keys = torch.randn(7, 32, generator=random).bfloat16()
    return {
        "q": torch.randn(len(positions), 4, 32, generator=random).bfloat16(),
        "k_cache": keys[torch.arange(requests * pages * PAGE) % 7].view(-1, PAGE, 1, 32),
        "page_table": torch.randperm(requests * pages, generator=random).int().view(requests, -1),
        "visible_blocks": ((positions + 1) // 4).int(),
        "positions": positions.int(),
        "query_start_loc": torch.cat([ends.new_zeros(1), ends]).int(),
        "page_size": PAGE,
    }


LENGTHS = st.lists(
    st.integers(1, 90).flatmap(lambda t: st.tuples(st.integers(1, min(t, 5)), st.just(t))),
    min_size=1,
    max_size=3,
)


@given(
    lengths=LENGTHS,
    budget=st.sampled_from([1, 256, 1000, 1 << 20]),
    micro_batches=st.integers(1, 3),
    garbage=st.sampled_from(GARBAGE),
)
def test_blocks_and_packed_rows_are_those_of_the_layer(
    lengths: list[tuple[int, int]], budget: int, micro_batches: int, garbage: float
) -> None:
    """Fresh and reused, in any chunks, over any workspace; the padding row is empty."""
    call = layer(lengths)
    want = qsa_indexer(**call, topk=TOPK)
    how: dict[str, Any] = {"budget_bytes": budget, "micro_batches": micro_batches, "topk": TOPK}
    held = [
        workspace.reserve(
            rows=len(call["q"]), widest=want["logits"].shape[1], topk=TOPK, budget_bytes=budget
        )
        for _ in range(micro_batches)
    ]
    for each in held:
        each.scores.fill_(garbage)
    for got in (
        qsa.fresh(**call, **how, keep_logits=True),
        qsa.reused(**call, **how, keep_logits=True, workspaces=held),
    ):
        assert got.keys() == want.keys()
        assert all(torch.equal(as_int(got[name]), as_int(want[name])) for name in want)
        assert got["packed"][0].tolist() == twin_qsa.packed_row([-1] * TOPK, -1, 0)


def test_without_positions_there_are_picks_alone() -> None:
    """The same blocks by the name of picks."""
    call = layer([(3, 70)])
    want = qsa.reused(**call, topk=TOPK)
    got = qsa.reused(**{name: v for name, v in call.items() if name != "positions"}, topk=TOPK)
    assert (set(want), set(got)) == ({"block_ids", "packed"}, {"raw_indices"})
    assert torch.equal(got["raw_indices"], want["block_ids"])


def test_another_expander_makes_the_rows() -> None:
    """It is given all picks at once, and the block size."""
    seen: list[list[int]] = []

    def expand(*, block_ids: Tensor, block_size: int, **rest: Tensor) -> Tensor:
        seen.append([*block_ids.shape, block_size])
        return expand_blocks(block_ids=block_ids, block_size=block_size, **rest).flip(1)

    call = layer([(3, 70)])
    got = qsa.fresh(**call, topk=TOPK, budget_bytes=1, block_size=2, expand=expand)["packed"]
    want = qsa.fresh(**call, topk=TOPK, block_size=2)["packed"]
    assert torch.equal(got.flip(1), want)
    assert (seen, want.shape) == ([[4, TOPK, 2]], (4, 12))


def test_packed_rows_of_no_picks_are_refused() -> None:
    """A call that only scores has none."""
    with pytest.raises(UsageError, match="positions are given and topk is 0"):
        qsa.fresh(**layer([(3, 70)]))
