"""MX formats: e2m1 payloads with ue8m0 scales, how pages hold them, and how they are made."""

from typing import Literal

import torch
from torch import Tensor

from refimpl.bits import as_int

E2M1 = torch.float4_e2m1fn_x2
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK = 32
UE8M0_NAN = 0xFF
SMALLEST_NORMAL = 6 * 2.0**-126
"""The floor of amax that keeps every scale a normal number: vLLM 0.33.0, and the fake quantiser of
SGLang 0.5.23 fp4_fake_quant.py:16-47."""
PACKER = 6e-4
"""The floor of amax of the packer of index keys, whose least scale is 1e-4: SGLang 0.5.23
fp4_indexer_quant.py."""

Ties = Literal["even", "zero"]
ZeroSign = Literal["keep", "rounded", "drop"]

_SIGN = 8
_MANTISSA_OF_SIX = 0x400000
# Halfway between neighbours, in fp32; a tie goes to the even code.
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def decode_e2m1(payload: Tensor) -> Tensor:
    """Read two values a byte, the low nibble first.

    Args:
        payload: uint8 [..., D / 2]; of a nibble, bit 3 is the sign and the rest a place in
            `E2M1_VALUES`.

    Returns:
        fp32 [..., D]; code 8 is -0.
    """
    table = torch.tensor(
        [sign * value for sign in (1.0, -1.0) for value in E2M1_VALUES], device=payload.device
    )
    nibbles = torch.stack((payload & 0xF, payload >> 4), -1).flatten(-2)
    return table[nibbles.int()]


def decode_ue8m0(scales: Tensor) -> Tensor:
    """Read powers of two, uint8 to fp32: 2^(byte - 127); 255 is NaN and 0 the subnormal 2^-127."""
    exponent = scales.int()
    bits = torch.where(exponent == 0, _MANTISSA_OF_SIX, exponent << 23)
    return torch.where(exponent == UE8M0_NAN, torch.nan, bits.view(torch.float32))


def spread(scales: Tensor, *, block: int = BLOCK) -> Tensor:
    """Repeat the scale of each block for its values, [..., D / block] to [..., D]."""
    return scales.repeat_interleave(block, -1)


def dequantize(payload: Tensor, scales: Tensor) -> Tensor:
    """Multiply values with the scale of their block of 32.

    Args:
        payload: uint8 [..., D / 2], e2m1.
        scales: uint8 [..., D / 32], ue8m0.

    Returns:
        fp32 [..., D], exact; past fp32's range inf, under a NaN scale NaN.
    """
    return decode_e2m1(payload) * spread(decode_ue8m0(scales))


def scale_bytes(words: Tensor) -> Tensor:
    """Read int32 [..., n] as the ue8m0 bytes that they pack, uint8 [..., 4 n], low byte first."""
    return words.contiguous().view(torch.uint8)


def split_fp4_pages(kv_cache: Tensor, *, head_dim: int, page_size: int) -> tuple[Tensor, Tensor]:
    """Split index-K pages: the payloads of all keys of a page, then the scales of all.

    Args:
        kv_cache: uint8 [pages, page_size * (head_dim / 2 + head_dim / 32)], or the same bytes in
            more dimensions.
        head_dim: values a key, a multiple of 32.
        page_size: keys a page.

    Returns:
        Payloads uint8 [pages, page_size, head_dim / 2] and scales uint8
        [pages, page_size, head_dim / 32], views of the cache wherever its strides allow them.

    Raises:
        ValueError: the cache is not uint8, a page has another number of bytes, or D is no multiple
            of 32.

    Source: SGLang 0.5.23 deepseek_v4_memory_pool.py:745-767, vLLM 0.33.0 (`[bs*64][bs*4]`).
    """
    if head_dim % BLOCK:
        raise ValueError(f"head_dim is {head_dim}: a scale is shared by {BLOCK} values")
    return split_pages(
        kv_cache, payload=head_dim // 2, scales=head_dim // BLOCK, page_size=page_size
    )


def split_pages(
    kv_cache: Tensor, *, payload: int, scales: int, page_size: int
) -> tuple[Tensor, Tensor]:
    """Split pages of keys of `payload` bytes that are followed by keys' `scales` bytes.

    Args:
        kv_cache: uint8 [pages, page_size * (payload + scales)], or the same in more dimensions.
        payload: bytes of a key's values.
        scales: bytes of a key's scales.
        page_size: keys a page.

    Returns:
        uint8 [pages, page_size, payload] and [pages, page_size, scales].

    Raises:
        ValueError: the cache is not uint8, or a page has another number of bytes.
    """
    pages = kv_cache.flatten(1)
    width = page_size * (payload + scales)
    if kv_cache.dtype is not torch.uint8 or pages.shape[1] != width:
        raise ValueError(
            f"kv_cache is {kv_cache.dtype} with {pages.shape[1]} bytes a page: page_size "
            f"{page_size} and {payload} + {scales} bytes a key make uint8 pages of {width} bytes"
        )
    split = page_size * payload
    shape = pages.shape[0], page_size, -1
    return pages[:, :split].view(shape), pages[:, split:].view(shape)


def scale_of(amax: Tensor, *, floor: float = SMALLEST_NORMAL) -> Tensor:
    """Choose the scale of blocks: 2^ceil(log2(max(amax, floor) / 6)), read from the bits of amax.

    It is the exact ceiling. A kernel that takes an fp32 logarithm may give the next lower power
    where amax lies a few fp32 ulps above 6 * 2^n; of bf16 inputs there are no such amax.

    Args:
        amax: fp32 [...], at least 0 and finite.
        floor: `SMALLEST_NORMAL` or `PACKER`; a smaller floor than the former has no byte.

    Returns:
        uint8 [...], ue8m0.
    """
    bits = as_int(amax.clamp(min=floor))
    # 6 * 2^n is 1.5 * 2^(n + 2): what lies above it needs the next power.
    above = (bits & 0x7FFFFF) > _MANTISSA_OF_SIX
    return ((bits >> 23) - 2 + above).to(torch.uint8)


def encode_e2m1(x: Tensor, *, ties: Ties = "even", zero_sign: ZeroSign = "keep") -> Tensor:
    """Round to the nearest e2m1; past 6 it is 6.

    Args:
        x: fp32 [..., D], D even, without NaN.
        ties: a tie goes to the even code, or toward zero.
        zero_sign: `keep` gives -0 and what is rounded to it the code 8, `rounded` only the
            latter, `drop` neither.

    Returns:
        uint8 [..., D / 2], the low nibble first.
    """
    size = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for lower, middle in enumerate(_MIDPOINTS):
        code += size >= middle if ties == "even" and lower % 2 else size > middle
    signed = torch.signbit(x)
    if zero_sign != "keep":
        signed &= x != 0 if zero_sign == "rounded" else code != 0
    code |= signed * _SIGN
    return code[..., ::2] | code[..., 1::2] << 4


def quantize(
    x: Tensor,
    *,
    floor: float = SMALLEST_NORMAL,
    ties: Ties = "even",
    zero_sign: ZeroSign = "keep",
) -> tuple[Tensor, Tensor]:
    """Quantise blocks of 32 values to e2m1 with one ue8m0 scale each.

    The scale is chosen first, and values are rounded once after their exact division by it.

    Args:
        x: fp32 or bf16 [..., D], D a multiple of 32, finite.
        floor: of amax: `SMALLEST_NORMAL` or `PACKER`.
        ties: as in `encode_e2m1`; SGLang's packer rounds them toward zero unless it is told.
        zero_sign: as in `encode_e2m1`; SGLang's packer drops it, its fake quantiser keeps what
            was rounded.

    Returns:
        Payload uint8 [..., D / 2] and scales uint8 [..., D / 32].

    Raises:
        ValueError: D is no multiple of 32, or a value is not finite.

    Source: SGLang 0.5.23 fp4_fake_quant.py:16-47 and fp4_indexer_quant.py, vLLM 0.33.0 MXFP4.
    """
    if x.shape[-1] % BLOCK:
        raise ValueError(f"x has {x.shape[-1]} values a row: a scale is shared by {BLOCK}")
    values = x.to(torch.float32)
    if not bool(values.isfinite().all()):
        raise ValueError(f"x holds {int((~values.isfinite()).sum())} values that are not finite")
    scales = scale_of(values.abs().reshape(*values.shape[:-1], -1, BLOCK).amax(-1), floor=floor)
    # A reciprocal of 2^-126 .. 2^126 is a normal number too.
    inverse = decode_ue8m0(254 - scales)
    payload = encode_e2m1(values * spread(inverse), ties=ties, zero_sign=zero_sign)
    return payload, scales


def fake_quantize(
    x: Tensor, *, floor: float = SMALLEST_NORMAL, zero_sign: ZeroSign = "keep"
) -> Tensor:
    """Quantise and dequantise: the values that a layer trained for MXFP4 sees.

    Args:
        x: fp32 or bf16 [..., D].
        floor: as in `quantize`.
        zero_sign: as in `quantize`.

    Returns:
        [..., D] of the dtype of x; exact in both dtypes above bf16's subnormals.

    Source: SGLang 0.5.23 fp4_fake_quant.py:16-47.
    """
    return dequantize(*quantize(x, floor=floor, zero_sign=zero_sign)).to(x.dtype)
