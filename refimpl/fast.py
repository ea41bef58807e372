"""The e4m3 chain through `torch.compile`: the bits of `tensorcore.accumulate`, much faster.

Operands become fp32 values and, beside them, powers of 2^8: 2^(8 e(x)). One GEMM of those powers
gives a sum whose exponent names the largest exponent among the products, for 32 terms cannot carry
into the next power. What is left of a step, align, truncate and add, is one fused kernel.
"""

import logging
import os
import warnings
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from refimpl import tensorcore
from refimpl.bits import E4M3, as_int
from refimpl.tensorcore import CANONICAL_NAN, INSTRUCTIONS, Instruction

_SWITCH = "EQUIVALENCE_COMPILE"
_ROWS = 64
_COLUMNS = {"cpu": 1 << 12}
_DEVICE_COLUMNS = 1 << 15
_LEAST_CELLS = 1 << 12
# 2^(8 e - 8) on one side and twice that on the other keep every sum in fp32's range, and make the
# exponent field of a sum 8 (E + 14) plus at most 5.
_POWER_BIAS = 127 - 8
_FP32_BIAS = 127
_LEAST_EXPONENT = _FP32_BIAS - 6


_reasons: dict[str, str] = {}


def available(device: str = "cpu") -> bool:
    """Say whether the compiled chain works on a device type and gives the reference's bits.

    The first call compiles; the answer is kept. `EQUIVALENCE_COMPILE=0` turns it off.
    """
    return _kernels(device) is not None


def reason(device: str = "cpu") -> str:
    """Say in one line why `available` is False, else give an empty string."""
    available(device)
    return _reasons.get(device, "")


def accumulate(a: Tensor, b: Tensor, *, instruction: Instruction) -> Tensor:
    """Chain D / k steps from c = 0, bit for bit `tensorcore.accumulate`.

    Other operands than e4m3, other outputs than e8m13, small problems and devices on which
    nothing compiles take `tensorcore.accumulate` itself.

    Args:
        a: [M, D], `instruction.operand`.
        b: [N, D], the same dtype and device.
        instruction: a row of `tensorcore.INSTRUCTIONS`.

    Returns:
        fp32 [M, N]. Working memory stays below 48 MiB at D = 128 whatever M and N.

    Raises:
        ValueError: as `tensorcore.accumulate`.
    """
    tensorcore.check_operands(a, b, instruction=instruction)
    suits = instruction.operand is E4M3 and instruction.output == "e8m13"
    if suits and a.shape[0] * b.shape[0] >= _LEAST_CELLS:
        kernels = _kernels(a.device.type)
        if kernels is not None:
            return _blocks(a, b, instruction, *kernels)
    return tensorcore.accumulate(a, b, instruction=instruction)


Decode = Callable[[Tensor], tuple[Tensor, Tensor]]
Step = Callable[[Tensor, Tensor, Tensor, Tensor, int], None]


def _decode(code: Tensor) -> tuple[Tensor, Tensor]:
    """Turn e4m3 into fp32 values and fp32 powers 2^(8 e - 8), 0 for 0 and NaN for NaN."""
    value = code.to(torch.float32)
    exponent = ((as_int(value) >> 23) & 0xFF).clamp(min=_LEAST_EXPONENT) - _FP32_BIAS
    power = ((8 * exponent + _POWER_BIAS) << 23).view(torch.float32)
    power = torch.where(value != value, value, power)  # noqa: PLR0124 - isnan, compiled best
    return value, torch.where(value == 0, 0.0, power)


def _step(a: Tensor, b: Tensor, powers: Tensor, c: Tensor, fraction_bits: int) -> None:
    """Add the products of a [k, m] and b [n, k] to c [n, m]; `powers` is the GEMM of theirs."""
    nan = (c != c) | (powers != powers)  # noqa: PLR0124 - isnan, in what compiles best
    top = torch.maximum((as_int(powers) >> 26) + 113, as_int(c) >> 23 & 0xFF)
    scale = ((254 + fraction_bits - top) << 23).view(torch.float32)
    # Converting to an integer truncates, and integers add exactly in any order.
    total = (c * scale).to(torch.int32)
    for i in range(0, a.shape[0], 2):
        even = (a[i] * b[:, i : i + 1] * scale).to(torch.int32)
        odd = (a[i + 1] * b[:, i + 1 : i + 2] * scale).to(torch.int32)
        total = total + (even + odd)
    result = total.to(torch.float32) * ((top - fraction_bits) << 23).view(torch.float32)
    c.copy_(torch.where(nan, CANONICAL_NAN, as_int(result) & -1024).view(torch.float32))


def _blocks(a: Tensor, b: Tensor, instruction: Instruction, decode: Decode, step: Step) -> Tensor:
    # A product's factors commute: the longer side is the one the kernel is dynamic in.
    if a.shape[0] > b.shape[0]:
        return _blocks(b, a, instruction, decode, step).t()
    columns = _COLUMNS.get(a.device.type, _DEVICE_COLUMNS)
    padded = torch.nn.functional.pad(a.view(torch.uint8), (0, 0, 0, -a.shape[0] % _ROWS))
    groups = padded.view(-1, _ROWS, a.shape[1])
    sides = [_operand(rows, instruction.k, decode) for rows in groups]
    sides = [(x.mT.contiguous(), 2 * powers.mT.contiguous()) for x, powers in sides]
    out = a.new_zeros((len(sides), b.shape[0], _ROWS), dtype=torch.float32)
    j = 0
    # Balanced blocks, so that none has the length 1, which would be compiled anew.
    for codes in b.view(torch.uint8).tensor_split(-(-b.shape[0] // columns)):
        y, y_powers = _operand(codes, instruction.k, decode)
        powers = out.new_empty((codes.shape[0], _ROWS))
        for (x, x_powers), whole in zip(sides, out, strict=True):
            c = whole[j : j + codes.shape[0]]
            for s in range(x.shape[0]):
                torch.mm(y_powers[s], x_powers[s], out=powers)
                step(x[s], y[s], powers, c, instruction.fraction_bits)
        j += codes.shape[0]
    return out.transpose(1, 2).flatten(0, 1)[: a.shape[0]]


def _operand(codes: Tensor, k: int, decode: Decode) -> tuple[Tensor, Tensor]:
    """Decode bytes [n, D] to values and powers [D / k, n, k]."""
    steps = codes.reshape(codes.shape[0], -1, k).transpose(0, 1).contiguous()
    value, power = decode(steps.view(E4M3).view(-1))
    return value.view(steps.shape), power.view(steps.shape)


@cache
def _kernels(device: str) -> tuple[Decode, Step] | None:
    if os.environ.get(_SWITCH) == "0":
        _reasons[device] = f"{_SWITCH}=0"
        return None
    silenced = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _compile(device)
    except Exception as error:  # noqa: BLE001 - a compiler may fail in any way; the reference remains
        _reasons[device] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        return None
    finally:
        logging.disable(silenced)


def _compile(device: str) -> tuple[Decode, Step]:
    decode: Decode = torch.compile(_decode, dynamic=True)
    compiled: Step = torch.compile(_step)

    def first_step(a: Tensor, b: Tensor, powers: Tensor, c: Tensor, fraction_bits: int) -> None:
        for x in (b, powers, c):
            torch._dynamo.mark_dynamic(x, 0)  # noqa: SLF001 - documented, without a public name
        compiled(a, b, powers, c, fraction_bits)

    # All bytes on both sides, NaN among them: a compiler that changes a bit is not used.
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    a = torch.stack([codes.roll(17 * i) for i in range(_ROWS)])[:, :64].view(E4M3)
    b = torch.stack([codes.roll(i) for i in range(256)])[:, ::4].contiguous().view(E4M3)
    instruction = INSTRUCTIONS["sm90.wgmma.e4m3"]
    got = _blocks(a, b, instruction, decode, first_step)
    want = tensorcore.accumulate(a, b, instruction=instruction)
    if not torch.equal(as_int(got), as_int(want)):
        raise RuntimeError("the compiled chain has other bits than the reference")
    return decode, compiled
