"""The real Hopper kernels as candidates, on a machine that has them; elsewhere each test skips."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from equivalence import generate, load_cases
from equivalence.case import Case
from equivalence.flags import fixtures_dir
from equivalence.judge import check
from equivalence.verdict import Status
from refimpl import fast, tensorcore
from refimpl.tensorcore import INSTRUCTIONS

pytestmark = pytest.mark.gpu
FAST_TOPK = "sgl_kernel.fast_topk_v2"


@pytest.fixture(scope="module")
def hopper() -> None:
    """Skip where there is no Hopper GPU."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != (9, 0):
        pytest.skip(f"compute capability {major}.{minor}; the recorded kernels are 9.0")


@pytest.fixture(scope="module")
def deep_gemm(hopper: None) -> Any:  # noqa: ANN401 - a module without types
    """DeepGEMM, of a generation that has `fp8_mqa_logits`."""
    del hopper
    return pytest.importorskip("deep_gemm", reason="sgl-deep-gemm 0.1.4 is not installed")


@pytest.fixture(scope="module")
def fast_topk(hopper: None) -> Callable[..., Tensor]:
    """`sgl_kernel::fast_topk` as a candidate of ragged_topk."""
    del hopper
    library = os.environ.get("EQUIVALENCE_SGL_KERNEL", "")
    if not Path(library).is_file():
        pytest.skip("EQUIVALENCE_SGL_KERNEL names no sgl_kernel common_ops library")
    torch.ops.load_library(library)  # type: ignore[no-untyped-call]  # torch has no types here

    def candidate(scores: Tensor, row_start: Tensor, row_end: Tensor, k: int) -> Tensor:
        picks = torch.empty((len(scores), k), dtype=torch.int32, device=scores.device)
        lengths = row_end - row_start
        torch.ops.sgl_kernel.fast_topk(scores, picks, lengths, row_start)
        return picks

    return candidate


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
    deep_gemm: Any,  # noqa: ANN401 - a module without types
    heads: int,
    head_dim: int,
    *,
    tie_rich: bool,
) -> None:
    """Inside and outside the windows, for every head count and width the kernel takes."""

    def candidate(q: Tensor, k: Tensor, k_scale: Tensor, weights: Tensor, **rows: Tensor) -> Tensor:
        keys = (k, k_scale)
        row_start, row_end = rows["row_start"], rows["row_end"]
        logits = deep_gemm.fp8_mqa_logits(q, keys, weights, row_start, row_end, clean_logits=True)
        return Tensor(logits)

    case = generate.mqa_logits(
        heads + head_dim,
        tie_rich=tie_rich,
        k=256,
        columns=4096,
        heads=heads,
        head_dim=head_dim,
    )
    verdict = check(case, candidate, contract="dead=-inf", device="cuda", repeats=2)
    assert verdict.status is Status.EQUAL, verdict.findings


@pytest.mark.parametrize("heads", [32, 64])
def test_deepgemm_paged_logits_have_the_reference_bits(
    deep_gemm: Any,  # noqa: ANN401 - a module without types
    heads: int,
) -> None:
    """Two query tokens a request, pages of 64."""

    def candidate(
        q: Tensor,
        kv_cache: Tensor,
        weights: Tensor,
        context_lens: Tensor,
        block_table: Tensor,
        **_: Any,  # noqa: ANN401 - params
    ) -> Tensor:
        pages = kv_cache.view(len(kv_cache), 64, 1, -1)
        plan = deep_gemm.get_paged_mqa_logits_metadata(context_lens, 64, deep_gemm.get_num_sms())
        width = block_table.shape[1] * 64
        logits = deep_gemm.fp8_paged_mqa_logits(
            q, pages, weights, context_lens, block_table, plan, width, clean_logits=False
        )
        return Tensor(logits)

    layer = generate.decode_indexer(heads, topk=128, heads=heads, page_size=64)
    case = Case(
        op="paged_mqa_logits",
        inputs=layer.inputs,
        params={"page_size": 64},
        arithmetic="deep_gemm.sm90",
    )
    verdict = check(case, candidate, device="cuda")
    assert verdict.status is Status.EQUAL, verdict.findings


@pytest.mark.parametrize("tie_rich", [True, False])
def test_fast_topk_keeps_its_contract_where_its_bucket_holds(
    fast_topk: Callable[..., Tensor], *, tie_rich: bool
) -> None:
    """Up to 4,096 equal coarse keys: every run legal, orders and ties its own."""
    scores = generate.Scores(tie_rich=tie_rich)
    case = generate.ragged_topk(5, scores=scores, k=2048, columns=12_288)
    verdict = check(case, fast_topk, contract=FAST_TOPK, device="cuda", repeats=3)
    assert verdict.status is Status.EQUAL, verdict.findings


def test_fast_topk_loses_winners_on_narrow_scores(fast_topk: Callable[..., Tensor]) -> None:
    """The recorded fault is live: lost-winner in all eight rows."""
    (case,) = load_cases(fixtures_dir() / "cases" / "narrow-scores.safetensors")
    verdict = check(case, fast_topk, contract=FAST_TOPK, device="cuda")
    assert dict(verdict.stages["raw_indices"].rules) == {"lost-winner": 8}
