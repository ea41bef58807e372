"""Benches: smaller calls of one row, each seen to be wrong or not."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equivalence import judge, layout, stages
from equivalence.case import take_rows
from equivalence.checks import maskwords
from equivalence.checks.rows import hexadecimal, score_line
from equivalence.rowcount import given
from equivalence.rowcount.plays import SCORES
from equivalence.rowcount.schedules import Schedule
from equivalence.rowcount.trials import Trial, call_rows, side_of, windows_of
from equivalence.sides import Side
from equivalence.verdict import Evidence, Finding
from refimpl import forms
from refimpl.bits import as_int, ulp_distance
from refimpl.topk import PAD

_SHOWN = 2


@dataclass(kw_only=True, eq=False)
class Bench:
    """Calls that show one suspect, and what the last of them that was wrong gave.

    Attributes:
        trial: the whole call.
        stage: the output.
        unit: the rows that are called together with the suspect, int64.
        at: which of them it is.
        under: the conditions of the calls.
        right: outputs of the unit where it is right.
        got: outputs of the unit in the last call that was wrong.
        found: what the judge said of them.
    """

    trial: Trial
    stage: str
    unit: Tensor
    at: int
    under: Schedule
    right: dict[str, Tensor]
    got: dict[str, Tensor] | None = None
    found: Finding | None = None

    def fails(self, units: Sequence[int], place: int) -> bool:
        """Whether the suspect is wrong in a call of these units."""
        next_n = len(self.unit)
        got = outputs_at(
            self.trial, self.under, rows_of_units(units, next_n), place * next_n, next_n
        )
        if got is None:
            return False
        found = None
        if self.stage != "logits" and self.trial.judges:
            found = self._judged(got)
            if found is None:
                return False
        elif not bool(self._differing(got).any()):
            return False
        self.got, self.found = got, found
        return True

    def _differing(self, got: dict[str, Tensor]) -> Tensor:
        want, mine = (outputs[self.stage][self.at] for outputs in (self.right, got))
        return differing(self.trial, self.stage, int(self.unit[self.at]), want, mine)

    def _judged(self, got: dict[str, Tensor]) -> Finding | None:
        """What the judge finds wrong with the suspect."""
        trial = self.trial
        part = take_rows(trial.case, self.unit)
        old = trial.judging
        if old is not None:
            cut = {n: t[self.unit] for n, t in old.outputs.items() if n == "logits"}
            old = Side(name=old.name, outputs=cut)
        picks = {stage: tensor for stage, tensor in got.items() if stage != "logits"}
        side = side_of("call", picks, poison=self.under.poison)
        verdict = judge.weigh(part, [side], contract=trial.contract, baseline=old)
        found = [f for f in verdict.findings if (f.stage, f.row) == (self.stage, self.at)]
        return found[0] if found else None

    def evidence(self) -> tuple[Evidence, ...]:
        """What the suspect is, beside what it should be."""
        if self.found is not None and self.found.evidence:
            return self.found.evidence
        if self.got is None:
            return ()
        want, got = (outputs[self.stage][self.at] for outputs in (self.right, self.got))
        return side_by_side(self.trial, self.stage, int(self.unit[self.at]), want, got)


def rows_of_units(units: Sequence[int], next_n: int) -> Tensor:
    """The rows of these units, int64, in their order."""
    return torch.tensor([unit * next_n + i for unit in units for i in range(next_n)])


def outputs_at(
    trial: Trial, under: Schedule, rows: Tensor, first: int, count: int
) -> dict[str, Tensor] | None:
    """Rows [first, first + count) of a call's outputs; None where it fails or gives others."""
    outcome = call_rows(trial, under, rows)
    case, rows = trial.case, rows.to(trial.windows.start.device)
    spans, piece = windows_of(trial, rows), slice(first, first + count)
    held = {}
    for stage, whole in trial.whole.outputs.items():
        got = outcome.outputs.get(stage)
        if got is None or given.misfit(case, stage, whole, rows, got, windows=spans):
            return None
        mine = given.between(case, stage, layout.moved(got, whole.device), rows, piece)
        held[stage] = layout.copied(given.every(case, stage, mine, rows[piece]))
    return held


def differing(trial: Trial, stage: str, row: int, want: Tensor, got: Tensor) -> Tensor:
    """Slots that differ; of scores and masks columns inside the window, of ids whether any, [1]."""
    if stages.is_mask(trial.case, stage):
        if want.dtype is torch.int32:
            seen = trial.windows.visible[row : row + 1]
            return maskwords.differing(want=want[None], got=got[None], visible=seen)
        want, got = (_admitted(trial, row, mask) for mask in (want, got))
    differ = as_int(want.flatten()) != as_int(got.flatten())
    if stage in SCORES:
        inside = torch.zeros_like(differ)
        first = int(trial.windows.column[row])
        inside[first : first + int(trial.windows.visible[row])] = True
        differ &= inside
    return differ


def _admitted(trial: Trial, row: int, mask: Tensor) -> Tensor:
    """What the columns of a row of a bool or packed mask hold, uint8."""
    return maskwords.cells(mask[None], columns=int(trial.windows.visible[row]))[0]


def _apart(want: Tensor, got: Tensor) -> Iterator[Evidence]:
    """The first blocks of which a row of ids holds only one."""
    mine, other = (set(ids.tolist()) - {PAD, forms.FAR_PAD} for ids in (want, got))
    for block in sorted(mine ^ other)[:_SHOWN]:
        yield Evidence(label="want", place=f"block {block}", value=str(int(block in mine)))
        yield Evidence(label="got", place=f"block {block}", value=str(int(block in other)))


def side_by_side(
    trial: Trial, stage: str, row: int, want: Tensor, got: Tensor
) -> tuple[Evidence, ...]:
    """The first slots or logits of a row that differ."""
    lines: list[Evidence] = []
    masked = stages.is_mask(trial.case, stage)
    if masked and want.dtype is torch.int32:
        return tuple(_apart(want, got))
    places = differing(trial, stage, row, want, got).nonzero()[:_SHOWN, 0].tolist()
    noun = "column" if masked or stage in SCORES else "slot"
    if masked:
        want, got = (_admitted(trial, row, mask) for mask in (want, got))
    for i in places:
        place, one, two = f"{noun} {i}", want.flatten()[i], got.flatten()[i]
        if stage in SCORES or one.dtype is torch.float32:
            gap = int(ulp_distance(two, one))
            lines.append(score_line("want", place, one))
            lines.append(score_line("got", place, two, f"{gap:+,} ulp"))
            continue
        for label, value in (("want", one), ("got", two)):
            # The bits of fp8 say what its decimal cannot.
            bits = hexadecimal(value) if value.is_floating_point() else ""
            told = f"{float(value):g}" if bits else str(int(value))
            lines.append(Evidence(label=label, place=place, value=told, bits=bits))
    return tuple(lines)
