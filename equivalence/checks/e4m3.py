"""Wrong ways to write e4m3fn, as functions of fp32 like the right one, and wrong bytes."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from refimpl import bits, quant
from refimpl.quant import LARGEST

FNUZ_LARGEST = 240.0
_FNUZ = torch.float8_e4m3fnuz
_OVERFLOW = 464.0
"""Halfway from 448 to the number that e4m3fn does not have."""

Write = Callable[[Tensor], Tensor]


def _below(x: Tensor) -> tuple[Tensor, Tensor]:
    """The e4m3 magnitude at or below |x| and the step to the next one."""
    magnitude = x.abs().clamp(max=LARGEST)
    exponent = torch.frexp(magnitude).exponent.clamp(min=-5)
    step = torch.ldexp(torch.ones_like(magnitude), exponent - 4)
    return (magnitude / step).floor() * step, step


def half_away(x: Tensor) -> Tensor:
    """Nearest, ties away from zero."""
    below, step = _below(x)
    nearest = below + step * (x.abs() - below >= step / 2)
    return quant.to_e4m3(torch.where(x.isnan(), x, nearest.copysign(x)))


def toward_zero(x: Tensor) -> Tensor:
    """Cut."""
    return quant.to_e4m3(torch.where(x.isnan(), x, _below(x)[0].copysign(x)))


def through_bf16(x: Tensor) -> Tensor:
    """Rounded to bf16 first."""
    return quant.to_e4m3(x.bfloat16().float())


def overflowing(x: Tensor) -> Tensor:
    """A signed NaN past 464, as casts that do not saturate have it."""
    held = quant.to_e4m3(x).view(torch.uint8)
    return torch.where(x.abs() > _OVERFLOW, held | quant.NAN_BYTE, held).view(bits.E4M3)


def fnuz_read(x: Tensor) -> Tensor:
    """Right bytes, read as e4m3fnuz and written again."""
    return quant.to_e4m3(quant.to_e4m3(x).view(torch.uint8).view(_FNUZ).float())


def fnuz_written(x: Tensor) -> Tensor:
    """Bytes of e4m3fnuz, which saturates at 240."""
    held = x.clamp(-FNUZ_LARGEST, FNUZ_LARGEST).to(_FNUZ)
    return held.view(torch.uint8).view(bits.E4M3)


WRITES: Mapping[str, tuple[str, Write]] = {
    "fnuz-read": (
        "e4m3fn bytes are read as e4m3fnuz: its exponent bias is 8, so values are half",
        fnuz_read,
    ),
    "fnuz-written": (
        "e4m3fnuz bytes are written: their exponent bias is 8, so e4m3fn values double",
        fnuz_written,
    ),
    "half-away": ("a tie is rounded away from zero, not to even", half_away),
    "toward-zero": ("values are cut toward zero", toward_zero),
    "through-bf16": ("x / scale is rounded to bf16 first", through_bf16),
}
"""By name: what goes wrong in words, and how it is written."""
