"""The top-k of sgl_kernel: registered, in a library, in a module, absent and misused."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import fake_engines
import pytest
import torch
from torch import Tensor

from equivalence import candidate, digest, generate
from equivalence.engines import found, sglang
from equivalence.errors import UsageError
from equivalence.judge import check
from equivalence.receipt import Receipt, collected
from equivalence.verdict import Status, Verdict

FAST_TOPK = "sgl_kernel.fast_topk_v2"
CASE = generate.ragged_topk(5, k=2048, columns=12_288)
ROWS = len(CASE.inputs["row_start"])
Register = Callable[[Callable[..., None]], None]


@pytest.fixture(autouse=True)
def namespace(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The namespace torch.ops.sgl_kernel of a machine without GPU and without the kernel."""
    fake_engines.without_gpu(monkeypatch)
    monkeypatch.delenv(sglang.LIBRARY, raising=False)
    monkeypatch.setitem(sys.modules, "sgl_kernel", None)
    ops = SimpleNamespace()
    monkeypatch.setattr(torch.ops, "sgl_kernel", ops, raising=False)
    return ops


def judged() -> Verdict:
    """The adapter as a candidate, under the kernel's contract."""
    return check(CASE, sglang.ragged_topk, contract=FAST_TOPK)


def call(**changes: Any) -> dict[str, Any]:  # noqa: ANN401 - tensors
    """What `select` is called with: the case's rows, the windows not at 0."""
    start, end = CASE.inputs["row_start"], CASE.inputs["row_end"]
    out = torch.full((ROWS, 2048), -7, dtype=torch.int32)
    whole = {"scores": CASE.inputs["scores"], "column": start, "visible": end - start, "out": out}
    return {**whole, **changes}


def refusal(**changes: Any) -> str:  # noqa: ANN401 - tensors
    """The sentence of the UsageError of `select`, where no receipt was left."""
    with collected() as receipts, pytest.raises(UsageError) as raised:
        sglang.select(**call(**changes))
    assert receipts == []
    return str(raised.value)


def receipt(version: str, *rows: int) -> Receipt:
    """What calls on the CPU leave."""
    return Receipt(
        kernel="sgl_kernel.fast_topk",
        version=version,
        arch="cpu",
        arguments={"k": 2048},
        rows=rows,
        calls=len(rows),
    )


def _uncalled(*_: object) -> None:
    raise AssertionError("the kernel was called")


def loses_a_winner(scores: Tensor, indices: Tensor, lengths: Tensor, row_starts: Tensor) -> None:
    """The right picks, but for the best one of a row that selects."""
    fake_engines.fast_topk(scores, indices, lengths, row_starts)
    row = int(lengths.argmax())
    picks = set(indices[row].tolist())
    other = next(c for c in range(int(lengths[row])) if c not in picks)
    indices[row, -1] = other


def forgets_the_start(scores: Tensor, indices: Tensor, lengths: Tensor, row_starts: Tensor) -> None:
    """Every window read from column 0."""
    fake_engines.fast_topk(scores, indices, lengths, torch.zeros_like(row_starts))


def test_its_picks_are_judged_by_their_contract(namespace: SimpleNamespace) -> None:
    """Worst first is legal; a lost winner and a forgotten window start are not."""
    namespace.fast_topk = fake_engines.fast_topk
    assert judged().status is Status.EQUAL
    assert check(CASE, sglang.ragged_topk).status is Status.DIFFERENT
    namespace.fast_topk = loses_a_winner
    assert dict(judged().stages["raw_indices"].rules) == {"lost-winner": 1}
    namespace.fast_topk = forgets_the_start
    assert judged().status is Status.DIFFERENT


def test_a_selector_writes_into_the_buffer_it_is_given(namespace: SimpleNamespace) -> None:
    """Rows of a larger buffer of picks, and of scores whose rows lie apart."""
    namespace.fast_topk = fake_engines.fast_topk
    scores = CASE.inputs["scores"]
    wide = torch.full((ROWS, scores.shape[1] + 100), torch.inf)
    wide[:, : scores.shape[1]] = scores
    given = call(scores=wide[:, : scores.shape[1]])
    buffer = torch.full((ROWS + 2, 2048), -7, dtype=torch.int32)
    sglang.select(**{**given, "out": buffer[1:-1]})
    sglang.select(**given)
    assert torch.equal(buffer[1:-1], given["out"])
    assert torch.equal(buffer[[0, -1]], torch.full((2, 2048), -7, dtype=torch.int32))
    want = sglang.ragged_topk(**CASE.inputs, k=2048)
    assert torch.equal(given["out"], want)


def test_an_op_that_is_registered_is_used_as_it_is(
    namespace: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the library nor the module is looked at; the rows of each call are told."""
    namespace.fast_topk = fake_engines.fast_topk
    monkeypatch.setenv(sglang.LIBRARY, "/nowhere/common_ops.so")
    with collected() as receipts:
        sglang.select(**call())
        sglang.select(**{name: tensor[:3] for name, tensor in call().items()})
    assert receipts == [receipt("", ROWS, 3)]


def test_the_module_brings_the_op(
    namespace: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its version is told."""
    module = ModuleType("sgl_kernel")
    vars(module)["__version__"] = "0.4.6"

    def imported(name: str, *, how: str) -> ModuleType:
        del how
        namespace.fast_topk = fake_engines.fast_topk
        monkeypatch.setitem(sys.modules, name, module)
        return module

    monkeypatch.setattr(found, "module", imported)
    with collected() as receipts:
        sglang.select(**call())
    assert receipts == [receipt("0.4.6", ROWS)]


def test_the_library_the_environment_names_brings_the_op(
    namespace: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is loaded once, and the receipt tells the digest of its bytes."""
    library = tmp_path / "common_ops.so"
    library.write_bytes(b"kernels")
    loaded: list[str] = []

    def load(path: str) -> None:
        namespace.fast_topk = fake_engines.fast_topk
        loaded.append(path)

    monkeypatch.setattr(torch.ops, "load_library", load)
    monkeypatch.setattr(torch.ops, "loaded_libraries", {str(library)})
    monkeypatch.setenv(sglang.LIBRARY, str(library))
    with collected() as receipts:
        sglang.select(**call())
        sglang.select(**call())
    digits = digest.of_bytes(b"kernels")[:12]
    assert receipts == [
        Receipt(
            kernel="sgl_kernel.fast_topk",
            version=f"common_ops.so xxh3 {digits}",
            arch="cpu",
            arguments={"k": 2048},
            rows=(ROWS,),
            calls=2,
        )
    ]
    assert loaded == [str(library)]


def test_an_absent_kernel_is_said_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No module; no such file; no library; a library or a module of something else."""
    absent = (
        "sgl_kernel is not installed; install sglang-kernel,"
        " or let EQUIVALENCE_SGL_KERNEL name its common_ops library"
    )
    assert refusal() == absent
    assert judged().findings[0].reading == f"UsageError: {absent}"
    monkeypatch.setitem(sys.modules, "sgl_kernel", ModuleType("sgl_kernel"))
    without = "registers no op sgl_kernel.fast_topk; sglang-kernel 0.4.6 does"
    assert refusal() == f"sgl_kernel {without}"
    path = tmp_path / "common_ops.so"
    monkeypatch.setenv(sglang.LIBRARY, str(path))
    names = f"EQUIVALENCE_SGL_KERNEL names {str(path)!r}"
    assert refusal() == f"{names}, which is no file"
    path.write_text("no library")
    assert refusal().startswith(f"{names}, which cannot be loaded: OSError: ")
    monkeypatch.setattr(torch.ops, "load_library", lambda _: None)
    assert refusal() == f"the library {str(path)!r} that EQUIVALENCE_SGL_KERNEL names {without}"


ROW_SHAPE = f"[{ROWS}, 2048]"
SCORES, COLUMN = CASE.inputs["scores"], CASE.inputs["row_start"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"out": torch.empty((ROWS, 512), dtype=torch.int32)}, " has k 2048, not 512"),
        ({"scores": SCORES.bfloat16()}, ".scores is bfloat16; the op wants float32"),
        (
            {"scores": SCORES[:, ::2]},
            f".scores [{ROWS}, 6144] has strides [12288, 2]; the kernel wants columns at stride 1",
        ),
        ({"column": COLUMN.long()}, ".column is int64; the op wants int32"),
        (
            {"visible": torch.stack([COLUMN, COLUMN], 1)[:, 0]},
            f".visible [{ROWS}] has strides [2]; the kernel wants it contiguous",
        ),
        (
            {"out": torch.empty((ROWS, 4096), dtype=torch.int32)[:, ::2]},
            f".out {ROW_SHAPE} has strides [4096, 2]; the kernel wants it contiguous",
        ),
        ({"out": torch.empty((ROWS, 2048))}, ".out is float32; the op wants int32"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(
    changes: Mapping[str, Tensor], sentence: str, namespace: SimpleNamespace
) -> None:
    """Before it is called, with what the tensor is and what would fit."""
    namespace.fast_topk = _uncalled
    assert refusal(**changes) == f"sgl_kernel.fast_topk{sentence}"


def test_another_k_is_refused(namespace: SimpleNamespace) -> None:
    """Of the candidate as of the selector."""
    namespace.fast_topk = _uncalled
    verdict = check(generate.ragged_topk(5, k=16), sglang.ragged_topk)
    assert (verdict.status, verdict.findings[0].reading) == (
        Status.UNDECIDED,
        "UsageError: sgl_kernel.fast_topk has k 2048, not 16",
    )


def test_no_rows_call_no_kernel(namespace: SimpleNamespace) -> None:
    """And leave no receipt; that the kernel is there is seen all the same."""
    empty = {name: tensor[:0] for name, tensor in call().items()}
    assert refusal(**empty).startswith("sgl_kernel is not installed")
    namespace.fast_topk = _uncalled
    with collected() as receipts:
        sglang.select(**empty)
    assert receipts == []


def test_host_memory_never_reaches_a_gpus_kernel(
    namespace: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is a GPU, tensors elsewhere are refused."""
    namespace.fast_topk = _uncalled
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    sentence = "sgl_kernel.fast_topk.scores is on cpu; the kernel wants a CUDA device"
    assert refusal() == sentence


def test_the_adapter_is_a_candidate_by_name() -> None:
    """It is called as the op it is for."""
    assert candidate.load("equivalence.engines.sglang:ragged_topk") is sglang.ragged_topk
