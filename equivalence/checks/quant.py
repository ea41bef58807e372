"""Quantised, gathered and moved keys that are wrong: their likely cause, where bits show it.

Every classic fault is tried as a faulty reference over the same inputs. A cause is told only
where its reference has every bit of the wrong rows, and one other at most has them too.
What saturates and what wraps is no cause: no value of a right scale comes near 464.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from equivalence.checks import misgathered, mismoved, misquantised
from equivalence.checks.fault import Asked, Fault, Outputs
from refimpl import bits

_LOOKED_AT = 64
"""Wrong rows, and as many right ones, that are looked at."""
_CAUSES = 2
"""More causes than this for the same bits say nothing."""

Made = tuple[Fault, Outputs]


def reading(
    *,
    stage: str,
    inputs: Mapping[str, Tensor],
    params: Mapping[str, Any],
    want: Tensor,
    got: Tensor,
    rows: Tensor,
    beside: Mapping[str, Tensor] | None = None,
) -> str:
    """What the wrong ones of some rows of a quantiser, a gather or a move look like, or "".

    Args:
        stage: `values`, `scale`, `weights`, `k_scale` or `moved`.
        inputs: of the whole call; `kv_cache` among them makes it a gather, `source` a move.
        params: of the call.
        want: [n, ...] the reference's rows.
        got: [n, ...] the candidate's: right rows among them tell causes apart.
        rows: int64 [n], their numbers in the call.
        beside: the candidate's other outputs of these rows: they tell causes apart too.
    """
    differ = bits.as_int(want) != bits.as_int(got)
    differ = differ.flatten(1).any(1) if differ.dim() > 1 else differ
    wrong, right = (some.nonzero()[:_LOOKED_AT, 0] for some in (differ, ~differ))
    if not len(wrong):
        return ""
    at = torch.cat([wrong, right])
    asked = Asked(inputs=inputs, params=params, rows=rows[at], stage=stage)
    made = [(fault, fault.outputs(asked)) for fault in _table(inputs).values()]
    few = slice(len(wrong))
    alike = [one for one in made if stage in one[1]]
    alike = [one for one in alike if _agrees(one[1], name=stage, got=got, at=at[few])]
    for name, held in (beside or {}).items():
        alike = _narrowed(alike, partial(_agrees, name=name, got=held, at=at[few]))
    alike = _narrowed(alike, partial(_agrees, name=stage, got=got, at=at))
    if not 0 < len(alike) <= _CAUSES:
        return ""
    bad = Asked(inputs=inputs, params=params, rows=rows[wrong], stage=stage)
    notes = dict.fromkeys(fault.note(bad) for fault, _ in alike)
    return f"as when {', or '.join(fault.cause for fault, _ in alike)}{''.join(notes)}"


def _table(inputs: Mapping[str, Tensor]) -> Mapping[str, Fault]:
    """The classic faults of the kind of call that has these inputs."""
    if "source" in inputs:
        return mismoved.FAULTS
    return misgathered.FAULTS if "kv_cache" in inputs else misquantised.FAULTS


def _narrowed(made: list[Made], holds: Callable[[Outputs], bool]) -> list[Made]:
    """Those of which it holds; all where it holds of none."""
    return [one for one in made if holds(one[1])] or made


def _agrees(made: Outputs, *, name: str, got: Tensor, at: Tensor) -> bool:
    """Whether the first rows of a faulty reference are these of an output, or it gives no such."""
    if name not in made:
        return True
    mine, other = made[name], bits.as_int(got)[at]
    if mine.dtype is not got.dtype or mine.shape[1:] != other.shape[1:]:
        return False
    return torch.equal(bits.as_int(mine)[: len(at)], other)
