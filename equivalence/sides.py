"""What is judged: recorded launch chains, or the calls of a candidate, as named sides."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from equivalence import consistent, ops, replay
from equivalence.candidate import Candidate
from equivalence.case import Case
from equivalence.contract import Contract
from equivalence.verdict import Evidence, Finding, Status
from refimpl.bits import as_int


@dataclass(frozen=True, kw_only=True, eq=False)
class Side:
    """One launch chain.

    Attributes:
        name: "run 0" or "candidate".
        outputs: tensors that have the shape and dtype of their stage.
        scores: the logits this chain selected from, where known.
        poison: what buffers held before the launch, by output.
        findings: what is already known to be wrong.
    """

    name: str
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    scores: Tensor | None = None
    poison: Mapping[str, float] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()


def recorded(case: Case) -> list[Side]:
    """One side an entry; an entry without logits selected from the last ones before it."""
    poison = consistent.poison_of(case)
    sides: list[Side] = []
    scores: Tensor | None = None
    for i, entry in enumerate(case.recorded):
        name = f"run {i}"
        outputs, findings = _fitting(case, entry, name)
        scores = outputs.get("logits", scores)
        sides.append(
            Side(name=name, outputs=outputs, scores=scores, poison=poison, findings=findings)
        )
    return sides


def called(case: Case, candidate: Candidate, contract: Contract, *, repeats: int) -> list[Side]:
    """One side a call of the candidate."""
    names = ["candidate"] + [f"candidate, call {i + 1}" for i in range(1, repeats)]
    more = repeats > 1
    return [_call(case, candidate, contract, name, more=more) for name in names]


def _call(case: Case, candidate: Candidate, contract: Contract, name: str, *, more: bool) -> Side:
    outcome = replay.run(candidate, case)
    if outcome.rule:
        failed = Finding(
            stage="candidate",
            rule=outcome.rule,
            status=Status.UNDECIDED,
            run=name,
            reading=outcome.message,
        )
        return Side(name=name, findings=(failed, *_written(case, outcome, contract, name)))
    outputs, findings = _fitting(case, outcome.outputs, name)
    poison: dict[str, float] = {}
    poisoned = _holds(outputs, which=0)
    if more or any(poisoned.values()):
        # A candidate may hand out the same buffer at its next call.
        outputs = {stage: tensor.clone() for stage, tensor in outputs.items()}
    if any(poisoned.values()):
        # A second poison tells an unwritten cell from a value that happens to be the first.
        again = replay.run(candidate, case, poison=1)
        second = _holds(again.outputs, which=1)
        poison = {
            stage: _poison(outputs[stage], 0)
            for stage, found in poisoned.items()
            if found and second.get(stage, False)
        }
    return Side(
        name=name,
        outputs=outputs,
        scores=outputs.get("logits"),
        poison=poison,
        findings=(*findings, *_written(case, outcome, contract, name)),
    )


def _poison(tensor: Tensor, which: int) -> float:
    return (replay.SCORE_POISONS if tensor.is_floating_point() else replay.INDEX_POISONS)[which]


def _holds(outputs: Mapping[str, Tensor], *, which: int) -> dict[str, bool]:
    """Which outputs hold a poison anywhere."""
    return {stage: bool((t == _poison(t, which)).any()) for stage, t in outputs.items()}


def _fitting(
    case: Case, outputs: Mapping[str, Tensor], run: str
) -> tuple[dict[str, Tensor], tuple[Finding, ...]]:
    """The outputs that can be compared, and a finding for each that cannot."""
    sizes = ops.validate(case)
    kept: dict[str, Tensor] = {}
    findings: list[Finding] = []
    device = next(iter(case.inputs.values())).device
    for stage, tensor in outputs.items():
        least = ops.width_of(case, stage)
        exact = stage == "logits"
        dtype = ops.dtype_of(stage)
        fits = tensor.dim() == 2 and tensor.shape[0] == sizes["rows"]  # noqa: PLR2004 - a matrix
        wide = fits and (tensor.shape[1] == least if exact else tensor.shape[1] >= least)
        if not wide:
            want = f"[{sizes['rows']}, {least}{'' if exact else ' or wider'}]"
            findings.append(_misfit(stage, "shape", run, want, str(list(tensor.shape))))
        elif tensor.dtype != dtype:
            names = [str(d).removeprefix("torch.") for d in (dtype, tensor.dtype)]
            findings.append(_misfit(stage, "dtype", run, *names))
        else:
            kept[stage] = tensor.to(device)
    return kept, tuple(findings)


def _misfit(stage: str, rule: str, run: str, want: str, got: str) -> Finding:
    return Finding(
        stage=stage,
        rule=rule,
        run=run,
        evidence=(Evidence(label=rule, place="", value=f"want {want}   got {got}"),),
    )


def _written(
    case: Case, outcome: replay.Outcome, contract: Contract, run: str
) -> tuple[Finding, ...]:
    """Inputs a call changed where its contract does not let it."""
    findings = []
    for name, after in outcome.mutated.items():
        before = case.inputs[name]
        changed = torch.ones_like(before, dtype=torch.bool)
        if replay.alike(after, before):
            changed = as_int(after) != as_int(before)
            if name == "scores":
                changed &= ~_may_write(case, contract, after)
        count = int(changed.sum())
        if count:
            first = changed.nonzero()[0].tolist()
            findings.append(
                Finding(
                    stage="inputs",
                    rule="wrote-outside",
                    run=run,
                    place=f"input {name}   {count:,} of {before.numel():,} values changed",
                    evidence=(Evidence(label="first", place=f"index {first}"),),
                    reading=f"the call wrote into its input; allowed: writes={contract.writes}",
                )
            )
    return tuple(findings)


def _may_write(case: Case, contract: Contract, scores: Tensor) -> Tensor:
    """Cells of the input scores the contract lets a kernel change, bool [T, L]."""
    if contract.writes in ("none", "scores"):
        return torch.full_like(scores, contract.writes == "scores", dtype=torch.bool)
    windows = ops.find(case.op).windows(case)
    column = torch.arange(scores.shape[1], device=scores.device)
    before = column < windows.start[:, None]
    if contract.writes == "before-window":
        return before
    return before | (column >= (windows.start + windows.visible)[:, None])
