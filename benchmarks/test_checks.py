"""Rows and bytes a second of the checks, each as a ratio to a named peer in the same run."""

from collections.abc import Callable
from time import perf_counter

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from equivalence.checks import bitwise, topk
from equivalence.checks.rows import IDENTICAL, REORDERED, TIED
from equivalence.contract import Contract
from equivalence.selection import Picks, Selection
from refimpl.topk import ragged_topk

K = 2048
ANY = Contract(order="any", ties="any")


def peer_seconds(call: Callable[[], object], *, rounds: int = 5) -> float:
    """The best of a few runs of a peer, in seconds."""
    times = []
    for _ in range(rounds):
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return min(times)


def selection(scores: Tensor) -> Selection:
    """Every row sees every column."""
    rows, columns = scores.shape
    start, end = torch.zeros(rows, dtype=torch.int64), torch.full((rows,), columns)
    return Selection(
        scores=scores,
        at=torch.arange(rows),
        nan=torch.zeros(rows, dtype=torch.bool),
        column=start,
        visible=end,
        start=start,
        want=ragged_topk(scores=scores, row_start=start, row_end=end, k=K),
        k=K,
        contract=ANY,
        ids=torch.arange(rows),
    )


def picks(values: Tensor) -> Picks:
    """Row-relative picks."""
    base = torch.zeros(len(values), dtype=torch.int64)
    return Picks(values=values, base=base, stage="raw_indices")


def naive(want: Tensor, got: Tensor) -> Tensor:
    """What a throw-away script does: compare sorted picks, blind to ties."""
    return (want.sort(1).values == got.sort(1).values).all(1)


def other_ties(legal: Selection) -> Tensor:
    """The picks with the highest tied columns, in column order from the end."""
    rows, columns = legal.scores.shape
    return ragged_topk(
        scores=legal.scores,
        row_start=torch.zeros(rows, dtype=torch.int64),
        row_end=torch.full((rows,), columns),
        k=K,
        ties="highest",
    )


@pytest.mark.parametrize(
    ("kind", "rows", "columns"),
    [("identical", 4096, 8192), ("reordered", 512, 8192), ("tied", 256, 65536)],
)
def test_topk_rows_a_second(
    benchmark: BenchmarkFixture, kind: str, rows: int, columns: int
) -> None:
    """Rows a second of the top-k check; the peer sorts both sides and compares."""
    torch.manual_seed(0)
    scores = torch.randn(rows, columns)
    if kind == "tied":
        scores = torch.relu(scores - 2.2)  # about 1.4 % winners, the rest one plateau of zeros
    legal = selection(scores)
    shuffled = legal.want[:, torch.randperm(K)].contiguous()
    got = {"identical": legal.want.clone(), "reordered": shuffled}.get(kind, other_ties(legal))
    decided = benchmark(topk.decide, legal, picks(got))
    expected = {"identical": IDENTICAL, "reordered": REORDERED, "tied": TIED}[kind]
    assert decided.codes.tolist() == [expected] * rows
    mean = float(benchmark.stats.stats.min)  # type: ignore[union-attr]
    benchmark.extra_info["rows_per_second"] = round(rows / mean)
    peer = peer_seconds(lambda: naive(legal.want, got))
    benchmark.extra_info["ratio_to_comparing_sorted_picks"] = round(peer / mean, 2)


@pytest.mark.parametrize("windows", ["full", "ragged"])
def test_bitwise_bytes_a_second(benchmark: BenchmarkFixture, windows: str) -> None:
    """GB/s of the bitwise check; the peer is torch.equal over the same scores."""
    rows, columns = 512, 65536
    want = torch.randn(rows, columns)
    got = want.clone()
    first = torch.zeros(rows, dtype=torch.int64)
    count = torch.full((rows,), columns)
    if windows == "ragged":
        count = columns - torch.arange(rows) * 16
        got[torch.arange(columns) >= count[:, None]] = torch.nan
    scores = bitwise.Scores(
        want=want, got=got, first=first, count=count, ids=torch.arange(rows), stage="logits"
    )
    decided = benchmark(bitwise.decide, scores)
    assert decided.counts["different"] == 0
    mean = float(benchmark.stats.stats.min)  # type: ignore[union-attr]
    read = int(count.sum()) * 2 * want.element_size()
    benchmark.extra_info["gigabytes_per_second"] = round(read / mean / 1e9, 2)
    same = want.clone()
    peer = peer_seconds(lambda: torch.equal(want, same))
    rate = (read / mean) / (want.numel() * 2 * want.element_size() / peer)
    benchmark.extra_info["ratio_to_torch_equal"] = round(rate, 2)
