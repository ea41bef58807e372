"""The compiled chain on a CUDA device; skips where there is none."""

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from refimpl import fast, tensorcore
from refimpl.bits import as_int
from refimpl.tensorcore import INSTRUCTIONS

ROW = INSTRUCTIONS["sm90.wgmma.e4m3"]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own


def seconds(call: object, rounds: int = 20) -> float:
    """The best time of a call on the device, by events."""
    assert callable(call)
    call()
    best = float("inf")
    for _ in range(rounds):
        start, end = _event(), _event()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return best


def test_compiled_on_the_device(benchmark: BenchmarkFixture) -> None:
    """Products a second beside the fp32 GEMM and the fp8 tensor-core GEMM of the same sizes."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    rows, columns, dim = 4096, 65536, 128
    generator = torch.Generator(device="cuda").manual_seed(0)
    a, b = (
        torch.randn(n, dim, device="cuda", generator=generator).to(torch.float8_e4m3fn)
        for n in (rows, columns)
    )
    want = tensorcore.accumulate(a[:64], b[:4096], instruction=ROW)
    got = fast.accumulate(a, b, instruction=ROW)[:64, :4096]
    assert torch.equal(as_int(want), as_int(got.contiguous()))
    products = rows * columns * dim
    chain = seconds(lambda: fast.accumulate(a, b, instruction=ROW))
    gemm = seconds(lambda: a.float() @ b.float().t())
    benchmark.extra_info |= {
        "chain_products_per_second": products / chain,
        "gemm_products_per_second": products / gemm,
        "chain_to_gemm": gemm / chain,
    }
    benchmark(torch.cuda.synchronize)
