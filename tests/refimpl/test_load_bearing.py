"""Every number and every order of the arithmetic is load-bearing: break one, and bits change."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from refimpl import heads, scoring, tensorcore, tiles
from refimpl.bits import E4M3, as_int
from refimpl.tensorcore import INSTRUCTIONS

CASES = Path(__file__).parents[2] / "fixtures" / "cases"
OPS: dict[str, Callable[..., Tensor]] = {
    "k": scoring.mqa_logits,
    "kv_cache": scoring.paged_mqa_logits,
    "k_cache": scoring.qsa_logits,
}
SCORING_INPUTS = {
    "k": ("q", "k", "k_scale", "weights", "row_start", "row_end"),
    "kv_cache": ("q", "kv_cache", "weights", "context_lens", "block_table"),
    "k_cache": ("q", "k_cache", "page_table", "visible_blocks", "query_start_loc"),
}
ROWS = {"q", "weights", "row_start", "row_end", "context_lens", "block_table", "visible_blocks"}
RECORDED = (
    "batch-ragged",
    "paged-decode",
    "paged-draft",
    "prefill-causal",
    "qsa-bf16",
    "qsa-fp8",
    "relu-plateau",
    "repeated-prompt",
    "short-rows",
)


@cache
def recording(name: str) -> dict[str, Tensor]:
    """The tensors of a recorded case."""
    with safe_open(CASES / f"{name}.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping


def recorded_rows(name: str, rows: list[int]) -> tuple[str, dict[str, Tensor], Tensor]:
    """The kind of keys, the inputs of these rows (of `q`) and the logits recorded for them."""
    tensors = recording(name)
    kind = next(kind for kind in OPS if f"inputs.{kind}" in tensors)
    inputs = {key: tensors[f"inputs.{key}"] for key in SCORING_INPUTS[kind]}
    logits = tensors["recorded.0.logits"]
    logits = logits.view(inputs["q"].shape[0], -1, logits.shape[1])
    if kind == "kv_cache":
        inputs["weights"] = inputs["weights"].view(*inputs["q"].shape[:-1])
    inputs = {key: x[rows] if key in ROWS else x for key, x in inputs.items()}
    if kind == "kv_cache":
        inputs["weights"] = inputs["weights"].flatten(0, 1)
    if kind == "k_cache":
        inputs["query_start_loc"] = torch.tensor([0, len(rows)], dtype=torch.int32)
    return kind, inputs, logits[rows].flatten(0, 1)


def scored(kind: str, inputs: dict[str, Tensor]) -> Tensor:
    """Logits as bits."""
    return as_int(OPS[kind](**inputs))


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_logits_are_reproduced(name: str) -> None:
    """Rows spread over each recording have the kernel's bits in all their visible columns."""
    count = recording(name)["inputs.q"].shape[0]
    kind, inputs, logits = recorded_rows(name, list(range(0, count, max(1, count // 6)))[:6])
    got = scored(kind, inputs)
    inside = got.view(torch.float32) > float("-inf")
    assert inside.any()
    assert int((got != as_int(logits))[inside].sum()) == 0


# --- subjects: inputs whose logits a mutant must change -----------------------------------------


def dense(q: Tensor, k: Tensor, weights: Tensor, k_scale: Tensor) -> tuple[str, dict[str, Tensor]]:
    """Score all of k for every row."""
    rows, columns = q.shape[0], k.shape[0]
    start = torch.zeros(rows, dtype=torch.int32)
    windows = {"row_start": start, "row_end": start + columns}
    return "k", {"q": q, "k": k, "weights": weights, "k_scale": k_scale, **windows}


def random_codes(
    *, q_bits: int = 0xFF, k_bits: int = 0xFF, special: bool = False
) -> tuple[str, dict[str, Tensor]]:
    """Random e4m3 bytes under normal weights, or under some that are inf and NaN."""
    g = torch.Generator().manual_seed(0)
    q = torch.randint(0, 256, (2, 32, 64), generator=g, dtype=torch.uint8) & q_bits
    k = torch.randint(0, 256, (128, 64), generator=g, dtype=torch.uint8) & k_bits
    weights = torch.randn(2, 32, generator=g)
    if special:
        weights[:, 3], weights[1, 4] = float("inf"), float("nan")
    return dense(q.view(E4M3), k.view(E4M3), weights, torch.rand(128, generator=g))


def sparse_codes() -> tuple[str, dict[str, Tensor]]:
    """Subnormals beside large values that always meet a zero."""
    g = torch.Generator().manual_seed(1)
    q, k = torch.rand(2, 32, 32, generator=g) / 100, torch.rand(64, 32, generator=g) / 100
    q[..., :4], k[..., :4] = 448.0, 0.0
    ones = torch.ones(2, 32)
    return dense(q.to(E4M3), k.to(E4M3), ones, torch.ones(64))


def bf16(q: Tensor, k: Tensor) -> tuple[str, dict[str, Tensor]]:
    """Score q [T, 4, D] against k [n, D] as one page."""
    return "k_cache", {
        "q": q,
        "k_cache": k[None, :, None],
        "page_table": torch.zeros(1, 1, dtype=torch.int32),
        "visible_blocks": torch.full(q.shape[:1], k.shape[0], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, q.shape[0]], dtype=torch.int32),
    }


def bf16_infinities() -> tuple[str, dict[str, Tensor]]:
    """Normal numbers, and in one place of each head +inf."""
    g = torch.Generator().manual_seed(3)
    q, k = torch.randn(8, 4, 32, generator=g), torch.randn(64, 32, generator=g)
    q[..., 5] = float("inf")
    return bf16(q.bfloat16(), k.bfloat16())


def fp64_tie() -> tuple[str, dict[str, Tensor]]:
    """1 + 2^-23 plus a little less than half its ulp: fp64 makes a tie of the sum."""
    r = next(r for r in range(8193, 16384) if 0 < 2**37 % r < 2**8)
    place = torch.arange(32)
    q, weights = torch.zeros(1, 16, 32), torch.zeros(1, 16)
    q[0, 0, :14] = 2.0 ** (place[:14] // 2) * (r >> place[:14] & 1)
    q[0, 8, 0] = 1.0
    k = torch.zeros(1, 32)
    k[0, :14] = 2.0 ** ((place[:14] + 1) // 2)
    weights[0, 0], weights[0, 8] = (2**37 // r) * 2.0**-61, 1 + 2.0**-23
    return dense(q.to(E4M3), k.to(E4M3), weights, torch.ones(1))


def bf16_subnormals() -> tuple[str, dict[str, Tensor]]:
    """bf16 subnormals times large values of many exponents."""
    g = torch.Generator().manual_seed(2)
    q = torch.randint(0, 0x80, (8, 4, 32), generator=g).to(torch.int16).view(torch.bfloat16)
    exponent = torch.randint(80, 110, (64, 32), generator=g)
    k = torch.randn(64, 32, generator=g) * 2.0**exponent
    return bf16(q, k.bfloat16())


def bf16_underflow() -> tuple[str, dict[str, Tensor]]:
    """Negative sums below the smallest fp32 subnormal."""
    q = torch.full((1, 4, 32), 2.0**-80).bfloat16()
    return bf16(q, -q[0, :1].expand(64, 32))


def slice_of(name: str, rows: list[int], columns: int) -> tuple[str, dict[str, Tensor]]:
    """A few rows and columns of a recording."""
    kind, inputs, _ = recorded_rows(name, rows)
    if kind == "k":
        inputs["row_end"] = torch.minimum(inputs["row_end"], inputs["row_start"] + columns)
    return kind, inputs


SUBJECTS: dict[str, Callable[[], tuple[str, dict[str, Tensor]]]] = {
    "prefill-causal": lambda: slice_of("prefill-causal", [9, 40], 200),
    "qsa-bf16": lambda: slice_of("qsa-bf16", [70, 71, 72], 0),
    "any bytes": random_codes,
    "inf and NaN weights": lambda: random_codes(q_bits=0xF7, k_bits=0xF7, special=True),
    "subnormals": lambda: random_codes(q_bits=0x87, k_bits=0xF7),
    "zeros beside large": sparse_codes,
    "a tie in fp64": fp64_tie,
    "bf16 infinities": bf16_infinities,
    "bf16 subnormals": bf16_subnormals,
    "bf16 underflow": bf16_underflow,
}


@cache
def intact(subject: str) -> Tensor:
    """What the unbroken reference makes of a subject."""
    return scored(*SUBJECTS[subject]())


# --- mutants ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One rule broken: `module.name` is replaced, and the bits of `subject` must change."""

    subject: str
    module: ModuleType
    name: str
    value: Any


def instruction(subject: str, row: str, **change: Any) -> Mutant:  # noqa: ANN401 - any field
    """Another number in one row of the instruction table."""
    table = {**INSTRUCTIONS, row: replace(INSTRUCTIONS[row], **change)}
    return Mutant(subject=subject, module=tiles, name="INSTRUCTIONS", value=table)


def profile(**change: Any) -> Mutant:  # noqa: ANN401 - any field
    """Another choice in the profile of DeepGEMM."""
    table = {"deep_gemm.sm90": replace(scoring.PROFILES["deep_gemm.sm90"], **change)}
    return Mutant(subject="prefill-causal", module=scoring, name="PROFILES", value=table)


def rule(subject: str, module: ModuleType, name: str, value: Any) -> Mutant:  # noqa: ANN401
    """Another function in the place of one rule."""
    return Mutant(subject=subject, module=module, name=name, value=value)


def quad(order: Callable[[int, int, int, int], int]) -> Callable[[int], list[list[list[int]]]]:
    """Another table of heads: `order(G, g, c, b)`."""
    return lambda count: [
        [[order(count // 8, g, c, b) for g in range(count // 8)] for b in (0, 1)] for c in range(4)
    ]


def left_to_right(v: Tensor) -> Tensor:
    """Add four lanes one by one."""
    return ((v[..., 0, :] + v[..., 1, :]) + v[..., 2, :]) + v[..., 3, :]


def crosswise(v: Tensor) -> Tensor:
    """Add lanes 0 and 2 first."""
    return (v[..., 0, :] + v[..., 2, :]) + (v[..., 1, :] + v[..., 3, :])


def no_output_rounding(x: Tensor, **_: Any) -> Tensor:  # noqa: ANN401 - the rule's keywords
    """Round to nearest fp32 and keep every bit."""
    return x.to(torch.float32)


def power_of_zero(x: Tensor, *, min_exponent: int) -> Tensor:
    """Give zero the exponent of the subnormals."""
    return POWER(x, min_exponent=min_exponent).clamp(min=2.0**min_exponent)


def renormalised(x: Tensor, y: Tensor, *, min_exponent: int) -> Tensor:
    """Take the exponent of the product itself."""
    return POWER(x * y, min_exponent=2 * min_exponent)


def without_c(products: Tensor, c: Tensor) -> Tensor:
    """Align to the products alone."""
    return ALIGNMENT(products, torch.zeros_like(c))


POWER, ALIGNMENT = tensorcore.power, tensorcore.alignment
E4M3_ROW, BF16_ROW = "sm90.wgmma.e4m3", "sm90.wgmma.bf16"
DENSE, QSA = "prefill-causal", "qsa-bf16"
MUTANTS = {
    "e4m3: F 12": instruction(DENSE, E4M3_ROW, fraction_bits=12),
    "e4m3: F 14": instruction(DENSE, E4M3_ROW, fraction_bits=14),
    "e4m3: F 25": instruction(DENSE, E4M3_ROW, fraction_bits=25),
    "e4m3: k 16": instruction(DENSE, E4M3_ROW, k=16),
    "e4m3: k 64": instruction(DENSE, E4M3_ROW, k=64),
    "e4m3: fp32 output": instruction(DENSE, E4M3_ROW, output="fp32"),
    "e4m3: subnormals go down to -7": instruction("subnormals", E4M3_ROW, min_exponent=-7),
    "e4m3: subnormals have exponents": instruction("subnormals", E4M3_ROW, min_exponent=-9),
    "bf16: F 24": instruction(QSA, BF16_ROW, fraction_bits=24),
    "bf16: F 26": instruction(QSA, BF16_ROW, fraction_bits=26),
    "bf16: k 8": instruction(QSA, BF16_ROW, k=8),
    "bf16: k 32": instruction(QSA, BF16_ROW, k=32),
    "bf16: e8m13 output": instruction(QSA, BF16_ROW, output="e8m13"),
    "bf16: output to nearest": rule(QSA, tensorcore, "round_output", no_output_rounding),
    "bf16: subnormals have exponents": instruction("bf16 subnormals", BF16_ROW, min_exponent=-133),
    "bf16: no inf": rule("bf16 infinities", tensorcore, "ieee_specials", lambda total, *_: total),
    "e4m3: addends to nearest": rule(DENSE, tensorcore, "truncate", torch.round),
    "e4m3: addends down": rule(DENSE, tensorcore, "truncate", torch.floor),
    "bf16: addends to nearest": rule(QSA, tensorcore, "truncate", torch.round),
    "products whole": rule(
        DENSE, tensorcore, "truncate", lambda x: x.trunc() if x.ndim == 2 else x
    ),
    "c whole": rule(DENSE, tensorcore, "truncate", lambda x: x.trunc() if x.ndim == 3 else x),
    "output mask left out": rule(DENSE, tensorcore, "round_output", no_output_rounding),
    "zero operands align": rule("zeros beside large", tensorcore, "power", power_of_zero),
    "products renormalised": rule(DENSE, tensorcore, "product_powers", renormalised),
    "c does not align": rule(DENSE, tensorcore, "alignment", without_c),
    "no ReLU": rule(DENSE, heads, "relu", lambda acc: acc),
    "NaN through the ReLU": rule("any bytes", heads, "relu", torch.relu),
    "-0 through the ReLU": rule(
        "bf16 underflow", heads, "relu", lambda acc: torch.where(acc >= 0, acc, 0.0)
    ),
    "NaN of the device": rule("inf and NaN weights", tiles, "canonical_nan", lambda x: x),
    "heads in eights": rule(
        DENSE, heads, "quad_heads", quad(lambda n, g, c, b: n * (2 * c + b) + g)
    ),
    "pairs four apart": rule(
        DENSE, heads, "quad_heads", quad(lambda _, g, c, b: 8 * g + c + 4 * b)
    ),
    "lanes 1 and 2 changed": rule(
        DENSE, heads, "quad_heads", quad(lambda _, g, c, b: 8 * g + 2 * (0, 2, 1, 3)[c] + b)
    ),
    "heads backward": rule(
        DENSE, heads, "quad_heads", quad(lambda n, g, c, b: 8 * (n - 1 - g) + 2 * c + b)
    ),
    "the rounded product is 0": profile(rounded_product=0),
    "the rounded product is 2": profile(rounded_product=2),
    "fused from the end": rule(
        DENSE,
        heads,
        "fused_order",
        lambda count, *, rounded: [g for g in reversed(range(count)) if g != rounded],
    ),
    "every product rounded": rule(DENSE, heads, "fma", lambda a, b, c: a * b + c),
    "fma through fp64 alone": rule(
        "a tie in fp64",
        heads,
        "fma",
        lambda a, b, c: (a.double() * b.double() + c.double()).float(),
    ),
    "scale after the lanes": profile(scale="sum"),
    "lanes left to right": rule(DENSE, heads, "add_lanes", left_to_right),
    "lanes crosswise": rule(DENSE, heads, "add_lanes", crosswise),
    "qsa heads left to right": rule(QSA, heads, "add_lanes", left_to_right),
    "qsa heads crosswise": rule(QSA, heads, "add_lanes", crosswise),
    "everything in fp64": profile(instructions=None, reduction="fp64"),
}
UNSEEN = {
    "lanes 0 and 1 changed": rule(
        DENSE, heads, "quad_heads", quad(lambda _, g, c, b: 8 * g + 2 * (1, 0, 2, 3)[c] + b)
    ),
    "a lane's two sums changed": rule(
        DENSE, heads, "quad_heads", quad(lambda _, g, c, b: 8 * g + 2 * c + 1 - b)
    ),
    "-0 through the ReLU of e4m3 sums": rule(
        "any bytes", heads, "relu", lambda acc: torch.where(acc >= 0, acc, 0.0)
    ),
}


def broken(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many logits of the subject differ under the mutant."""
    want = intact(mutant.subject)
    monkeypatch.setattr(mutant.module, mutant.name, mutant.value)
    return int((scored(*SUBJECTS[mutant.subject]()) != want).sum())


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_rule_changes_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mutant changes at least one logit."""
    assert broken(MUTANTS[name], monkeypatch) > 0


@pytest.mark.parametrize("name", UNSEEN)
def test_what_commutes_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 addition commutes and no sum of e4m3 products is -0: these are no rules."""
    assert broken(UNSEEN[name], monkeypatch) == 0
