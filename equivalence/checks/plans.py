"""Index plans over a sequence of batches: one that is right for an earlier batch is named so."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equivalence.verdict import Evidence, Finding, Stage, Status
from equivalence.wording import form

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Planned:
    """One batch of a sequence.

    Attributes:
        want: the plan it should have, by tensor; integers alone.
        got: the plan it got, as it was then.
    """

    want: Tensors
    got: Tensors


def findings(planned: Sequence[Planned], at: int) -> Iterator[Finding]:
    """One finding for each tensor of batch `at` that differs; batches count from 1 in readings."""
    now, before = planned[at], list(reversed(range(at)))
    wrong = [name for name, want in now.want.items() if not _same(want, now.got[name])]
    whole = None
    if wrong:
        whole = next((i for i in before if _all_same(planned[i].want, now.got)), None)
    for name in wrong:
        want, got, older = now.want[name], now.got[name], whole
        if older is None:
            older = next((i for i in before if _same(planned[i].want[name], got)), None)
        place, (wanted, gotten) = _first(name, want, got)
        reading = f"{place} is {gotten}, not {wanted}"
        if older is not None:
            what = "plan" if whole is not None else name
            reading = f"batch {at + 1} has the {what} of batch {older + 1}: {reading}"
        yield Finding(
            stage=name,
            rule=_rule(want, got) if older is None else "stale-round",
            run=f"batch {at + 1}",
            place=f"batch {at + 1}",
            evidence=(
                Evidence(label="want", place=place, value=wanted),
                Evidence(label="got", place=place, value=gotten),
            ),
            reading=reading,
        )


def stages(planned: Sequence[Planned], at: int, found: Sequence[Finding]) -> dict[str, Stage]:
    """What was counted of each tensor of batch `at`, of which these findings speak.

    A tensor that was the same in every earlier batch could not have shown one of their plans.
    """
    now, rules = planned[at], {each.stage: each.rule for each in found}
    counted = {}
    for name, want in now.want.items():
        wrong = int(_differs(want, now.got[name]).sum())
        counted[name] = Stage(
            status=Status.DIFFERENT if name in rules else Status.EQUAL,
            counts={
                "compared": want.numel(),
                "identical": want.numel() - wrong,
                "different": wrong,
            },
            power=any(not _same(want, old.want[name]) for old in planned[:at]),
            rules={rules[name]: 1} if name in rules else {},
        )
    return counted


def _rule(want: Tensor, got: Tensor) -> str:
    """How a tensor differs."""
    if got.shape != want.shape:
        return "shape"
    return "bits" if got.dtype is want.dtype else "dtype"


def _first(name: str, want: Tensor, got: Tensor) -> tuple[str, tuple[str, str]]:
    """Where a tensor first differs, and want and got there: numbers, or what each is."""
    if _rule(want, got) != "bits":
        return name, (form(want), form(got))
    cell = (want != got).nonzero()[0].tolist()
    place = f"{name}[{', '.join(map(str, cell))}]"
    return place, (str(int(want[tuple(cell)])), str(int(got[tuple(cell)])))


def _differs(want: Tensor, got: Tensor) -> Tensor:
    """Cells of want that got does not have, bool."""
    if _rule(want, got) != "bits":
        return torch.ones_like(want, dtype=torch.bool)
    return want != got


def _same(want: Tensor, got: Tensor) -> bool:
    """Whether both are one tensor of integers: shape, dtype and values."""
    return _rule(want, got) == "bits" and torch.equal(want, got)


def _all_same(want: Tensors, got: Tensors) -> bool:
    return all(_same(t, got[name]) for name, t in want.items())
