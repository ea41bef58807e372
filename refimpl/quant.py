"""Queries and keys as e4m3 with one scale a vector, and the head weights that carry q's scale.

amax = max |x| of the last dimension, scale = max(amax, floor) / 448, rounded up to a power of two
where the style says so, values = e4m3(x / scale). Every operation is one fp32 rounding.
With bf16 inputs and powers of two the divisions, reciprocals and logarithms that engines use all
give the same bits; with unrounded scales they do not, so a style names them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from refimpl.bits import E4M3

LARGEST = 448.0
NAN_BYTE = 0x7F
_FRACTION_BITS = 23

Scale = Literal["pow2", "exact"]
By = Literal["divide", "reciprocal"]
Order = Literal["vllm", "sglang", "gate-first"]

ORDERS: Mapping[str, tuple[str, str, str]] = {
    "vllm": ("q_scale", "softmax", "heads"),
    "sglang": ("heads", "q_scale", "softmax"),
    "gate-first": ("softmax", "heads", "q_scale"),
}
"""The factors of a head weight in the order they are multiplied, each product rounded to fp32.

vllm: vLLM 0.33.0 fused_indexer_q; sglang: SGLang `_get_logits_head_gate`, as DeepSeek's own code;
gate-first: a gate scaled before q is quantised. With pow2 scales every order has the same bits
where D and H are powers of two: D^-0.5 and H^-0.5 then have the significand of 1 or of 2^0.5.
"""


@dataclass(frozen=True, kw_only=True)
class Style:
    """How an engine quantises.

    Attributes:
        floor: the least amax, rounded to fp32.
        scale: `pow2` rounds the scale up to a power of two, `exact` leaves it.
        amax_by: `divide` is amax / 448, `reciprocal` amax * fp32(1 / 448).
        values_by: `divide` is x / scale, `reciprocal` x * fp32(1 / scale).
        order: a name in ORDERS, for the weights of queries.
    """

    floor: float
    scale: Scale = "pow2"
    amax_by: By = "divide"
    values_by: By = "divide"
    order: Order = "vllm"


STYLES: Mapping[str, Style] = {
    "v3.2-q": Style(floor=1e-10),
    "v4-q": Style(floor=1e-4),
    "sglang-q": Style(floor=1e-4, amax_by="reciprocal", order="sglang"),
    "k": Style(floor=1e-4),
    "k-exact": Style(floor=1e-4, scale="exact"),
    "k-exact-tilelang": Style(floor=1e-4, scale="exact", amax_by="reciprocal"),
    "k-exact-deepgemm": Style(floor=1e-4, scale="exact", values_by="reciprocal"),
}
"""vLLM 0.33.0: v3.2-q, v4-q, k and k-exact (`indexer_k_quant_and_cache` with and without ue8m0).

SGLang: sglang-q and k-exact-tilelang (`act_quant` with and without a scale format).
DeepGEMM: k-exact-deepgemm (the quantiser of its attention tests).
"""


def quantize(
    *,
    x: Tensor,
    floor: float,
    scale: Scale = "pow2",
    amax_by: By = "divide",
    values_by: By = "divide",
) -> tuple[Tensor, Tensor]:
    """Quantise vectors to e4m3 with a scale each.

    Args:
        x: bf16 or fp32 [..., D]. A NaN does not count for amax, as fmaxf has it, and becomes 0x7F;
            an infinity makes its vector's scale infinite, itself 0x7F and finite values zeros.
        floor: as in `Style`, and the others.
        scale: `pow2` or `exact`.
        amax_by: `divide` or `reciprocal`.
        values_by: `divide` or `reciprocal`.

    Returns:
        e4m3 [..., D] and fp32 [...].

    Raises:
        ValueError: x has another dtype or no last dimension, or a setting is unknown.
    """
    if x.dtype not in {torch.bfloat16, torch.float32} or not x.dim() or not x.shape[-1]:
        raise ValueError(f"x is {x.dtype} {list(x.shape)}: it is bf16 or fp32 [..., D], D above 0")
    if scale not in {"pow2", "exact"}:
        raise ValueError(f"scale is {scale!r}: it is 'pow2' or 'exact'")
    for name, by in (("amax_by", amax_by), ("values_by", values_by)):
        if by not in {"divide", "reciprocal"}:
            raise ValueError(f"{name} is {by!r}: it is 'divide' or 'reciprocal'")
    x = x.float()
    found = scale_of(token_amax(x), floor=floor, scale=scale, amax_by=amax_by)
    return to_e4m3(divided(x, found[..., None], by=values_by)), found


def scale_of(amax: Tensor, *, floor: float, scale: Scale, amax_by: By) -> Tensor:
    """The scale of fp32 amax of any shape."""
    floored = amax.clamp(min=floor)
    found = divided(floored, torch.full_like(floored, LARGEST), by=amax_by)
    return ceil_pow2(found) if scale == "pow2" else found


def token_amax(x: Tensor) -> Tensor:
    """Largest magnitude of the last dimension, fp32 [...]; NaNs are left out, none gives 0."""
    return x.abs().masked_fill(x.isnan(), 0).amax(-1)


def divided(x: Tensor, by_what: Tensor, *, by: By) -> Tensor:
    """`x / y`, or `x * (1 / y)` with the reciprocal rounded to fp32 first."""
    return x / by_what if by == "divide" else x * (1 / by_what)


def ceil_pow2(scale: Tensor) -> Tensor:
    """The least power of two that is not below: an exact 2^ceil(log2(s)) on the bits.

    Args:
        scale: fp32, not negative. What lies in (0, 2^-126) gives 2^-126; zero stays, inf stays.
    """
    held = scale.view(torch.int32)
    fraction = held & ((1 << _FRACTION_BITS) - 1)
    power = (held >> _FRACTION_BITS) + (fraction != 0)
    return (power.int() << _FRACTION_BITS).view(torch.float32)


def to_e4m3(x: Tensor) -> Tensor:
    """Round fp32 to e4m3fn: nearest, ties to even, past 448 and infinities saturate, NaN is 0x7F.

    That is `cvt.rn.satfinite.e4m3x2.f32`. What torch's own cast makes of a value past 464 depends
    on its version (448 in 2.13, NaN before), and it keeps the sign of a NaN; neither is used here.
    A zero and what rounds to one keep their sign.
    """
    held = x.clamp(-LARGEST, LARGEST).to(E4M3).view(torch.uint8)
    return held.masked_fill(x.isnan(), NAN_BYTE).view(E4M3)


def fold_weights(
    *,
    weights: Tensor,
    q_scale: Tensor,
    head_dim: int,
    heads: int | None = None,
    softmax_scale: float | None = None,
    order: str = "vllm",
) -> Tensor:
    """Multiply the gate of each head by q's scale, the softmax scale and H^-0.5, in an order.

    Args:
        weights: bf16 or fp32 [T, H], upcast first.
        q_scale: fp32 [T, H].
        head_dim: D; the softmax scale is D^-0.5 where none is given.
        heads: the model's, where H is padded for the kernel.
        softmax_scale: rounded to fp32, as H^-0.5 is.
        order: a name in ORDERS.

    Returns:
        fp32 [T, H].

    Raises:
        ValueError: the order is unknown, or the shapes differ.
    """
    if order not in ORDERS:
        raise ValueError(f"order is {order!r}: known are {', '.join(ORDERS)}")
    if weights.shape != q_scale.shape:
        raise ValueError(f"weights are {list(weights.shape)}: q_scale is {list(q_scale.shape)}")
    softmax = head_dim**-0.5 if softmax_scale is None else softmax_scale
    count = (heads or weights.shape[-1]) ** -0.5
    # fp32 tensors: a python float would be multiplied in another precision on some devices.
    factors = {
        "q_scale": q_scale,
        "softmax": torch.tensor(softmax, dtype=torch.float32, device=weights.device),
        "heads": torch.tensor(count, dtype=torch.float32, device=weights.device),
    }
    folded = weights.float()
    for name in ORDERS[order]:
        folded = folded * factors[name]
    return folded


def quantize_q(
    *,
    x: Tensor,
    style: str,
    weights: Tensor | None = None,
    heads: int | None = None,
    softmax_scale: float | None = None,
) -> dict[str, Tensor]:
    """What a query quantiser writes: `values` e4m3 [T, H, D], `scale` fp32 [T, H], and `weights`.

    Args:
        x: bf16 or fp32 [T, H, D].
        style: a name in STYLES.
        weights: bf16 or fp32 [T, H]; without them none come back.
        heads: as in `fold_weights`, and the last.
        softmax_scale: as in `fold_weights`.

    Raises:
        ValueError: the style is unknown, or what `quantize` and `fold_weights` raise.
    """
    made = quantize_k(x=x, style=style)
    if weights is not None:
        made["weights"] = fold_weights(
            weights=weights,
            q_scale=made["scale"],
            head_dim=x.shape[-1],
            heads=heads,
            softmax_scale=softmax_scale,
            order=STYLES[style].order,
        )
    return made


def quantize_k(*, x: Tensor, style: str) -> dict[str, Tensor]:
    """What a key quantiser writes: `values` e4m3 [T, D] and `scale` fp32 [T] of x [T, D].

    Raises:
        ValueError: the style is unknown, or what `quantize` raises.
    """
    if style not in STYLES:
        raise ValueError(f"style is {style!r}: known are {', '.join(STYLES)}")
    how = STYLES[style]
    values, scale = quantize(
        x=x, floor=how.floor, scale=how.scale, amax_by=how.amax_by, values_by=how.values_by
    )
    return {"values": values, "scale": scale}
