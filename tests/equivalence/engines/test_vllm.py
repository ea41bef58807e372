"""The QSA kernels of vLLM: in a file, in a module, absent and misused."""

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import fake_engines
import pytest
import tiny
import torch
from fake_qsa import expand_qsa_block_indices, prefill_logits
from torch import Tensor

from equivalence import candidate, digest
from equivalence.engines import found, vllm
from equivalence.errors import UsageError
from equivalence.judge import check
from equivalence.paths import qsa
from equivalence.receipt import Receipt, collected
from equivalence.verdict import Status
from refimpl import scoring
from refimpl.bits import as_int
from refimpl.qsa import qsa_indexer

IMPORTS = """
import vllm.envs as envs
from vllm.model_executor.warmup.jit_warmup_triton_helper import TritonWarmupTensor
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.utils.math_utils import round_up

WIDTH = triton.cdiv(round_up(65, 64), tl.two)
"""
KERNELS = "\nfrom fake_qsa import _prefill_logits, expand_qsa_block_indices\n"
LOGITS, EXPAND = "vllm.qsa_indexer._prefill_logits", "vllm.qsa_indexer.expand_qsa_block_indices"
CASE = tiny.qsa()
GIVEN: dict[str, Any] = {**CASE.inputs, "page_size": 4}
VISIBLE = CASE.inputs["visible_blocks"]
POSITIONS = tiny.ints(14, 33, -1, 21)
WANT = scoring.qsa_logits(**GIVEN)
SEEN = torch.arange(WANT.shape[1]) < VISIBLE[:, None]


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A machine without GPU, Triton and vLLM; what the file's kernels are."""
    fake_engines.without_gpu(monkeypatch)
    monkeypatch.delenv(vllm.FILE, raising=False)
    for name in ("vllm", "triton", "triton.language"):
        monkeypatch.setitem(sys.modules, name, None)
    made = ModuleType("fake_qsa")
    vars(made).update(
        _prefill_logits=prefill_logits, expand_qsa_block_indices=expand_qsa_block_indices
    )
    monkeypatch.setitem(sys.modules, "fake_qsa", made)
    return made


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with Triton, as far as the file's loader sees it: torch must not meet this one."""
    module, language = ModuleType("triton"), ModuleType("triton.language")
    vars(module).update(cdiv=lambda a, b: -(-a // b))
    vars(language).update(two=2)
    known = {"triton": module, "triton.language": language}
    imported, version = found.module, found.version
    monkeypatch.setattr(
        found, "module", lambda name, *, how: known.get(name) or imported(name, how=how)
    )
    monkeypatch.setattr(
        found, "version", lambda name: "triton 3.6.0" if name == "triton" else version(name)
    )


@pytest.fixture
def file(triton: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file the environment names."""
    del triton
    path = tmp_path / "qsa_indexer.py"
    path.write_text(IMPORTS + KERNELS)
    monkeypatch.setenv(vllm.FILE, str(path))
    return path


def bits(logits: Tensor) -> list[list[int]]:
    """The words of the seen cells, row by row."""
    return [as_int(row[seen]).tolist() for row, seen in zip(logits, SEEN, strict=True)]


def test_it_is_judged_bit_for_bit(file: Path, kernels: ModuleType) -> None:
    """The right bits are EQUAL; one cell by one bit is not."""
    del file
    assert check(CASE, vllm.qsa_logits).status is Status.EQUAL

    def one_ulp_off(*call: Any) -> None:  # noqa: ANN401 - tensors and numbers
        view = prefill_logits(*call)
        view[1, 7] = torch.nextafter(view[1, 7], torch.tensor(torch.inf))

    one_ulp_off.__signature__ = inspect.signature(prefill_logits)  # type: ignore[attr-defined]  # what the adapter looks at
    kernels._prefill_logits = one_ulp_off  # type: ignore[attr-defined]  # a module of ours
    vllm._of_file.cache_clear()
    verdict = check(CASE, vllm.qsa_logits)
    assert dict(verdict.stages["logits"].rules) == {"bits": 1}


@pytest.mark.parametrize("rows_per_call", [1, 3, None, 9])
@pytest.mark.parametrize("poison", [12345.0, float("nan"), None])
def test_calls_of_a_step_give_what_one_gives(
    file: Path, rows_per_call: int | None, poison: float | None
) -> None:
    """Through a workspace or into the result; what lies past the seen cells is not written."""
    del file
    rows = min(rows_per_call or 4, 4)
    held = None if poison is None else torch.full((rows * 8 + 5,), poison)
    with collected() as receipts:
        got = vllm.qsa_logits(**GIVEN, rows_per_call=rows_per_call, workspace=held)["logits"]
    assert bits(got) == bits(WANT)
    if held is not None:
        whole = torch.full_like(got, poison or 0.0)
        untouched = as_int(got) == as_int(whole)
        assert not bool((SEEN & untouched).any())
        assert bool(untouched[0, 3:].all())
        assert torch.equal(as_int(held[-5:]), as_int(whole[0, :5]))
    (told,) = receipts
    assert (told.kernel, told.calls) == (LOGITS, -(-4 // rows))


def test_a_receipt_tells_the_file_triton_rows_and_width(file: Path) -> None:
    """Of the scores and of the packed rows."""
    with collected() as receipts:
        vllm.qsa_indexer(**GIVEN, positions=POSITIONS, topk=3, rows_per_call=3)
    kernels = [each for each in receipts if each.of("vllm")]
    version = f"qsa_indexer.py xxh3 {digest.of_bytes(file.read_bytes())[:12]}"
    one = partial(Receipt, version=version, arch="cpu")
    assert kernels == [
        one(
            kernel=LOGITS,
            arguments={"width": 8, "dtype": "float8_e4m3fn", "triton": "triton 3.6.0"},
            rows=(3, 1),
            calls=2,
        ),
        one(kernel=EXPAND, arguments={"triton": "triton 3.6.0"}, rows=(4,), calls=1),
    ]


def test_a_layer_is_the_reference_s(file: Path) -> None:
    """Logits, blocks and packed rows."""
    del file
    want = qsa_indexer(**GIVEN, positions=POSITIONS, topk=3)
    got = vllm.qsa_indexer(**GIVEN, positions=POSITIONS, topk=3)
    assert bits(got["logits"]) == bits(want["logits"])
    assert torch.equal(got["block_ids"], want["block_ids"])
    assert torch.equal(got["packed"], want["packed"])


@pytest.mark.parametrize("way", [qsa.fresh, qsa.reused])
@pytest.mark.parametrize("budget", [1, 70, 1 << 20])
def test_it_scores_a_path(
    file: Path, way: Callable[..., Mapping[str, Tensor]], budget: int
) -> None:
    """Chunk by chunk it gives what the reference's scorer gives, packed rows among it."""
    del file
    how: dict[str, Any] = {"budget_bytes": budget, "topk": 3, "positions": POSITIONS}
    want = way(**GIVEN, **how, keep_logits=True)
    with collected() as receipts:
        got = way(**GIVEN, **how, keep_logits=True, scorer=vllm.score, expand=vllm.expand_blocks)
    assert got.keys() == want.keys() == {"logits", "block_ids", "packed"}
    for name, tensor in want.items():
        assert torch.equal(as_int(got[name]), as_int(tensor)), name
    assert {each.kernel for each in receipts if each.of("vllm")} == {LOGITS, EXPAND}


def test_strided_inputs_are_taken_as_they_lie(file: Path) -> None:
    """Query rows, pages and table rows that lie apart."""
    del file
    apart = {}
    for name in ("q", "k_cache", "page_table"):
        tensor = GIVEN[name]
        wide = torch.zeros((len(tensor), 2, *tensor.shape[1:]), dtype=tensor.dtype)
        apart[name] = wide[:, 0].copy_(tensor)
        assert not apart[name].is_contiguous()
    assert bits(vllm.qsa_logits(**GIVEN | apart)["logits"]) == bits(WANT)


def test_stand_ins_are_gone_once_the_file_is_loaded(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The modules of a vLLM that is installed are those from before, also after a failed load."""
    real = {name: ModuleType(name) for name in ("vllm", "vllm.envs")}
    for name, module in real.items():
        monkeypatch.setitem(sys.modules, name, module)
    before = dict(sys.modules)
    vllm.qsa_logits(**GIVEN)
    assert sys.modules == before
    file.write_text(f"{IMPORTS}\nraise RuntimeError('no')")
    vllm._of_file.cache_clear()
    assert refusal().endswith("which cannot be loaded: RuntimeError: no")
    assert sys.modules == before


def test_an_installed_module_serves_where_no_file_is_named(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its version is told."""
    installed = ModuleType("vllm")
    vars(installed)["__version__"] = "0.33.0"
    monkeypatch.setitem(sys.modules, "vllm", installed)
    name = "vllm.models.qwen4_exp.nvidia.ops.qsa_indexer"
    monkeypatch.setattr(
        found, "module", lambda asked, *, how: {"vllm": installed, name: kernels, "": how}[asked]
    )
    with collected() as receipts:
        assert bits(vllm.qsa_logits(**GIVEN)["logits"]) == bits(WANT)
    assert [(told.version, told.arch) for told in receipts] == [("0.33.0", "cpu")]


def call(**changes: Any) -> dict[str, Any]:  # noqa: ANN401 - tensors
    """What `score` is called with."""
    return {**GIVEN, "out": torch.full((4, 8), -7.0), **changes}


def step(**changes: Any) -> object:  # noqa: ANN401 - tensors
    """`qsa_logits` of what `score` is called with, but for the result."""
    return vllm.qsa_logits(**{name: value for name, value in changes.items() if name != "out"})


def refusal(of: Callable[..., object] = vllm.score, **changes: Any) -> str:  # noqa: ANN401 - tensors
    """The sentence of the UsageError, where no receipt was left."""
    with collected() as receipts, pytest.raises(UsageError) as raised:
        of(**call(**changes))
    assert receipts == []
    return str(raised.value)


HOW = "install vllm 0.33.0, or let EQUIVALENCE_VLLM_QSA name the qsa_indexer.py of its wheel"


def test_an_absent_kernel_is_said_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No vLLM; no such file; no Python file; no Triton."""
    assert refusal() == f"vllm is not installed; {HOW}"
    verdict = check(CASE, vllm.qsa_logits)
    assert verdict.findings[0].reading == f"UsageError: vllm is not installed; {HOW}"
    path = tmp_path / "qsa_indexer.py"
    names = f"{vllm.FILE} names "
    monkeypatch.setenv(vllm.FILE, str(path))
    assert refusal() == f"{names}{str(path)!r}, which is no Python file"
    other = tmp_path / "qsa_indexer.whl"
    other.write_text("")
    monkeypatch.setenv(vllm.FILE, str(other))
    assert refusal() == f"{names}{str(other)!r}, which is no Python file"
    path.write_text(IMPORTS)
    monkeypatch.setenv(vllm.FILE, str(path))
    assert refusal() == f"triton is not installed; {names}a file of Triton kernels"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", ", which has no _prefill_logits; vLLM 0.33.0 has"),
        ("x = 1 +", ", which cannot be loaded: SyntaxError: "),
        ("import vllm.other", ", which cannot be loaded: ModuleNotFoundError: No module named"),
        (
            "def _prefill_logits(q, k_cache): pass",
            ", which has a _prefill_logits of another version, of q k_cache",
        ),
        (
            "from fake_qsa import _prefill_logits",
            ", which has no expand_qsa_block_indices; vLLM 0.33.0 has",
        ),
    ],
)
def test_a_file_of_something_else_says_what_it_is(file: Path, text: str, sentence: str) -> None:
    """Broken, of another version, or no kernel file at all."""
    file.write_text(text)
    got = refusal()
    assert got.startswith(f"{vllm.FILE} names {str(file)!r}{sentence}")
    assert "\n" not in got


Q, OUT = GIVEN["q"], torch.zeros(4, 16)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"q": Q.float().bfloat16()},
            ".q is bfloat16 and k_cache float8_e4m3fn; the kernel wants one dtype",
        ),
        ({"q": Q.float()}, ".q is float32; the op wants bfloat16 or float8_e4m3fn"),
        (
            {"query_start_loc": None},
            ".page_table has 2 requests; give query_start_loc",
        ),
        (
            {"page_size": 5},
            (
                ".k_cache has shape [6, 4, 1, 32]; the op wants [pages, page_size, 1, D]"
                " with page_size = 5, not 4, in dimension 1"
            ),
        ),
        (
            {"out": OUT[:, ::2]},
            ".out [4, 8] has strides [16, 2]; the kernel wants it contiguous",
        ),
        (
            {"out": OUT[:3, :8].contiguous()},
            ".out has shape [3, 8]; the op wants [T, width] with T = 4, not 3, in dimension 0",
        ),
        (
            {"out": OUT},
            ".out is 16 wide; a row sees 8 of the page table's 8 columns",
        ),
        (
            {"out": OUT[:, :7].contiguous()},
            ".out is 7 wide; a row sees 8 of the page table's 8 columns",
        ),
        ({"out": OUT[:, :8].bfloat16()}, ".out is bfloat16; the op wants float32"),
        ({"visible_blocks": VISIBLE.long()}, ".visible_blocks is int64; the op wants int32"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(
    file: Path, changes: dict[str, Any], sentence: str
) -> None:
    """Before it is called, with what the tensor is and what would fit."""
    del file
    assert refusal(**changes) == f"{LOGITS}{sentence}"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rows_per_call": 0}, "rows_per_call is 0: it is a whole number, 1 or more"),
        (
            {"workspace": torch.zeros(31)},
            f"{LOGITS}.workspace holds 31 scores; 4 x 8 are more",
        ),
        (
            {"workspace": torch.zeros(7), "rows_per_call": 1},
            f"{LOGITS}.workspace holds 7 scores; 1 x 8 are more",
        ),
    ],
)
def test_what_a_step_does_not_take_is_refused(
    file: Path, changes: dict[str, Any], sentence: str
) -> None:
    """Rows below one, and a workspace too small for a call."""
    del file
    assert refusal(step, **changes) == sentence


def test_more_scores_than_the_kernel_counts_are_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offsets into the logits have 32 bits."""
    del file
    monkeypatch.setattr(vllm, "_MOST", 31)
    sentence = f"{LOGITS} counts scores in 32 bits; 4 x 8 are too many in a call"
    assert refusal() == sentence
    vllm.qsa_logits(**GIVEN, rows_per_call=3)


def test_no_rows_call_no_kernel(file: Path) -> None:
    """And leave no receipt."""
    del file
    none = {"q": Q[:0], "visible_blocks": VISIBLE[:0], "query_start_loc": tiny.ints(0, 0, 0)}
    with collected() as receipts:
        vllm.score(**call(**none, out=torch.zeros(0, 8)))
        assert vllm.qsa_logits(**GIVEN | none)["logits"].shape == (0, 8)
        got = vllm.qsa_indexer(**GIVEN | none, positions=POSITIONS[:0], topk=3)
    assert {name: list(tensor.shape) for name, tensor in got.items()} == {
        "logits": [0, 8],
        "block_ids": [0, 3],
        "packed": [0, 16],
    }
    assert [each for each in receipts if each.of("vllm")] == []


def test_one_request_needs_no_query_start_loc(file: Path) -> None:
    """All rows are its own."""
    del file
    one = {"page_table": GIVEN["page_table"][:1], "query_start_loc": tiny.ints(0, 4)}
    want = vllm.qsa_logits(**GIVEN | one)["logits"]
    got = vllm.qsa_logits(**{n: v for n, v in (GIVEN | one).items() if n != "query_start_loc"})
    assert bits(got["logits"]) == bits(want)


def test_host_memory_never_reaches_a_gpus_kernel(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is a GPU, tensors elsewhere are refused."""
    del file
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert refusal() == f"{LOGITS}.q is on cpu; the kernel wants a CUDA device"


def test_the_adapters_are_candidates_by_name() -> None:
    """Each is called as the op it is for."""
    for name in ("qsa_logits", "expand_blocks", "qsa_indexer"):
        assert candidate.load(f"equivalence.engines.vllm:{name}") is getattr(vllm, name)
