"""Quantisers with one fault each: what wrong rows hold if that is what went wrong."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from equivalence.checks import e4m3
from equivalence.checks.fault import Asked, Fault, Outputs
from refimpl import quant
from refimpl.quant import ORDERS, STYLES, Style

Round = Callable[[Tensor], Tensor]
_FEW = 256  # rows at a time


def _style(asked: Asked) -> Style:
    return STYLES[asked.params["style"]]


def _x(asked: Asked) -> Tensor:
    return asked.inputs["x"][asked.rows].float()


def _scale(asked: Asked, amax: Tensor | None = None, style: Style | None = None) -> Tensor:
    """The scale of the case's style, or of another one, or of another amax."""
    how = style or _style(asked)
    amax = quant.token_amax(_x(asked)) if amax is None else amax
    return quant.scale_of(amax, floor=how.floor, scale=how.scale, amax_by=how.amax_by)


def _exact(asked: Asked) -> Tensor:
    return _scale(asked, style=replace(_style(asked), scale="exact"))


def _made(
    asked: Asked,
    scale: Tensor,
    *,
    stored: Tensor | None = None,
    encode: Round = quant.to_e4m3,
    style: Style | None = None,
) -> Outputs:
    """Values divided by one scale, beside it or another one and the weights that carry that."""
    by = (style or _style(asked)).values_by
    stored = scale if stored is None else stored
    values = encode(quant.divided(_x(asked), scale[..., None], by=by))
    return {"values": values, "scale": stored, **_folded(asked, stored)}


def _folded(asked: Asked, scale: Tensor, changed: Mapping[str, Any] | None = None) -> Outputs:
    """Weights that carry this scale; none where the case has none."""
    if "weights" not in asked.inputs:
        return {}
    params = {n: asked.params[n] for n in ("heads", "softmax_scale") if n in asked.params}
    settings = {"order": _style(asked).order} | params | dict(changed or {})
    weights, dim = asked.inputs["weights"][asked.rows], asked.inputs["x"].shape[-1]
    folded = quant.fold_weights(weights=weights, q_scale=scale, head_dim=dim, **settings)
    return {"weights": folded}


def _styled(asked: Asked, changed: Mapping[str, Any]) -> Outputs:
    """The quantiser of a style that differs in a setting; nothing where it does not."""
    other = replace(_style(asked), **changed)
    if other == _style(asked):
        return {}
    return _made(asked, _scale(asked, style=other), style=other)


def _late_rounding(asked: Asked) -> Outputs:
    if _style(asked).scale == "exact":
        return {}
    return _made(asked, _exact(asked), stored=quant.ceil_pow2(_exact(asked)))


def _inflation(asked: Asked) -> str:
    """The power of two by the unrounded scale, of the vectors where they differ."""
    exact = _exact(asked)
    ratio = (quant.ceil_pow2(exact) / exact)[exact != quant.ceil_pow2(exact)]
    ends = dict.fromkeys(f"{float(end):.4g}" for end in (ratio.min(), ratio.max()))
    return f" (per-token ratio {' to '.join(ends)})"


def _rounded(asked: Asked, rounding: Round, encode: Round = quant.to_e4m3) -> Outputs:
    """A power of two that is not the next one up."""
    if _style(asked).scale == "exact":
        return {}
    return _made(asked, rounding(_exact(asked)), encode=encode)


def _overflowing(asked: Asked) -> Outputs:
    made = _rounded(asked, _floor_pow2, encode=e4m3.overflowing)
    return {"values": made["values"]} if made else {}


def _floor_pow2(scale: Tensor) -> Tensor:
    return torch.ldexp(torch.full_like(scale, 0.5), torch.frexp(scale).exponent)


def _nearest_pow2(scale: Tensor) -> Tensor:
    return scale.log2().round().exp2()


def _float_log_pow2(scale: Tensor) -> Tensor:
    return scale.log2().ceil().exp2()


def _as_styled(asked: Asked, scale: Tensor) -> Outputs:
    """With another scale, rounded as the style says."""
    return _made(asked, quant.ceil_pow2(scale) if _style(asked).scale == "pow2" else scale)


def _by_largest(asked: Asked, largest: float) -> Outputs:
    return _as_styled(asked, quant.token_amax(_x(asked)).clamp(min=_style(asked).floor) / largest)


def _late_floor(asked: Asked) -> Outputs:
    unfloored = _scale(asked, style=replace(_style(asked), floor=0.0, scale="exact"))
    return _as_styled(asked, unfloored.clamp(min=_style(asked).floor))


def _shared(asked: Asked, share: Callable[[Asked], Tensor | None]) -> Outputs:
    """One amax for more than a vector."""
    amax = share(asked)
    return {} if amax is None else _made(asked, _scale(asked, amax))


def _every_amax(asked: Asked) -> Tensor:
    """Of every vector of the call, a few rows at a time."""
    x = asked.inputs["x"]
    cuts = range(0, len(x), _FEW)
    return torch.cat([quant.token_amax(x[first : first + _FEW].float()) for first in cuts])


def _of_tensor(asked: Asked) -> Tensor:
    return _every_amax(asked).amax().expand(_x(asked).shape[:-1])


def _of_head(asked: Asked) -> Tensor | None:
    shape = _x(asked).shape[:-1]
    return _every_amax(asked).amax(0).expand(shape) if len(shape) > 1 else None


def _of_heads(asked: Asked, size: int | None = None) -> Tensor | None:
    """One amax for each group of heads, or for all heads of a token."""
    amax = quant.token_amax(_x(asked))
    if amax.dim() == 1 or (size and (size >= amax.shape[1] or amax.shape[1] % size)):
        return None
    groups = amax.view(len(amax), -1, size or amax.shape[1])
    return groups.amax(2, keepdim=True).expand_as(groups).flatten(1)


def _signed(asked: Asked) -> Outputs:
    return _made(asked, _scale(asked, _x(asked).amax(-1)))


def _undivided(asked: Asked) -> Outputs:
    return _made(asked, torch.ones_like(_scale(asked)), stored=_scale(asked))


def _inverted(asked: Asked) -> Outputs:
    return _made(asked, _scale(asked), stored=1 / _scale(asked))


def _encoded(asked: Asked, encode: Round) -> Outputs:
    return _made(asked, _scale(asked), encode=encode)


def _refolded(asked: Asked, changed: Mapping[str, Any]) -> Outputs:
    scale = _scale(asked)
    return {**_made(asked, scale), **_folded(asked, scale, changed)}


def _unscaled_weights(asked: Asked) -> Outputs:
    scale = _scale(asked)
    return {**_made(asked, scale), **_folded(asked, torch.ones_like(scale))}


def _bf16_weights(asked: Asked) -> Outputs:
    scale = _scale(asked)
    rounded = {name: held.bfloat16().float() for name, held in _folded(asked, scale).items()}
    return {**_made(asked, scale), **rounded}


_DOWN = "the scale is rounded down to a power of two"

FAULTS: Mapping[str, Fault] = {
    "late-rounding": Fault(
        cause="values are divided by the unrounded scale and a power of two is stored",
        outputs=_late_rounding,
        note=_inflation,
    ),
    "unrounded": Fault(
        cause="the scale is not rounded up to a power of two",
        outputs=partial(_styled, changed={"scale": "exact"}),
        note=_inflation,
    ),
    "rounded": Fault(
        cause="the scale is rounded up to a power of two, which the style does not do",
        outputs=partial(_styled, changed={"scale": "pow2"}),
        note=_inflation,
    ),
    "rounded-down": Fault(cause=_DOWN, outputs=partial(_rounded, rounding=_floor_pow2)),
    "overflow": Fault(
        cause=f"{_DOWN} and what is past 464 becomes NaN",
        outputs=_overflowing,
    ),
    "rounded-nearest": Fault(
        cause="the scale is rounded to the nearest power of two, not up",
        outputs=partial(_rounded, rounding=_nearest_pow2),
    ),
    "float-log": Fault(
        cause="log2 of the scale is rounded to fp32 before it is rounded up",
        outputs=partial(_rounded, rounding=_float_log_pow2),
    ),
    "undivided-amax": Fault(
        cause="amax is not divided by 448", outputs=partial(_by_largest, largest=1.0)
    ),
    "fnuz-largest": Fault(
        cause="amax is divided by 240, the largest of e4m3fnuz",
        outputs=partial(_by_largest, largest=e4m3.FNUZ_LARGEST),
    ),
    "no-floor": Fault(cause="amax has no floor", outputs=partial(_styled, changed={"floor": 0.0})),
    **{
        f"floor-{floor:g}": Fault(
            cause=f"amax has the floor {floor:g}",
            outputs=partial(_styled, changed={"floor": floor}),
        )
        for floor in sorted({style.floor for style in STYLES.values()})
    },
    "late-floor": Fault(
        cause="the floor is applied to the scale, not to amax", outputs=_late_floor
    ),
    "of-tensor": Fault(
        cause="one amax is taken over the whole tensor",
        outputs=partial(_shared, share=_of_tensor),
    ),
    "of-token": Fault(
        cause="one amax is taken over all heads of a token",
        outputs=partial(_shared, share=_of_heads),
    ),
    "of-head": Fault(
        cause="one amax is taken over all tokens of a head",
        outputs=partial(_shared, share=_of_head),
    ),
    **{
        f"of-{size}-heads": Fault(
            cause=f"one amax is taken over {size} heads",
            outputs=partial(_shared, share=partial(_of_heads, size=size)),
        )
        for size in (2, 4, 8, 16, 32)
    },
    "signed": Fault(cause="the largest value is taken, not the largest magnitude", outputs=_signed),
    "undivided": Fault(cause="values are not divided by the scale", outputs=_undivided),
    "inverted": Fault(cause="1 / scale is stored", outputs=_inverted),
    **{
        name: Fault(cause=cause, outputs=partial(_encoded, encode=write))
        for name, (cause, write) in e4m3.WRITES.items()
    },
    **{
        f"values-by-{by}": Fault(cause=cause, outputs=partial(_styled, changed={"values_by": by}))
        for by, cause in (
            ("reciprocal", "x is multiplied by 1 / scale, not divided by it"),
            ("divide", "x is divided by the scale, not multiplied by 1 / scale"),
        )
    },
    **{
        f"amax-by-{by}": Fault(cause=cause, outputs=partial(_styled, changed={"amax_by": by}))
        for by, cause in (
            ("reciprocal", "amax is multiplied by 1 / 448, not divided by 448"),
            ("divide", "amax is divided by 448, not multiplied by 1 / 448"),
        )
    },
    "unscaled-weights": Fault(cause="q's scale is not in the weights", outputs=_unscaled_weights),
    "no-softmax": Fault(
        cause="D^-0.5 is not in the weights",
        outputs=partial(_refolded, changed={"softmax_scale": 1.0}),
    ),
    "no-heads": Fault(
        cause="H^-0.5 is not in the weights", outputs=partial(_refolded, changed={"heads": 1})
    ),
    "padded-heads": Fault(
        cause="H^-0.5 is that of the padded heads",
        outputs=partial(_refolded, changed={"heads": None}),
    ),
    **{
        f"order-{order}": Fault(
            cause=f"weights are folded in the order {', '.join(factors)}",
            outputs=partial(_refolded, changed={"order": order}),
        )
        for order, factors in ORDERS.items()
    },
    "bf16-weights": Fault(cause="weights are rounded to bf16", outputs=_bf16_weights),
}
"""Faults of a quantiser by name; a reading tries them in this order."""
