"""The freedoms of a candidate: one parser, closed values, documented kernels."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tomllib
from dataclasses import FrozenInstanceError, asdict, fields, replace
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equivalence.contract import (
    FREEDOMS,
    Contract,
    describe,
    named_contract,
    named_contracts,
)
from equivalence.errors import NotEquivalent, Undecided, UsageError

TABLE = {
    "sgl_kernel.fast_topk_v2": "order=any,ties=any",
    "sgl_kernel.fast_topk_transform_fused": "order=any,ties=any",
    "sgl_kernel.fast_topk_transform_ragged_fused": "order=any,ties=any",
    "sgl_kernel.deepseek_v4_topk_transform_512": "order=any,ties=any",
    "sgl_kernel.deepseek_v4_topk_transform_512:sort_output": "order=ascending,ties=any",
    "sglang.kernels.ops.attention.dsv4.topk.topk_transform_paged_v2": "order=any,ties=any",
    "sglang.kernels.ops.attention.dsv4.topk.topk_transform_ragged_v2": (
        "order=any,ties=any,writes=before-window"
    ),
    "sglang.kernels.ops.attention.dsv4.topk.topk_transform_bf16_small": "order=any,ties=any",
    "vllm._custom_ops.top_k_per_row_prefill": "order=any,ties=any",
    "vllm._custom_ops.top_k_per_row_decode": "order=any,ties=any",
    "torch.ops._C.persistent_topk": "order=any,ties=any",
    "torch.ops._C.cooperative_topk": "order=any,ties=any",
    "flashinfer.top_k": "order=any,ties=any,short_rows=any",
    "flashinfer.top_k:deterministic": "order=any,ties=any,short_rows=any",
    "flashinfer.top_k:tie_break_small": "order=any,short_rows=any",
    "flashinfer.top_k:tie_break_large": "order=any,ties=highest,short_rows=any",
    "flashinfer.top_k_page_table_transform": "order=any,ties=any",
    "flashinfer.top_k_page_table_transform:deterministic": "order=any,ties=any",
    "flashinfer.top_k_page_table_transform:tie_break_small": "order=any",
    "flashinfer.top_k_page_table_transform:tie_break_large": "order=any,ties=highest",
    "flashinfer.top_k_ragged_transform": "order=any,ties=any",
    "flashinfer.top_k_ragged_transform:deterministic": "order=any,ties=any",
    "flashinfer.top_k_ragged_transform:tie_break_small": "order=any",
    "flashinfer.top_k_ragged_transform:tie_break_large": "order=any,ties=highest",
    "deep_select.topk": "order=any,ties=any",
    "deep_select.topk:sorted_index": "order=ascending,ties=any",
    "torch.topk": "ties=any,short_rows=any,nan=first,zero_sign=equal",
    "torch.topk:unsorted": "order=any,ties=any,short_rows=any,nan=first,zero_sign=equal",
    "deep_gemm.fp8_mqa_logits": "strict",
    "deep_gemm.fp8_mqa_logits:clean": "dead=-inf",
    "deep_gemm.fp8_paged_mqa_logits": "strict",
    "vllm.models.qwen4_exp.nvidia.ops.qsa_indexer._prefill_logits": "strict",
}
KEYS = (
    "its keys are order, ties, short_rows, holes, empty_rows, minus_inf, nan, zero_sign, dead, "
    "scores, ranks, writes and reserved_pages"
)
UNKNOWN = "no documented contract is named"
NAMES = sorted(named_contracts())
FREE = st.fixed_dictionaries(
    {"reserved_pages": st.integers(0, 9)},
    optional={key: st.sampled_from(values) for key, values in FREEDOMS.items()},
)


def test_the_keys_are_the_fields() -> None:
    """Every field but the name is a key, its default the first of its values."""
    default = asdict(Contract())
    assert default.pop("name") is None
    assert default.pop("reserved_pages") == 1
    assert default == {key: values[0] for key, values in FREEDOMS.items()}
    assert {f.name for f in fields(Contract)} == {*FREEDOMS, "reserved_pages", "name"}


def test_pairs_are_read_with_commas_or_spaces() -> None:
    """What a user types and what a report prints parse alike."""
    want = Contract(order="any", ties="any", reserved_pages=4)
    assert Contract.parse("order=any,ties=any,reserved_pages=4") == want
    assert Contract.parse(" order=any ties=any, reserved_pages=4,") == want
    assert Contract.parse("strict") == Contract()
    assert Contract.parse("strict,ties=any") == Contract(ties="any")


@given(chosen=FREE, name=st.sampled_from([None, *NAMES]))
def test_a_contract_reads_back_from_its_text(chosen: dict[str, str], name: str | None) -> None:
    """str() and parse() are inverse, with and without a documented name."""
    base = named_contract(name).freedoms if name else Contract()
    contract = replace(base, **chosen)  # type: ignore[arg-type] # keys of one dict, mixed types
    again = Contract.parse(str(contract))
    assert (again, again.name) == (contract, contract.name)


def test_a_documented_name_stands_first_and_is_overridden() -> None:
    """A name gives its freedoms; pairs after it replace single ones."""
    assert Contract.parse("sgl_kernel.fast_topk_v2") == Contract(order="any", ties="any")
    overridden = Contract.parse("sgl_kernel.fast_topk_v2,dead=-inf,ties=lowest")
    assert overridden == Contract(order="any", dead="-inf")
    assert overridden.name == "sgl_kernel.fast_topk_v2"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("oder=any", "a contract has no key 'oder'; did you mean 'order'?"),
        (
            "rtol=1e-3",
            f"a contract has no key 'rtol'; {KEYS}",
        ),
        (
            "ties=lowset",
            "ties cannot be 'lowset'; it is lowest, highest, any or all; did you mean 'lowest'?",
        ),
        ("scores=1", "scores cannot be '1'; it is bits or bound"),
        (
            "reserved_pages=-1",
            "reserved_pages cannot be '-1'; it is a whole number of pages, 0 or more",
        ),
        ("order=any,order=any", "order is given twice; give it once"),
        ("", "the contract is empty; give key=value pairs, a documented name, or strict"),
        (
            "ties=any,torch.topk",
            "'torch.topk' is not key=value; a documented name stands alone or first",
        ),
        (
            "fast_topk_v2",
            f"{UNKNOWN} 'fast_topk_v2'; did you mean 'sgl_kernel.fast_topk_v2'?",
        ),
        ("name=torch.topk", f"a contract has no key 'name'; {KEYS}"),
    ],
)
def test_a_wrong_contract_says_what_would_be_right(text: str, sentence: str) -> None:
    """One sentence names the word, and the nearest or all of the right ones."""
    with pytest.raises(UsageError) as raised:
        Contract.parse(text)
    assert str(raised.value) == sentence


def test_a_name_like_no_other_lists_whose_kernels_are_known() -> None:
    """Where nothing is near, the sentence says whose kernels have contracts."""
    with pytest.raises(UsageError) as raised:
        Contract.parse("zzz")
    assert str(raised.value) == (
        f"{UNKNOWN} 'zzz'; the {len(NAMES)} documented names are those of "
        "kernels of deep_gemm, deep_select, flashinfer, sgl_kernel, sglang, torch and vllm"
    )


@pytest.mark.parametrize("pages", [True, 1.0, "1", -1])
def test_reserved_pages_is_a_whole_number(pages: object) -> None:
    """Neither a bool nor a float nor text counts pages."""
    with pytest.raises(UsageError, match="reserved_pages cannot be"):
        Contract(reserved_pages=pages)  # type: ignore[arg-type] # wrong on purpose


def test_a_contract_is_frozen_and_hashable() -> None:
    """It can be a key and cannot change; its name is no part of it."""
    contract = Contract.parse("sgl_kernel.fast_topk_v2")
    with pytest.raises(FrozenInstanceError):
        contract.order = "score"  # type: ignore[misc] # wrong on purpose
    assert {contract: 1}[Contract(order="any", ties="any")] == 1
    with pytest.raises(TypeError, match="does not support item assignment"):
        named_contracts()["x"] = named_contract("torch.topk")  # type: ignore[index] # the same


@pytest.mark.parametrize(
    ("text", "origin", "printed"),
    [
        ("strict", "default", "strict (default)"),
        ("order=any,ties=any", "argument", "order=any ties=any (argument)"),
        ("order=score", "argument", "strict (argument)"),
        (
            "sgl_kernel.fast_topk_v2",
            "record",
            "order=any ties=any (record: sgl_kernel.fast_topk_v2)",
        ),
        (
            "sgl_kernel.fast_topk_v2,ties=lowest,dead=-inf",
            "argument",
            "order=any (argument: sgl_kernel.fast_topk_v2) ties=lowest dead=-inf (argument)",
        ),
        (
            "deep_gemm.fp8_paged_mqa_logits",
            "argument",
            "strict (argument: deep_gemm.fp8_paged_mqa_logits)",
        ),
    ],
)
def test_a_report_prints_each_freedom_with_its_origin(text: str, origin: str, printed: str) -> None:
    """Strict keys are silent; what the name gives and what overrides it are kept apart."""
    assert describe(Contract.parse(text), origin=origin) == printed


def test_every_kernel_of_the_table_has_its_contract() -> None:
    """The freedoms of each named kernel, whole."""
    got = {name: named_contract(name).freedoms for name in TABLE}
    assert got == {name: Contract.parse(text) for name, text in TABLE.items()}


@pytest.mark.parametrize("name", NAMES)
def test_every_claim_has_a_source(name: str) -> None:
    """Each freedom that is not strict says where it comes from; nothing is claimed of no key."""
    entry = named_contract(name)
    strict = asdict(Contract())
    loosened = {k for k, v in asdict(entry.freedoms).items() if k != "name" and v != strict[k]}
    assert entry.freedoms.name == entry.name == name
    assert loosened <= set(entry.claims)
    assert set(entry.claims) <= {*FREEDOMS, "reserved_pages"}
    assert entry.documented <= set(entry.claims)
    assert entry.ops
    assert entry.limits
    assert all(len(text) > len("x.py:1") for text in (entry.summary, *entry.claims.values()))


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_names_its_evidence(name: str) -> None:
    """A known fault has a public thread, a line of source, or a measurement."""
    for fault in named_contract(name).faults:
        assert any(mark in fault for mark in ("#", ".cuh:", ".py:", "measured", "abort_when"))


def test_the_file_is_regular() -> None:
    """Every table of contracts.toml has the same keys, variants aside."""
    text = files("equivalence").joinpath("contracts.toml").read_text(encoding="utf-8")
    keys = {"ops", "summary", "contract", "claims", "documented", "limits", "faults"}
    assert {
        name: set(table) - {"variants"} for name, table in tomllib.loads(text).items()
    } == dict.fromkeys(tomllib.loads(text), keys)


def test_a_kernel_documented_as_approximate_gets_no_weaker_contract() -> None:
    """cooperative_topk is held to an exact set, and its departure stands among the faults."""
    entry = named_contract("torch.ops._C.cooperative_topk")
    assert entry.freedoms == Contract(order="any", ties="any")
    assert any("approximately" in fault for fault in entry.faults)


def test_contracts_are_read_without_torch() -> None:
    """Parsing a documented name imports no torch."""
    code = (
        "import sys; from equivalence.contract import Contract; "
        "Contract.parse('torch.topk'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0  # noqa: S603 - our own interpreter


@pytest.mark.parametrize("kind", [NotEquivalent, Undecided])
def test_a_failure_travels_with_its_verdict(kind: type[NotEquivalent]) -> None:
    """A pickled failure keeps its kind, text and verdict; it is an AssertionError to pytest."""
    verdict: object = ("any", "verdict")
    again = pickle.loads(pickle.dumps(kind("text", verdict)))  # type: ignore[arg-type] # noqa: S301 - our own bytes
    assert (type(again), str(again), again.verdict) == (kind, "text", verdict)
    assert isinstance(again, AssertionError)
