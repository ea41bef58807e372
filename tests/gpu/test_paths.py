"""Paths and comparisons over the real Hopper kernels; elsewhere each test skips."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from equivalence import generate, judge, load_cases, record, scenarios, shadow
from equivalence.ab import compare
from equivalence.case import held
from equivalence.engines import deepgemm, sglang
from equivalence.invariance import check_row_count
from equivalence.paths import chunked, pipelined, tail, workspace
from equivalence.verdict import Status

pytestmark = pytest.mark.gpu
FAST_TOPK = "sgl_kernel.fast_topk_v2"
KERNELS: dict[str, Any] = {"scorer": "deep_gemm", "selector": "sgl_kernel"}
SMALL = 16 << 20


def prefix_hit() -> list[scenarios.Forward]:
    """Three forwards of up to 4,096 rows that pick 2,048 of up to 8,192 columns."""
    made = scenarios.forwards("prefix-hit", seed=0, scale=4, ratios=(1,), topk=8_192, device="cuda")
    return list(made)


@pytest.mark.parametrize(
    "path",
    [
        partial(chunked.chunked, budget_bytes=SMALL),
        partial(pipelined.pipelined, budget_bytes=SMALL),
        partial(workspace.fresh, budget_bytes=SMALL),
        partial(workspace.reused, budget_bytes=SMALL),
        partial(workspace.reused, budget_bytes=SMALL, micro_batches=2),
    ],
    ids=["chunked", "pipelined", "fresh", "reused", "reused-micro-batches"],
)
def test_a_bounded_path_over_real_kernels_is_the_original(
    deep_gemm: None, fast_topk: None, path: partial[object]
) -> None:
    """Logits are the same bits in every forward, picks legal, and both kernels told."""
    del deep_gemm, fast_topk
    comparison = compare(
        partial(chunked.original, keep_logits=True, **KERNELS),
        partial(path, keep_logits=True, **KERNELS),
        prefix_hit(),
        contract=FAST_TOPK,
        require_path=("deep_gemm", "sgl_kernel"),
    )
    assert (comparison.status, comparison.why) == (Status.EQUAL, ())
    logits = comparison.total.agreement["slots"]["logits"]
    assert (logits.forwards, logits.new_equal, logits.control_equal) == (3, 3, 3)


def test_tail_rows_over_real_kernels_are_legal(deep_gemm: None, fast_topk: None) -> None:
    """The last 128 rows of each request, computed alone; the others are unwritten by design."""
    del deep_gemm, fast_topk
    case = tail.tail_case(prefix_hit()[2].case, most=128)
    only = partial(tail.only, most=128, path=partial(chunked.chunked, **KERNELS))
    verdict = judge.check(case, only, contract=FAST_TOPK)
    assert verdict.status is Status.EQUAL, verdict.findings
    assert verdict.coverage.rows == 256


def test_scoring_does_not_depend_on_the_call(deep_gemm: None) -> None:
    """Every schedule, two streams among them, gives the bits of one call."""
    del deep_gemm
    case = generate.mqa_logits(3, k=256, columns=2_048, heads=64)
    verdict = check_row_count(case, deepgemm.mqa_logits, device="cuda")
    assert verdict.status is Status.EQUAL, verdict.findings
    assert "two streams (" not in verdict.note


def test_top_k_does_not_depend_on_the_call(fast_topk: None) -> None:
    """Every schedule is legal: orders and ties are its own."""
    del fast_topk
    case = generate.ragged_topk(3, k=2_048, columns=12_288)
    verdict = check_row_count(case, sglang.ragged_topk, contract=FAST_TOPK, device="cuda")
    assert verdict.status is Status.EQUAL, verdict.findings
    assert "two streams (" not in verdict.note


def test_a_live_call_on_the_device_is_compared_and_recorded(
    fast_topk: None, tmp_path: Path
) -> None:
    """The caller gets the original's own tensor; what was recorded is judged on a CPU."""
    del fast_topk
    case = held(generate.ragged_topk(4, k=2_048, columns=12_288), device="cuda")
    given: list[torch.Tensor] = []

    def engine(**call: object) -> torch.Tensor:
        given.append(sglang.ragged_topk(**call))  # type: ignore[arg-type]
        return given[-1]

    watched = shadow(engine, sglang.ragged_topk, op="ragged_topk", contract=FAST_TOPK)
    got = watched(**case.inputs, k=2_048)
    assert any(got is each for each in given)
    result = watched.result()
    assert (result.status, result.total.forwards) == (Status.EQUAL, 1)
    kept = record(engine, op="ragged_topk", to=tmp_path, contract=FAST_TOPK)
    kept(**case.inputs, k=2_048)
    assert (kept.counts.calls, kept.counts.written) == (1, 1)
    (saved,) = load_cases(tmp_path)
    assert judge.check(saved).status is Status.EQUAL


def test_a_scenario_has_the_same_bytes_on_every_device(hopper: None) -> None:
    """Queries, keys, weights, windows and slots are a function of the seed alone."""
    del hopper
    for device in ("cpu", "cuda"):
        (*_, last) = scenarios.forwards("tool-calls", seed=1, scale=64, topk=512, device=device)
        if device == "cpu":
            want = last.case.inputs
    got = {name: tensor.cpu() for name, tensor in last.case.inputs.items()}
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(tensor.view(torch.uint8), got[name].view(torch.uint8)), name
