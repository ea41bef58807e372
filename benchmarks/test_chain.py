"""Products a second of the bit-exact chain, beside the fp32 GEMM of the same sizes.

A product is one multiplication of the M x N x D that both do.
Ratios go into `extra_info`; nothing here asserts a time.
"""

from collections.abc import Callable
from time import perf_counter

import pytest
import torch
import twin
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from refimpl import fast, tensorcore
from refimpl.bits import E4M3, as_int
from refimpl.tensorcore import INSTRUCTIONS

ROW = INSTRUCTIONS["sm90.wgmma.e4m3"]
SIZES = [(64, 4096, 128), (64, 65536, 128), (512, 8192, 128)]


def operands(rows: int, columns: int, dim: int) -> tuple[Tensor, Tensor]:
    """Rounded normal numbers."""
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(rows, dim, generator=g), torch.randn(columns, dim, generator=g)
    return a.to(E4M3), b.to(E4M3)


def fastest(function: Callable[[], object], rounds: int) -> float:
    """Seconds of the best of some rounds, after one that warms up."""
    function()
    seconds = []
    for _ in range(rounds):
        start = perf_counter()
        function()
        seconds.append(perf_counter() - start)
    return min(seconds)


def compare(benchmark: BenchmarkFixture, products: int, a: Tensor, b: Tensor) -> None:
    """Note the chain's rate, the GEMM's in the same run, and their ratio."""
    x, y = a.float(), b.float()
    gemm = fastest(lambda: torch.mm(x, y.t()), 20)
    chain = float(benchmark.stats.stats.min)  # type: ignore[union-attr]
    benchmark.extra_info |= {
        "threads": torch.get_num_threads(),
        "chain_products_per_second": products / chain,
        "gemm_products_per_second": products / gemm,
        "chain_to_gemm": gemm / chain,
    }


@pytest.mark.parametrize("size", SIZES[:1], ids=str)
def test_eager(benchmark: BenchmarkFixture, size: tuple[int, int, int]) -> None:
    """The reference as it stands."""
    a, b = operands(*size)
    benchmark(tensorcore.accumulate, a, b, instruction=ROW)
    compare(benchmark, size[0] * size[1] * size[2], a, b)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_compiled(benchmark: BenchmarkFixture, size: tuple[int, int, int]) -> None:
    """The compiled chain, once it has been compiled and found equal."""
    assert fast.available(), fast.reason()
    a, b = operands(*size)
    benchmark(fast.accumulate, a, b, instruction=ROW)
    compare(benchmark, size[0] * size[1] * size[2], a, b)


def test_scalar(benchmark: BenchmarkFixture) -> None:
    """A scalar simulation of the same cells, and how many times faster the chains are."""
    a, b = operands(64, 256, 128)
    rows = [[twin.decode_e4m3(code) for code in row] for row in as_int(a[:2]).tolist()]
    columns = [[twin.decode_e4m3(code) for code in row] for row in as_int(b[:8]).tolist()]

    def simulate() -> list[int]:
        return [twin.accumulate(x, y, twin.SM90_E4M3) for x in rows for y in columns]

    got = benchmark(simulate)
    want = tensorcore.accumulate(a[:2], b[:8], instruction=ROW)
    assert got == [bits & 0xFFFFFFFF for bits in as_int(want).flatten().tolist()]
    scalar = 2 * 8 * 128 / float(benchmark.stats.stats.min)  # type: ignore[union-attr]
    eager = 64 * 256 * 128 / fastest(lambda: tensorcore.accumulate(a, b, instruction=ROW), 3)
    benchmark.extra_info |= {
        "scalar_products_per_second": scalar,
        "eager_to_scalar": eager / scalar,
    }
