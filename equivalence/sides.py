"""What is judged: recorded launch chains, or the calls of a candidate, as named sides."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from equivalence import consistent, layout, ops, poisons, replay, stages
from equivalence.candidate import Candidate
from equivalence.case import Case
from equivalence.checks import maskwords
from equivalence.contract import Contract
from equivalence.demands import Demands
from equivalence.demands import findings as demanded
from equivalence.receipt import Receipt
from equivalence.verdict import PAGES, Evidence, Finding, Memory, Status


@dataclass(frozen=True, kw_only=True, eq=False)
class Side:
    """One launch chain.

    Attributes:
        name: "run 0" or "candidate".
        outputs: tensors that have the shape and dtype of their stage.
        scores: the logits this chain selected from, where known: they serve the blame.
        recorded: logits that may judge the picks where no reference can: of a recorded chain its
            own, of a candidate the ones the case recorded.
        poison: what buffers held before the launch, by output.
        findings: what is already known to be wrong.
        memory: what the call held; None where nothing was called.
        paths: the kernels that said they ran.
    """

    name: str
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    scores: Tensor | None = None
    recorded: Tensor | None = None
    poison: Mapping[str, float] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    memory: Memory | None = None
    paths: tuple[Receipt, ...] = ()


def given(case: Case, outputs: Mapping[str, Tensor], name: str) -> Side:
    """Outputs that somebody else's call gave, as a side of this case."""
    fitting, findings = _fitting(case, outputs, name)
    return Side(name=name, outputs=fitting, scores=fitting.get("logits"), findings=findings)


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
            Side(
                name=name,
                outputs=outputs,
                scores=scores,
                recorded=scores,
                poison=poison,
                findings=findings,
            )
        )
    return sides


def called(
    case: Case,
    candidate: Candidate,
    contract: Contract,
    *,
    repeats: int = 1,
    shared: bool = False,
    demands: Demands | None = None,
) -> list[Side]:
    """One side a call of the candidate.

    Args:
        case: held in memory.
        candidate: called `repeats` times.
        contract: what it may do to its inputs.
        repeats: how often.
        shared: whether another implementation is called too, which may use the same buffers.
        demands: what each call must keep to.
    """
    chains = recorded(case)
    scores = chains[-1].scores if chains else None
    sides: list[Side] = []
    borrowed: list[tuple[Tensor, Tensor]] = []
    for i in range(repeats):
        name = f"candidate, call {i + 1}" if i else "candidate"
        side = _call(
            case,
            candidate,
            contract,
            name,
            copy=shared or repeats > 1,
            again=repeats > 1,
            borrowed=borrowed,
        )
        if sides and set(side.outputs) != set(sides[0].outputs):
            side = replace(side, findings=(*side.findings, _other_outputs(sides[0], side)))
        if demands is not None and side.memory is not None:
            kept = demanded(demands, name, memory=side.memory, paths=side.paths)
            side = replace(side, findings=(*side.findings, *kept))
        sides.append(replace(side, recorded=scores))
    # What the candidate handed out is its own: it gets its values back.
    for tensor, values in reversed(borrowed):
        with suppress(RuntimeError):
            tensor.copy_(values)
    return sides


def _other_outputs(first: Side, side: Side) -> Finding:
    given = ", ".join(side.outputs) or "nothing"
    return Finding(
        stage="candidate",
        rule="not-compared",
        status=Status.UNDECIDED,
        run=side.name,
        reading=f"this call gave {given}; the first gave {', '.join(first.outputs) or 'nothing'}",
    )


def _call(
    case: Case,
    candidate: Candidate,
    contract: Contract,
    name: str,
    *,
    copy: bool,
    again: bool,
    borrowed: list[tuple[Tensor, Tensor]],
) -> Side:
    outcome = replay.run(candidate, case)
    if outcome.rule:
        failed = Finding(
            stage="candidate",
            rule=outcome.rule,
            status=Status.UNDECIDED,
            run=name,
            reading=outcome.message,
        )
        found = (failed, *written(case, outcome, contract, name))
        return Side(name=name, findings=found, memory=outcome.memory, paths=outcome.paths)
    outputs, findings = _fitting(case, outcome.outputs, name)
    findings = (*findings, *written(case, outcome, contract, name))
    # Of an op that is weighed whole, a page or a token that holds nothing but poison shows itself.
    blockwise = ops.find(case.op).weigh is None
    poisoned = {n: blockwise and poisons.holds(tensor, which=0) for n, tensor in outputs.items()}
    seen = any(poisoned.values())
    if copy or seen:
        given, outputs = outputs, {n: layout.copied(t) for n, t in outputs.items()}
        if again or seen:
            _poison_all(case, given, borrowed, which=int(seen))
    poison: dict[str, float] = {}
    if seen:
        # A second poison tells an unwritten cell from a value that happens to be the first.
        second = replay.run(candidate, case, poison=1).outputs
        poison = {
            stage: held
            for stage, found in poisoned.items()
            if found and stage in second and poisons.left(outputs[stage], second[stage])
            if (held := poisons.of(outputs[stage].dtype, 0)) is not None
        }
        _poison_all(case, second, borrowed, which=0)
    return Side(
        name=name,
        outputs=outputs,
        scores=outputs.get("logits"),
        poison=poison,
        findings=findings,
        memory=outcome.memory,
        paths=outcome.paths,
    )


def _poison_all(
    case: Case,
    outputs: Mapping[str, Tensor],
    borrowed: list[tuple[Tensor, Tensor]],
    *,
    which: int,
) -> None:
    """Poison a candidate's own buffers, since its next call may hand them out again."""
    entries = [case.inputs, *case.recorded]
    own = {t.untyped_storage().data_ptr() for entry in entries for t in entry.values()}
    for tensor in outputs.values():
        if tensor.untyped_storage().data_ptr() in own:
            continue
        # What cannot be given back, expanded tensors, or written, inference tensors, is left alone:
        # then a stale buffer stays unseen.
        if layout.overlaps(tensor.shape, tensor.stride()):
            continue
        values = layout.copied(tensor)
        with suppress(RuntimeError):
            poisons.fill(tensor, which)
            borrowed.append((tensor, values))


def _fitting(
    case: Case, outputs: Mapping[str, Tensor], run: str
) -> tuple[dict[str, Tensor], tuple[Finding, ...]]:
    """The outputs that can be compared, and a finding for each that cannot."""
    sizes = ops.validate(case)
    kept: dict[str, Tensor] = {}
    findings: list[Finding] = []
    device = next(iter(case.inputs.values())).device
    spans = ops.find(case.op).windows(case)
    for stage, tensor in outputs.items():
        if why := stages.unwanted(case, stage):
            found = Finding(stage=stage, rule="not-compared", status=Status.UNDECIDED, run=run)
            findings.append(replace(found, reading=why))
            continue
        problem = stages.fit(case, stage, spans, rows=sizes["rows"]).misfit(tensor)
        if problem is None:
            kept[stage] = layout.moved(tensor, device)
        else:
            rule, want, got = problem
            found = _misfit(stage, rule, run, want, got)
            findings.append(replace(found, reading=_reading(stage, tensor)))
    return kept, tuple(findings)


def _reading(stage: str, tensor: Tensor) -> str:
    """What an output that does not fit may be instead."""
    if stage in PAGES and tensor.dim() == 3:  # noqa: PLR2004 - layers, slots, bytes
        return "one buffer: every rank's is wanted, [cp, layers, slots, page bytes]"
    return maskwords.additive(tensor) if stage in stages.MASKS else ""


def _misfit(stage: str, rule: str, run: str, want: str, got: str) -> Finding:
    return Finding(
        stage=stage,
        rule=rule,
        run=run,
        evidence=(Evidence(label=rule, place="", value=f"want {want}   got {got}"),),
    )


def written(
    case: Case, outcome: replay.Outcome, contract: Contract, run: str
) -> tuple[Finding, ...]:
    """Inputs a call changed where its contract does not let it."""
    findings = []
    for name, after in outcome.mutated.items():
        count, first = _changes(case, contract, name, after, outcome.outputs)
        all_values = case.inputs[name].numel()
        if count:
            findings.append(
                Finding(
                    stage="inputs",
                    rule="wrote-outside",
                    run=run,
                    place=f"input {name}   {count:,} of {all_values:,} values changed",
                    evidence=(Evidence(label="first", place=f"index {first}"),),
                    reading=f"the call wrote into its input; allowed: writes={contract.writes}",
                )
            )
    return tuple(findings)


def _changes(
    case: Case, contract: Contract, name: str, after: Tensor, outputs: Mapping[str, Tensor]
) -> tuple[int, list[int]]:
    """How many forbidden values of an input changed, and the index of the first."""
    before = case.inputs[name]
    if not replay.alike(after, before):
        return before.numel(), [0] * before.dim()
    rows = name == "scores" and before.dim() == 2  # noqa: PLR2004 - those of ranks have no windows
    windows = ops.find(case.op).windows(case) if rows else None
    if name == "scores" and not rows and contract.writes == "scores":
        return 0, []
    # What is handed back is judged as the output that it is.
    caches = ops.find(case.op).spec.caches if contract.writes == "cache" else {}
    own = outputs.get(caches.get(name, ""), before)
    own = own if replay.alike(own, before) else before
    count, row = 0, 0
    first: list[int] = []
    for old, new, given in zip(*map(layout.pieces, (before, after, own)), strict=True):
        changed = (old != new) & (new != given)
        if windows is not None:
            span = slice(row, row + len(old))
            start, end = windows.start[span], (windows.start + windows.visible)[span]
            changed &= ~_may_write(contract, start, end, old.shape[1])
        if bool(changed.any()):
            here = changed.nonzero()[0].tolist()
            first = first or [here[0] + row, *here[1:]]
            count += int(changed.sum())
        row += len(old)
    return count, first


def _may_write(contract: Contract, start: Tensor, end: Tensor, columns: int) -> Tensor:
    """Cells of a block of input scores the contract lets a kernel change, bool [B, columns]."""
    column = torch.arange(columns, device=start.device)
    before, past = column < start[:, None], column >= end[:, None]
    return {
        "none": torch.zeros_like(before),
        "before-window": before,
        "out-of-window": before | past,
        "scores": torch.ones_like(before),
        "cache": torch.zeros_like(before),
    }[contract.writes]
