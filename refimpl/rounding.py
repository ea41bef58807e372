"""How far a kernel may lie from the formula: scores in fp64, and a bound derived from the inputs.

Every step of a kernel is bounded by one unit in the place that it keeps, of what it may be there.
For one query, one key and head h with dot products a, weights w and a key's scale:

1. *Dot.* A tensor-core step adds products to the accumulator c. Each addend is cut below 2^(E - F),
   so it loses less than that; E is the largest exponent of the products, which `_top` never gives
   too low, or that of |c| <= |exact partial dot| + error so far. The sum is cut to B bits and
   loses less than its last unit. So e(h), the error of a(h), is a sum over steps.
2. *ReLU* moves two numbers no further apart: r(h) <= top(h) = relu(a(h) + e(h)), and it is off by
   at most top(h) - relu(a(h)). Where top(h) is 0 a kernel has exactly 0, which rounds nothing.
3. *Rounding* x to nearest is off by at most half a unit, u 2^floor(log2 |x|), u = 2^-24 for fp32
   and 2^-8 for bf16, plus 2^-126 where it is subnormal or flushed. bf16 sums round r(h), and w(h)
   where it is wider.
4. *Heads in a documented order.* Each partial sum s of w r has an error e; the kernel's own s, at
   most |s| + e, is rounded, which adds half its unit. A fused product is rounded with its sum.
5. *Heads in any order.* With n heads that are not 0, a term passes at most n + 3 roundings: its
   product, n additions, its scale and one to spare. So the sum is off by at most
   ((1 + u)^(n + 3) - 1) sum |w| top, beside the errors of the terms.
6. *Scale and logit* are roundings like others. A bound is no bound where a partial sum may pass
   2^126 or an operand is not finite: then it is inf.

fp64 adds errors of its own, of the dot and of the sum over heads; both are in the units below.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from refimpl import heads, mx
from refimpl.bits import E4M3
from refimpl.profiles import Profile
from refimpl.published import values
from refimpl.scaled import BLOCK_SCALED
from refimpl.tensorcore import INSTRUCTIONS, power

_UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
_SUBNORMAL = 2.0**-126
_LARGEST = 2.0**126
_OUTPUT_BITS = {"e8m13": 13, "fp32": 23}
LEAST_EXPONENT = {E4M3: -6, torch.bfloat16: -126, torch.uint8: 0}
# |a b| is at most 4 powers; a group of 16 products of e2m1 holds up to 16 * 36. Doubled.
_FP64_UNIT, _MOST_POWERS = 2.0**-52, 1152
_SLACK = 1 + 2.0**-30


@dataclass(frozen=True, kw_only=True)
class Dot:
    """What is known of a tensor-core step.

    Attributes:
        k: products that are added to an accumulator at once, at least.
        span: the same, at most.
        fraction_bits: kept of an addend below the largest exponent of its step, at least.
        output_bits: fraction bits of an accumulator, at least.
        group: products that are added exactly first.
    """

    k: int
    span: int
    fraction_bits: int
    output_bits: int
    group: int = 1


ANY_DOT = Dot(k=16, span=32, fraction_bits=13, output_bits=13)
"""No known tensor core does worse: steps of 16 or 32, F at least 13, and sums in fp32 as well."""


def block(
    q: Tensor,
    q_scale: Tensor | None,
    k: Tensor,
    k_scale: Tensor | None,
    weights: Tensor | None,
    *,
    profile: Profile,
) -> tuple[Tensor, Tensor]:
    """Score and bound a block, q [R, H, D] against k [n, D]: fp64 [R, n] twice."""
    scaled = q_scale is not None
    dot = dot_of(profile, q.dtype, scaled=scaled)
    flat = None if q_scale is None else q_scale.flatten(0, 1)
    x = operand(q.flatten(0, 1), flat, group=dot.group)
    y = operand(k, k_scale if scaled else None, group=dot.group)
    acc, error = (t.view(*q.shape[:2], -1) for t in dots(x, y, dot=dot))
    scale = None if scaled or k_scale is None else k_scale.to(torch.float64)
    return _reduce(acc, error, weights, scale, profile=profile)


def dot_of(profile: Profile, operand: torch.dtype, *, scaled: bool) -> Dot:
    """What a profile knows of the step that takes such operands."""
    kind = mx.E2M1 if operand is torch.uint8 else operand
    table, names = (
        (BLOCK_SCALED, profile.scaled) if scaled else (INSTRUCTIONS, profile.instructions)
    )
    if names is None:
        return ANY_DOT
    row = table[names[kind]]
    return Dot(
        k=row.k,
        span=row.k,
        fraction_bits=row.fraction_bits,
        output_bits=_OUTPUT_BITS[row.output],
        group=row.group,
    )


def operand(x: Tensor, scale: Tensor | None, *, group: int) -> tuple[Tensor, Tensor]:
    """Values [N, D] with their scales, and the powers of addends' exponents [N, D / group]."""
    v = values(x)
    least = LEAST_EXPONENT[x.dtype]
    powers = power(v, min_exponent=least) if group == 1 else torch.ones_like(v)
    if scale is not None:
        factor = mx.spread(mx.decode_ue8m0(scale).to(torch.float64))
        v, powers = v * factor, powers * factor
    return v, powers[:, ::group]


def _top(x: Tensor, y: Tensor) -> Tensor:
    """The 8-norm of x[i, d] * y[j, d] over d: at least the largest, and less than twice it."""
    a, b = (t.amax(1, keepdim=True) for t in (x, y))
    p, q = (
        (t / most.clamp(min=2.0**-500)).square().square().square() for t, most in ((x, a), (y, b))
    )
    # What underflows below lies under 2^-120 of the largest.
    norm = (p @ q.t() + 2.0**-960).sqrt().sqrt().sqrt()
    return norm * (a * b.t())


def _power(most: Tensor) -> Tensor:
    """The power of two at or below a number that fp64 may have made a little too small."""
    return power(most * _SLACK, min_exponent=-900)


def dots(x: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor], *, dot: Dot) -> tuple[Tensor, Tensor]:
    """Step 1: exact dots [M, N] and their error."""
    (a, a_powers), (b, b_powers) = x, y
    acc = a.new_zeros((a.shape[0], b.shape[0]))
    error = torch.zeros_like(acc)
    addends = dot.k // dot.group + 1
    unit = addends * 2.0**-dot.fraction_bits + a.shape[1] * _MOST_POWERS * _FP64_UNIT
    for first in range(0, a.shape[1], dot.span):
        end = min(first + dot.span, a.shape[1])
        groups = slice(first // dot.group, end // dot.group)
        top = _power(_top(a_powers[:, groups], b_powers[:, groups]))
        for at in range(first, end, dot.k):
            top = torch.maximum(top, _power(acc.abs() + error))
            acc = acc + a[:, at : at + dot.k] @ b[:, at : at + dot.k].t()
            error = error + unit * top + _SUBNORMAL * (top > _SUBNORMAL)
            error = error + 2.0**-dot.output_bits * _power(acc.abs() + error)
    return acc, error


def _reduce(
    acc: Tensor,
    error: Tensor,
    weights: Tensor | None,
    scale: Tensor | None,
    *,
    profile: Profile,
) -> tuple[Tensor, Tensor]:
    """Steps 2 to 6: [R, H, n] to scores and bound [R, n]."""
    u = _UNIT[profile.sums]
    r, top = acc.clamp(min=0), (acc + error).clamp(min=0)
    off = top - r
    if profile.sums is torch.bfloat16:
        rounded = _half_unit(top, u) * (top > 0)
        off, top = off + rounded, top + rounded
    if weights is None:
        term, most = r, top
    else:
        w = weights.to(torch.float64)[:, :, None]
        term, most, off = w * r, w.abs() * top, w.abs() * off
        if weights.dtype is torch.float32 and profile.sums is torch.bfloat16:
            off, most = off * (1 + u) + u * most, most * (1 + u)
    live = most > 0
    total, count = most.sum(1), live.sum(1)
    if profile.order == "any" or (weights is None and profile.reduction != "pairs"):
        score = term.sum(1)
        growth = torch.expm1((count + 3).to(total.dtype) * math.log1p(u))
        bound = off.sum(1) + growth * total + (2 * count + 3) * _SUBNORMAL
        score, bound = _times(score, bound, scale)
    else:
        score, bound = _ordered(term, off, live, scale, profile=profile, exact=weights is None)
    largest = torch.maximum(total, top.amax(1))
    if scale is not None:
        total, bound = total * scale.abs(), bound + _SUBNORMAL
        largest = torch.maximum(largest, total)
    if profile.logits is torch.bfloat16 and (profile.sums is torch.float32 or scale is not None):
        bound = bound + _half_unit(score.abs() + bound, _UNIT[torch.bfloat16])
    bound = bound * _SLACK + 2.0**-44 * total
    known = (largest < _LARGEST) & bound.isfinite() & score.isfinite()
    # Where no head can be positive every kernel adds zeros.
    bound = torch.where(count == 0, 0.0, bound)
    return score, torch.where(known, bound, torch.inf)


def _half_unit(most: Tensor, u: float) -> Tensor:
    """What rounding a number of at most this size may change."""
    return u * _power(most) + _SUBNORMAL


def _times(score: Tensor, bound: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    return (score, bound) if scale is None else (score * scale, bound * scale.abs())


def _ordered(
    term: Tensor,
    off: Tensor,
    live: Tensor,
    scale: Tensor | None,
    *,
    profile: Profile,
    exact: bool,
) -> tuple[Tensor, Tensor]:
    """Step 4: lanes of heads, then pairs of lanes; `exact` where a lane's first term needs none."""
    u = _UNIT[profile.sums]
    order = torch.tensor(_lanes(profile, term.shape[1]), device=term.device)
    s, e = torch.zeros_like(term[:, order[:, 0]]), torch.zeros_like(term[:, order[:, 0]])
    for place in range(order.shape[1]):
        at = order[:, place]
        s, e = s + term[:, at], e + off[:, at]
        if place or not exact:
            e = e + live[:, at] * _half_unit(s.abs() + e, u)
    early = profile.reduction == "quad" and profile.scale == "lane" and scale is not None
    while s.shape[1] > 1:
        s, e = s[:, ::2] + s[:, 1::2], e[:, ::2] + e[:, 1::2]
        e = e + _half_unit(s.abs() + e, u)
        if early and s.shape[1] == len(heads.quad_heads(8)):
            s, e = _times(s, e, scale)
            e = e + _half_unit(s.abs() + e, u)
    s, e = s[:, 0], e[:, 0]
    if scale is not None and not early:
        s, e = _times(s, e, scale)
        e = e + _half_unit(s.abs() + e, _UNIT[torch.float32])
    return s, e


def _lanes(profile: Profile, count: int) -> list[list[int]]:
    """The heads of each lane in the order of their addition; neighbours are added first."""
    if profile.reduction == "quad":
        rounded = profile.rounded_product
        places = [rounded, *heads.fused_order(count // 8, rounded=rounded)]
        return [[lane[g] for g in places] for pair in heads.quad_heads(count) for lane in pair]
    if profile.reduction == "packed":
        lanes = heads.packed_heads(count)
        return [lanes[c] for c in (0, 2, 1, 3)]
    return [[head] for head in range(count)]
