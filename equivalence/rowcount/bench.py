"""Benches: smaller calls of one row, each seen to be wrong or not."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equivalence import judge
from equivalence.case import take_rows
from equivalence.checks.rows import score_line
from equivalence.rowcount.schedules import Schedule
from equivalence.rowcount.trials import Trial, call_rows, side_of
from equivalence.sides import Side
from equivalence.verdict import Evidence, Finding
from refimpl.bits import as_int, ulp_distance

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
            cut = {stage: tensor[self.unit] for stage, tensor in old.outputs.items()}
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
    given = {}
    for stage, whole in trial.whole.outputs.items():
        got = outcome.outputs.get(stage)
        if got is None or got.shape != (len(rows), whole.shape[1]) or got.dtype != whole.dtype:
            return None
        given[stage] = got[first : first + count].to(whole.device).clone()
    return given


def differing(trial: Trial, stage: str, row: int, want: Tensor, got: Tensor) -> Tensor:
    """Slots of a row that differ; of logits those inside its window."""
    differ = as_int(want) != as_int(got)
    if stage == "logits":
        inside = torch.zeros_like(differ)
        first = int(trial.windows.column[row])
        inside[first : first + int(trial.windows.visible[row])] = True
        differ &= inside
    return differ


def side_by_side(
    trial: Trial, stage: str, row: int, want: Tensor, got: Tensor
) -> tuple[Evidence, ...]:
    """The first slots or logits of a row that differ."""
    lines: list[Evidence] = []
    for i in differing(trial, stage, row, want, got).nonzero()[:_SHOWN, 0].tolist():
        if stage == "logits":
            place, gap = f"column {i}", int(ulp_distance(got[i], want[i]))
            lines.append(score_line("want", place, want[i]))
            lines.append(score_line("got", place, got[i], f"{gap:+,} ulp"))
        else:
            for label, value in (("want", want[i]), ("got", got[i])):
                lines.append(Evidence(label=label, place=f"slot {i}", value=str(int(value))))
    return tuple(lines)
