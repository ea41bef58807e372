"""Trials: a call that was made whole, and how it is made otherwise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from equivalence import judge, layout, ops, poisons, replay
from equivalence.candidate import Candidate
from equivalence.case import Case, take_rows
from equivalence.contract import Contract
from equivalence.rowcount import given
from equivalence.rowcount.launch import TABLES
from equivalence.rowcount.schedules import WIDER, Schedule
from equivalence.sides import Side
from equivalence.verdict import Verdict
from equivalence.windows import Windows, live
from refimpl import fast
from refimpl.profiles import PUBLISHED

_FEW_CELLS, _FEW_PRODUCTS = 1 << 28, 1 << 31
_ADMITS = {torch.bool: 1, torch.uint8: 255}


@dataclass(frozen=True, kw_only=True, eq=False)
class Trial:
    """A call that was made whole, and what it takes to make it otherwise.

    Attributes:
        case: held in memory.
        sent: the case with nothing to read in its broken rows.
        windows: of every row.
        candidate: what is called.
        contract: what its picks may do.
        whole: the outputs of the whole call.
        old: the baseline's, where one was given.
        sample: rows that are judged by their scores where all of them would be slow.
    """

    case: Case
    sent: Case
    windows: Windows
    candidate: Candidate
    contract: Contract
    whole: Side
    old: Side | None
    sample: int

    @cached_property
    def cheap(self) -> bool:
        """Whether the reference can judge every row in a few seconds."""
        cells = int(self.windows.visible.sum())
        if ops.find(self.case.op).score is None or self.old is not None:
            return cells <= _FEW_CELLS
        heads, size = self.case.inputs["q"].shape[-2:]
        return cells * heads * size <= _FEW_PRODUCTS

    @cached_property
    def judging(self) -> Side | None:
        """Whose logits judge picks; None where the case's own scores or the reference do.

        They are the baseline's, the reference's where they are cheap, recorded ones where there
        is no reference, or those of the whole call, which other calls must give bit for bit.
        """
        score = ops.find(self.case.op).score
        if self.old is not None or score is None:
            return self.old
        if self._scored and self.contract.scores == "bound":
            return None  # the reference then gives a bound, which a side cannot
        if self._scored and self.cheap:
            logits = score(self.sent, fast.accumulate)
            return Side(name="reference", outputs={"logits": logits})
        if self.whole.recorded is not None and not self._scored:
            return Side(name="recorded", outputs={"logits": self.whole.recorded})
        if "logits" in self.whole.outputs:
            return Side(name="whole call", outputs={"logits": self.whole.outputs["logits"]})
        return None

    @cached_property
    def judges(self) -> bool:
        """Whether anything can tell legal picks from others."""
        op, own = ops.find(self.case.op), {"scores", "raw_indices", "block_ids"}
        known = bool(own & set(self.case.inputs)) and op.score is None
        return known or self._scored or op.exact is not None or self.judging is not None

    @cached_property
    def _scored(self) -> bool:
        """Whether the reference says what the scores are, or how far they may lie from it."""
        profile = self.case.arithmetic
        scored = ops.find(self.case.op).score is not None and profile is not None
        return scored and (profile not in PUBLISHED or self.contract.scores == "bound")

    @cached_property
    def next_n(self) -> int:
        """Rows that are called together."""
        return ops.validate(self.case).get("n", 1)

    @cached_property
    def live(self) -> Tensor:
        """Rows whose outputs mean something, bool [T]."""
        return live(self.case, self.windows)

    def has(self, stage: str) -> Tensor:
        """Rows that an output has: all, or the published ones of a mask, bool [T]."""
        every = torch.zeros_like(self.live)
        rows = torch.arange(len(every), device=every.device)
        return every.index_fill(0, given.kept(self.case, stage, rows), value=True)

    @property
    def picks(self) -> Mapping[str, Tensor]:
        """The outputs of the whole call that are not logits."""
        return {stage: t for stage, t in self.whole.outputs.items() if stage != "logits"}


def call_rows(trial: Trial, schedule: Schedule, rows: Tensor) -> replay.Outcome:
    """Call the candidate on these rows, int64 in any order, under a schedule's conditions."""
    part = take_rows(trial.sent, rows.to(trial.windows.start.device))
    candidate = trial.candidate
    if schedule.wide:
        candidate = _widened(candidate, shapes=schedule.wide == "columns")
    if schedule.streams:
        candidate = _on_two_streams(candidate, part)
    outcome = replay.run(candidate, part, poison=schedule.poison)
    outputs = given.declared(trial.case, outcome.outputs, rows)
    for stage in ("logits", "scores") if schedule.wide == "columns" else ():
        if stage in outputs and stage in trial.whole.outputs:
            outputs[stage] = outputs[stage][..., : trial.whole.outputs[stage].shape[1]]
    return replace(outcome, outputs=outputs)


def _widened(candidate: Candidate, *, shapes: bool) -> Candidate:
    """The candidate, given scores and page tables that stand in buffers WIDER columns wider."""

    def wide(**call: object) -> object:
        for name in TABLES:
            held = call.get(name)
            if isinstance(held, Tensor):
                width = held.shape[-1]
                buffer = held.new_empty(*held.shape[:-1], width + WIDER)
                buffer.fill_(_beyond(held.dtype))
                buffer[..., :width] = held
                call[name] = buffer if shapes else buffer[..., :width]
        return candidate(**call)

    return wide


def _beyond(dtype: torch.dtype) -> float:
    """What stands past the columns of an input: it would be read as the best score, or admitted."""
    if dtype.is_floating_point:
        return torch.finfo(dtype).max
    return _ADMITS.get(dtype, poisons.INDEX[1])


def _on_two_streams(candidate: Candidate, part: Case) -> Candidate:
    """The candidate, launched on each half of the rows on a stream of its own, at once."""

    def both(**call: Tensor) -> object:
        whole = Case(
            op=part.op, inputs={name: call[name] for name in part.inputs}, params=part.params
        )
        sizes = ops.validate(whole)
        units = torch.arange(sizes["rows"]).reshape(-1, sizes.get("n", 1))
        here = torch.cuda.current_stream()
        given = []
        for rows in units.tensor_split(2):
            if not len(rows):
                continue
            half = take_rows(whole, rows.reshape(-1).to(here.device))
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # no types here
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                given.append((stream, candidate(**half.inputs, **half.params)))
        for stream, _ in given:
            here.wait_stream(stream)
        torch.cuda.synchronize()
        return _joined([result for _, result in given])

    return both


def _joined(halves: list[object]) -> object:
    """The results of calls, one under the other."""
    tensors = [half for half in halves if isinstance(half, Tensor)]
    if len(tensors) == len(halves):
        return _under(tensors)
    maps = [half for half in halves if isinstance(half, Mapping)]
    if len(maps) < len(halves) or any(half.keys() != maps[0].keys() for half in maps):
        return halves[0]
    return {name: _under([half[name] for half in maps]) for name in maps[0]}


def _under(halves: Sequence[Tensor]) -> Tensor:
    """Rows of outputs one under the other, masks as wide as the widest."""
    if any(half.dtype is not halves[0].dtype for half in halves):
        return torch.cat(list(halves))
    if all(half.dim() == 2 for half in halves):  # noqa: PLR2004 - rows and columns
        width = max(half.shape[1] for half in halves)
        halves = [given.wide(half, width) for half in halves]
    return torch.cat([layout.as_bytes(half) for half in halves]).view(halves[0].dtype)


def ranges(rows: Sequence[int]) -> str:
    """Row numbers in their order, those that ascend or descend by one as a range: rows 0-31 9-7."""
    told: list[list[int]] = []
    for row in rows:
        last = told[-1] if told else []
        step = row - last[-1] if last else 0
        if abs(step) == 1 and (len(last) == 1 or last[-1] - last[-2] == step):
            last.append(row)
        else:
            told.append([row])
    listed = " ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in told)
    return f"row{'' if len(rows) == 1 else 's'} {listed}"


def windows_of(trial: Trial, rows: Tensor) -> Windows:
    """The windows of these rows."""
    every = trial.windows
    return Windows(
        start=every.start[rows],
        visible=every.visible[rows],
        column=every.column[rows],
        broken={},
    )


def side_of(name: str, outputs: Mapping[str, Tensor], *, poison: int) -> Side:
    """Outputs whose buffers held this one of the two poisons before the launch."""
    held = {
        stage: poisons.of(tensor.dtype, poison)
        for stage, tensor in outputs.items()
        if stage != "logits"
    }
    known = {stage: value for stage, value in held.items() if value is not None}
    return Side(name=name, outputs=outputs, poison=known)


def weigh(trial: Trial, sides: Sequence[Side], rows: Tensor | None = None) -> Verdict:
    """Judge outputs of the whole case in these rows or in all."""
    return judge.weigh(
        trial.case, sides, contract=trial.contract, baseline=trial.judging, rows=rows
    )
