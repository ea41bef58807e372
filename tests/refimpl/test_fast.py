"""The compiled chain has the reference's bits, and steps aside where it cannot run."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from refimpl import fast, tensorcore
from refimpl.bits import E4M3, as_int
from refimpl.tensorcore import INSTRUCTIONS

SM90, SM89 = INSTRUCTIONS["sm90.wgmma.e4m3"], INSTRUCTIONS["sm89.mma.e4m3"]

KINDS = ("normal", "plateau", "subnormal", "large", "bytes", "bytes without NaN")
SHAPES = (
    (64, 64, 128, SM90),
    (70, 4099, 64, SM90),
    (300, 65, 32, SM90),
    (64, 200, 128, SM89),
)


def operands(kind: str, rows: int, dim: int) -> Tensor:
    """e4m3 [rows, dim] of one kind."""
    g = torch.Generator().manual_seed(rows * dim + len(kind))
    normal = torch.randn(rows, dim, generator=g)
    byte = torch.randint(0, 256, (rows, dim), generator=g, dtype=torch.uint8)
    return {
        "normal": normal.to(E4M3),
        "plateau": (normal.abs() * torch.where(byte < 128, -1, 1)[:, :1]).to(E4M3),
        "subnormal": (byte & 0x8F).view(E4M3),
        "large": (normal * 400).clamp(-448, 448).to(E4M3),
        "bytes": byte.view(E4M3),
        "bytes without NaN": torch.where(byte & 0x7F == 0x7F, 0, byte).view(E4M3),
    }[kind]


@pytest.fixture
def unasked(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A module that has compiled nothing yet, and forgets after the test what it was told."""
    monkeypatch.setattr(fast, "_kernels", cache(fast._kernels.__wrapped__))
    monkeypatch.setattr(fast, "_reasons", {})
    return monkeypatch


def test_the_compiled_chain_has_the_reference_s_bits() -> None:
    """Every kind of operand, in shapes around the blocks' edges, gives equal accumulators."""
    assert fast.available() or fast.reason()
    different = {
        (kind, rows, columns, dim, row.name): int((as_int(got) != as_int(want)).sum())
        for kind in KINDS
        for rows, columns, dim, row in SHAPES
        for a, b in [(operands(kind, rows, dim), operands(kind, columns, dim))]
        for got in [fast.accumulate(a, b, instruction=row)]
        for want in [tensorcore.accumulate(a, b, instruction=row)]
    }
    assert not {what: count for what, count in different.items() if count}


def test_what_does_not_suit_takes_the_reference(unasked: pytest.MonkeyPatch) -> None:
    """bf16, fp32 outputs and small problems compile nothing."""
    unasked.setattr(fast, "_compile", lambda _: pytest.fail("compiled"))
    g = torch.Generator().manual_seed(0)
    small, wide = torch.randn(5, 32, generator=g), torch.randn(80, 32, generator=g)
    for x, name in (
        (small.to(E4M3), "sm90.wgmma.e4m3"),
        (wide.to(E4M3), "sm100.f8f6f4.e4m3"),
        (wide.bfloat16(), "sm90.wgmma.bf16"),
    ):
        row = INSTRUCTIONS[name]
        want = tensorcore.accumulate(x, x, instruction=row)
        assert torch.equal(fast.accumulate(x, x, instruction=row), want)


def test_the_environment_turns_it_off(unasked: pytest.MonkeyPatch) -> None:
    """EQUIVALENCE_COMPILE=0 leaves the reference and says so."""
    unasked.setenv("EQUIVALENCE_COMPILE", "0")
    assert (fast.available(), fast.reason()) == (False, "EQUIVALENCE_COMPILE=0")


def test_a_failing_compiler_leaves_the_reference(unasked: pytest.MonkeyPatch) -> None:
    """A compiler that raises is asked once, named in one line, and changes no bit."""
    asked = []

    def fail(device: str) -> None:
        asked.append(device)
        raise OSError("no g++ here\nand more lines")

    unasked.setattr(fast, "_compile", fail)
    x = operands("normal", 80, 64)
    want = tensorcore.accumulate(x, x, instruction=SM90)
    for _ in range(2):
        assert torch.equal(fast.accumulate(x, x, instruction=SM90), want)
    assert (fast.available(), fast.reason()) == (False, "OSError: no g++ here")
    assert asked == ["cpu"]


def test_a_compiler_that_changes_a_bit_is_not_used(unasked: pytest.MonkeyPatch) -> None:
    """Kernels whose accumulators differ from the reference's are refused."""

    def uncompiled(function: Any, **_: Any) -> Any:  # noqa: ANN401 - stands for torch.compile
        return function

    def rounded(a: Tensor, b: Tensor, powers: Tensor, c: Tensor, fraction_bits: int) -> None:
        step(a, b, powers, c, fraction_bits)
        c.copy_(c.bfloat16().float())

    step = fast._step
    unasked.setattr(torch, "compile", uncompiled)
    assert fast.available()
    unasked.setattr(fast, "_kernels", cache(fast._kernels.__wrapped__))
    unasked.setattr(fast, "_step", rounded)
    assert not fast.available()
    assert "other bits than the reference" in fast.reason()


def test_operands_that_do_not_fit_are_named() -> None:
    """The errors are those of the reference."""
    x = operands("normal", 80, 48)
    with pytest.raises(ValueError, match="a has D 48"):
        fast.accumulate(x, x, instruction=SM90)
