"""DeepGEMM's adapters over both generations of its functions, absent, broken and misused."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import fake_engines
import pytest
import torch
from torch import Tensor

from equivalence import candidate, generate
from equivalence.case import Case
from equivalence.engines import deepgemm
from equivalence.errors import UsageError
from equivalence.judge import check
from equivalence.receipt import Receipt, collected
from equivalence.verdict import Status
from refimpl import scoring

GENERATIONS = [("fp8",), ("fp8_fp4",), ("fp8", "fp8_fp4")]
INSTALL = "pip install sgl-deep-gemm==0.1.4, where there is a Hopper GPU and nvcc 12.9 or later"
DENSE = generate.mqa_logits(3, head_dim=32)
PAGED = generate.decode_indexer(3, topk=40, head_dim=32, page_size=64)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without GPU and without deep_gemm."""
    fake_engines.without_gpu(monkeypatch)
    monkeypatch.setitem(sys.modules, "deep_gemm", None)


def install(patch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Let `import deep_gemm` find this module."""
    patch.setitem(sys.modules, "deep_gemm", module)


def dense(**changes: Tensor) -> dict[str, Any]:
    """The dense case's inputs, some replaced."""
    return {**DENSE.inputs, **changes}


def paged(**changes: Any) -> dict[str, Any]:  # noqa: ANN401 - tensors and a page size
    """The paged case's inputs, some replaced."""
    return {**PAGED.inputs, **changes}


def paged_case() -> Case:
    """The paged layer as an op of scores alone."""
    return replace(PAGED, op="paged_mqa_logits", params={"page_size": 64})


def rules(case: Case, function: Any, **options: Any) -> tuple[Status, Mapping[str, int]]:  # noqa: ANN401 - a candidate and words of check
    """The status of the case, and what is wrong with its logits."""
    verdict = check(case, function, **options)
    stage = verdict.stages.get("logits")
    return verdict.status, {} if stage is None else dict(stage.rules)


def refusal(function: Any, **inputs: Any) -> str:  # noqa: ANN401 - whatever it takes
    """The sentence of the UsageError, where no receipt was left."""
    with collected() as receipts, pytest.raises(UsageError) as raised:
        function(**inputs)
    assert receipts == []
    return str(raised.value)


@pytest.mark.parametrize("width", [None, 80, 333])
@pytest.mark.parametrize("columns", ["absolute", "row-relative"])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_dense_logits_stand_where_the_case_has_them(
    generation: tuple[str, ...],
    columns: str,
    width: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every generation, both kinds of columns, rows of L cells and of more."""
    case = replace(DENSE, params={"columns": columns, "width": width})
    install(monkeypatch, fake_engines.deep_gemm(*generation))
    assert rules(case, deepgemm.mqa_logits) == (Status.EQUAL, {})
    wrong = fake_engines.deep_gemm(*generation, score=fake_engines.one_ulp_off)
    install(monkeypatch, wrong)
    assert rules(case, deepgemm.mqa_logits)[0] is Status.DIFFERENT


@pytest.mark.parametrize("generation", GENERATIONS)
def test_rows_are_no_wider_than_the_case_has_them(
    generation: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A width below L, where no window reaches past it."""
    install(monkeypatch, fake_engines.deep_gemm(*generation))
    inputs = {**DENSE.inputs, "row_end": DENSE.inputs["row_end"].clamp(max=70)}
    inputs["row_start"] = inputs["row_start"].clamp(max=70)
    case = replace(DENSE, inputs=inputs, params={"width": 70})
    assert rules(case, deepgemm.mqa_logits) == (Status.EQUAL, {})


def test_many_rows_are_moved_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block is a part of one."""
    install(monkeypatch, fake_engines.deep_gemm("fp8_fp4"))
    monkeypatch.setattr(deepgemm, "_CELLS", 4 * 80)
    assert len(DENSE.inputs["q"]) % 4
    assert rules(DENSE, deepgemm.mqa_logits) == (Status.EQUAL, {})


def test_only_a_clean_call_is_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """The contract dead=-inf, with the flag and without."""
    install(monkeypatch, fake_engines.deep_gemm("fp8"))
    clean = partial(deepgemm.mqa_logits, clean_logits=True)
    for case in (DENSE, replace(DENSE, params={"width": 333})):
        assert rules(case, clean, contract="dead=-inf") == (Status.EQUAL, {})
    status, found = rules(DENSE, deepgemm.mqa_logits, contract="dead=-inf")
    assert (status, set(found)) == (Status.DIFFERENT, {"bits"})


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_scorer_says_where_each_window_begins(
    generation: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cells of every window are those of the reference."""
    install(monkeypatch, fake_engines.deep_gemm(*generation))
    logits = deepgemm.score(**dense())
    want = scoring.mqa_logits(**dense())
    start, end = DENSE.inputs["row_start"].tolist(), DENSE.inputs["row_end"].tolist()
    assert logits.column.dtype is torch.int32
    for row, first in enumerate(logits.column.tolist()):
        visible = end[row] - start[row]
        got = logits.values[row, first : first + visible]
        assert torch.equal(got, want[row, start[row] : end[row]])


ABSOLUTE = {"columns": "absolute", "clean_logits": False}
RELATIVE = {"columns": "row-relative", "clean_logits": False}


@pytest.mark.parametrize(
    ("generation", "options", "kernel", "arguments"),
    [
        (("fp8",), {}, "fp8_mqa_logits", ABSOLUTE),
        (("fp8",), {"clean_logits": True}, "fp8_mqa_logits", {**ABSOLUTE, "clean_logits": True}),
        (("fp8",), {"max_seqlen_k": 80}, "fp8_mqa_logits", RELATIVE),
        (("fp8_fp4",), {}, "fp8_fp4_mqa_logits", RELATIVE),
        (("fp8_fp4",), {"max_seqlen_k": 80}, "fp8_fp4_mqa_logits", RELATIVE),
        (("fp8", "fp8_fp4"), {}, "fp8_mqa_logits", ABSOLUTE),
    ],
)
def test_the_receipt_tells_the_generation_that_ran(
    generation: tuple[str, ...],
    options: Mapping[str, Any],
    kernel: str,
    arguments: Mapping[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two calls of the same kind are one receipt with both row counts."""
    install(monkeypatch, fake_engines.deep_gemm(*generation))
    rows = ("q", "weights", "row_start", "row_end")
    some = dense(**{name: DENSE.inputs[name][:2] for name in rows})
    with collected() as receipts:
        deepgemm.score(**dense(), **options)
        deepgemm.score(**some, **options)
    assert receipts == [
        Receipt(
            kernel=f"deep_gemm.{kernel}",
            version=fake_engines.VERSION,
            arch="cpu",
            arguments=arguments,
            rows=(len(DENSE.inputs["q"]), 2),
            calls=2,
        )
    ]


@pytest.mark.parametrize("generation", GENERATIONS)
def test_paged_logits_have_the_reference_bits(
    generation: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two query tokens a request; a kernel that stops one column early is seen."""
    install(monkeypatch, fake_engines.deep_gemm(*generation))
    case = paged_case()
    assert rules(case, deepgemm.paged_mqa_logits) == (Status.EQUAL, {})
    wider = torch.cat([PAGED.inputs["block_table"], PAGED.inputs["block_table"]], dim=1)
    strided = wider[:, : PAGED.inputs["block_table"].shape[1]]
    padded = replace(case, inputs={**case.inputs, "block_table": strided})
    assert rules(padded, deepgemm.paged_mqa_logits) == (Status.EQUAL, {})
    short = fake_engines.deep_gemm(*generation, paged=fake_engines.one_length_short)
    install(monkeypatch, short)
    assert rules(case, deepgemm.paged_mqa_logits)[0] is Status.DIFFERENT


@pytest.mark.parametrize(
    ("generation", "kernel"),
    [
        (("fp8",), "fp8_paged_mqa_logits"),
        (("fp8_fp4",), "fp8_fp4_paged_mqa_logits"),
        (("fp8", "fp8_fp4"), "fp8_paged_mqa_logits"),
    ],
)
def test_a_paged_call_leaves_its_receipt(
    generation: tuple[str, ...], kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are all query tokens."""
    install(monkeypatch, fake_engines.deep_gemm(*generation))
    with collected() as receipts:
        deepgemm.paged_mqa_logits(**paged())
    assert receipts == [
        Receipt(
            kernel=f"deep_gemm.{kernel}",
            version=fake_engines.VERSION,
            arch="cpu",
            arguments={"next_n": 2},
            rows=(6,),
        )
    ]


def test_nothing_to_score_calls_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rows, no keys, no pages: scores of that shape, and no receipt."""
    module = fake_engines.deep_gemm("fp8", score=_uncalled, paged=_uncalled)
    install(monkeypatch, module)
    start = torch.zeros_like(DENSE.inputs["row_start"])
    no_rows = {name: t[:0] for name, t in DENSE.inputs.items() if not name.startswith("k")}
    no_keys = {"k": DENSE.inputs["k"][:0], "k_scale": DENSE.inputs["k_scale"][:0]}
    rows = len(start)
    with collected() as receipts:
        shapes = [
            deepgemm.mqa_logits(**dense(**no_rows)),
            deepgemm.mqa_logits(**dense(**no_rows), columns="row-relative", width=9),
            deepgemm.mqa_logits(**dense(**no_keys, row_start=start, row_end=start)),
            deepgemm.paged_mqa_logits(**paged(kv_cache=PAGED.inputs["kv_cache"][:0])),
        ]
    assert [list(given["logits"].shape) for given in shapes] == [
        [0, 80],
        [0, 9],
        [rows, 0],
        [6, PAGED.inputs["block_table"].shape[1] * 64],
    ]
    assert all(given["logits"].dtype is torch.float32 for given in shapes)
    assert receipts == []


def _uncalled(**_: object) -> Tensor:
    raise AssertionError("the kernel was called")


def test_an_absent_module_is_said_in_one_sentence() -> None:
    """Both ops say what to install; as a candidate that is UNDECIDED."""
    sentence = f"deep_gemm is not installed; {INSTALL}"
    assert refusal(deepgemm.score, **dense()) == sentence
    assert refusal(deepgemm.paged_mqa_logits, **paged()) == sentence
    verdict = check(DENSE, deepgemm.mqa_logits)
    assert (verdict.status, verdict.findings[0].reading) == (
        Status.UNDECIDED,
        f"UsageError: {sentence}",
    )


def test_a_module_of_neither_generation_is_said_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Functions that are None, as a build without them leaves, are not there either."""
    module = fake_engines.deep_gemm()
    vars(module).update(fp8_mqa_logits=None)
    install(monkeypatch, module)
    sentence = "deep_gemm has neither fp8_mqa_logits nor fp8_fp4_mqa_logits; " + INSTALL
    assert refusal(deepgemm.score, **dense()) == sentence


Q, K, WEIGHTS, START = (DENSE.inputs[name] for name in ("q", "k", "weights", "row_start"))
ROWS = len(Q)
LESS = f"not {ROWS - 1}, in dimension 0"
BYTES = "page_bytes = 2304, not 2300, in dimension 1"
WANTS = "the op wants [pages, page_bytes] with"
KERNEL, PAGED_KERNEL = "deep_gemm.fp8_mqa_logits", "deep_gemm.fp8_paged_mqa_logits"


def off_by_four(tensor: Tensor) -> Tensor:
    """The same fp32 values, four bytes past an aligned address."""
    room = torch.empty(tensor.numel() + 1)
    return room[1:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"q": Q.float()}, "q is float32; the op wants float8_e4m3fn"),
        (
            {"q": Q.transpose(0, 1).contiguous().transpose(0, 1)},
            f"q [{ROWS}, 32, 32] has strides [32, {32 * ROWS}, 1]; the kernel wants it contiguous",
        ),
        (
            {"q": Q[:, :16].contiguous(), "weights": WEIGHTS[:, :16].contiguous()},
            "q has 16 heads; the kernel has 32 and 64",
        ),
        (
            {"q": Q[..., :16].contiguous(), "k": K[:, :16].contiguous()},
            "q has D 16; the kernel has 32, 64 and 128",
        ),
        (
            {"k": K[:, :16].contiguous()},
            "k has shape [80, 16]; the op wants [L, D] with D = 32, not 16, in dimension 1",
        ),
        ({"weights": WEIGHTS.double()}, "weights is float64; the op wants float32"),
        (
            {"weights": WEIGHTS.t().contiguous().t()},
            f"weights [{ROWS}, 32] has strides [1, {ROWS}]; the kernel wants it contiguous",
        ),
        ({"row_start": START.long()}, "row_start is int64; the op wants int32"),
        (
            {"row_end": START[:-1]},
            f"row_end has shape [{ROWS - 1}]; the op wants [T] with T = {ROWS}, {LESS}",
        ),
        (
            {"k_scale": off_by_four(DENSE.inputs["k_scale"])},
            "k_scale begins 4 bytes past a multiple of 16; the kernel wants it aligned",
        ),
        (
            {"row_end": torch.empty(ROWS, dtype=torch.int32, device="meta")},
            "row_end is a torch.strided tensor on meta: it holds no plain values",
        ),
    ],
)
def test_what_a_dense_kernel_does_not_take_is_refused(
    changes: Mapping[str, Tensor], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is called, with what the tensor is and what would fit."""
    install(monkeypatch, fake_engines.deep_gemm("fp8", score=_uncalled))
    assert refusal(deepgemm.score, **dense(**changes)) == f"{KERNEL}.{sentence}"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"page_size": 32},
            f"page_size is 32; {PAGED_KERNEL} has pages of 64",
        ),
        (
            {
                "q": torch.cat([PAGED.inputs["q"].view(torch.uint8)] * 2, 1).view(
                    torch.float8_e4m3fn
                ),
                "weights": torch.zeros(12, 32),
                "context_lens": torch.zeros(3, 4, dtype=torch.int32),
            },
            f"{PAGED_KERNEL}.q has next_n 4; the kernel has 1 and 2",
        ),
        (
            {"kv_cache": PAGED.inputs["kv_cache"][:, :-4].contiguous()},
            f"{PAGED_KERNEL}.kv_cache has shape [13, 2300]; {WANTS} {BYTES}",
        ),
        (
            {"context_lens": PAGED.inputs["context_lens"].flatten()},
            f"{PAGED_KERNEL}.context_lens has shape [6]; the op wants [B, n]",
        ),
    ],
)
def test_what_a_paged_kernel_does_not_take_is_refused(
    changes: Mapping[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Likewise."""
    install(monkeypatch, fake_engines.deep_gemm("fp8", paged=_uncalled))
    assert refusal(deepgemm.paged_mqa_logits, **paged(**changes)) == sentence


def test_row_relative_columns_cannot_be_cleaned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of the generation that has no others, nor where they are asked for."""
    install(monkeypatch, fake_engines.deep_gemm("fp8_fp4", score=_uncalled))
    sentence = "clean_logits: deep_gemm.fp8_fp4_mqa_logits cleans no row-relative columns"
    assert refusal(deepgemm.score, **dense(), clean_logits=True) == sentence
    install(monkeypatch, fake_engines.deep_gemm("fp8", score=_uncalled))
    sentence = f"clean_logits: {KERNEL} cleans no row-relative columns"
    options = {"clean_logits": True, "max_seqlen_k": 80}
    assert refusal(deepgemm.score, **dense(), **options) == sentence


def test_a_row_too_short_for_its_window_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would write past it."""
    install(monkeypatch, fake_engines.deep_gemm("fp8", score=_uncalled))
    longest = int((DENSE.inputs["row_end"] - START).max())
    sentence = f"max_seqlen_k is {longest - 1}; the longest window wants {longest}"
    assert refusal(deepgemm.score, **dense(), max_seqlen_k=longest - 1) == sentence


def test_host_memory_never_reaches_a_gpus_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a GPU, tensors elsewhere are refused."""
    install(monkeypatch, fake_engines.deep_gemm("fp8", score=_uncalled))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    sentence = f"{KERNEL}.q is on cpu; the kernel wants a CUDA device"
    assert refusal(deepgemm.score, **dense()) == sentence


def test_the_adapters_are_candidates_by_name() -> None:
    """Each is called as the op it is for."""
    for op in ("mqa_logits", "paged_mqa_logits"):
        function = candidate.load(f"equivalence.engines.deepgemm:{op}")
        assert function is getattr(deepgemm, op)
