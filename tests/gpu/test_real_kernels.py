"""The real Hopper kernels as candidates, on a machine that has them; elsewhere each test skips."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from equivalence import generate, load_cases
from equivalence.case import JSON, Case
from equivalence.engines import deepgemm, sglang
from equivalence.flags import fixtures_dir
from equivalence.judge import check
from equivalence.verdict import Status
from refimpl import fast, tensorcore
from refimpl.tensorcore import INSTRUCTIONS

pytestmark = pytest.mark.gpu
FAST_TOPK = "sgl_kernel.fast_topk_v2"


def test_the_shipped_cases_are_judged_alike_on_the_device(hopper: None) -> None:
    """The reference on CUDA gives the recorded bits too."""
    del hopper
    statuses = {
        c.name: check(c, device="cuda").status for c in load_cases(fixtures_dir() / "cases")
    }
    wrong = {name for name, status in statuses.items() if status is not Status.EQUAL}
    assert wrong == {"narrow-scores"}


def test_the_compiled_chain_has_the_models_bits_on_the_device(hopper: None) -> None:
    """Random bytes, NaN among them, 512 by 4096 accumulators."""
    del hopper
    torch.manual_seed(0)
    a, b = (
        torch.randint(0, 256, (n, 128), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
        for n in (512, 4096)
    )
    instruction = INSTRUCTIONS["sm90.wgmma.e4m3"]
    want = tensorcore.accumulate(a, b, instruction=instruction)
    got = fast.accumulate(a, b, instruction=instruction)
    assert fast.available("cuda"), fast.reason("cuda")
    assert torch.equal(want.view(torch.int32), got.view(torch.int32))


@pytest.mark.parametrize("tie_rich", [True, False])
@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_deepgemm_dense_logits_have_the_reference_bits(
    deep_gemm: None,
    heads: int,
    head_dim: int,
    *,
    tie_rich: bool,
) -> None:
    """Inside and outside the windows, for every head count and width the kernel takes."""
    del deep_gemm
    case = generate.mqa_logits(
        heads + head_dim,
        tie_rich=tie_rich,
        k=256,
        columns=4096,
        heads=heads,
        head_dim=head_dim,
    )
    candidate = partial(deepgemm.mqa_logits, clean_logits=True)
    verdict = check(case, candidate, contract="dead=-inf", device="cuda", repeats=2)
    assert verdict.status is Status.EQUAL, verdict.findings


@pytest.mark.parametrize("width", [4096, 5000])
def test_deepgemm_row_relative_logits_have_the_reference_bits(deep_gemm: None, width: int) -> None:
    """The compressed form of the dense kernel; its receipt says so."""
    del deep_gemm
    params: dict[str, JSON] = {"columns": "row-relative", "width": width}
    case = replace(generate.mqa_logits(7, k=256, columns=4096), params=params)
    verdict = check(case, deepgemm.mqa_logits, device="cuda")
    assert verdict.status is Status.EQUAL, verdict.findings
    ((way,),) = [run.paths for run in verdict.runs]
    assert (way.kernel, way.arch, bool(way.version)) == ("deep_gemm.fp8_mqa_logits", "sm90", True)
    assert way.arguments == {"columns": "row-relative", "clean_logits": False}


@pytest.mark.parametrize("heads", [32, 64])
def test_deepgemm_paged_logits_have_the_reference_bits(
    deep_gemm: None,
    heads: int,
) -> None:
    """Two query tokens a request, pages of 64."""
    del deep_gemm
    layer = generate.decode_indexer(heads, topk=128, heads=heads, page_size=64)
    case = Case(
        op="paged_mqa_logits",
        inputs=layer.inputs,
        params={"page_size": 64},
        arithmetic="deep_gemm.sm90",
    )
    verdict = check(case, deepgemm.paged_mqa_logits, device="cuda")
    assert verdict.status is Status.EQUAL, verdict.findings


@pytest.mark.parametrize("tie_rich", [True, False])
def test_fast_topk_keeps_its_contract_where_its_bucket_holds(
    fast_topk: None, *, tie_rich: bool
) -> None:
    """Up to 4,096 equal coarse keys: every run legal, orders and ties its own."""
    del fast_topk
    scores = generate.Scores(tie_rich=tie_rich)
    case = generate.ragged_topk(5, scores=scores, k=2048, columns=12_288)
    verdict = check(case, sglang.ragged_topk, contract=FAST_TOPK, device="cuda", repeats=3)
    assert verdict.status is Status.EQUAL, verdict.findings


def test_fast_topk_loses_winners_on_narrow_scores(fast_topk: None) -> None:
    """The recorded fault is live: lost-winner in all eight rows."""
    del fast_topk
    (case,) = load_cases(fixtures_dir() / "cases" / "narrow-scores.safetensors")
    verdict = check(case, sglang.ragged_topk, contract=FAST_TOPK, device="cuda")
    assert dict(verdict.stages["raw_indices"].rules) == {"lost-winner": 8}
