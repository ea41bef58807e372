"""Plans kept by what a batch says, and whether a planner ever hands out another batch's plan."""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import TypeAlias

from equivalence import digest, plain
from equivalence.candidate import name_of
from equivalence.checks import plans
from equivalence.latest import latest
from equivalence.paths.layer import check_whole
from equivalence.paths.plan import Batch, Planner, build, per_layer
from equivalence.verdict import Coverage, Finding, Run, Status, Verdict, worst

KEPT = 16
"""Plans a planner keeps."""

Key: TypeAlias = Callable[[Batch], Hashable]


def content_key(batch: Batch) -> Hashable:
    """The bytes of the batch's tensors, their shapes and device, and its numbers.

    It reads the tensors: an engine keeps them on the host, or pays a copy for every look-up.
    """
    tensors = (batch.extend_lens, batch.seq_lens, batch.page_table)
    told = tuple((digest.of_tensor(t), tuple(t.shape), t.device) for t in tensors)
    return (*told, batch.page_size, batch.ratio)


def planner(*, key: Key = content_key, build: Planner = build, most: int = KEPT) -> Planner:
    """A function that plans each batch once, and keeps the plans used last.

    Args:
        key: batches of one key share a plan.
        build: plans a batch.
        most: plans kept.

    Raises:
        UsageError: most is below 1.
    """
    check_whole("most", most)
    return latest(build, key=key, most=most)


def judge(
    batches: Iterable[Batch], plan: Planner, *, reference: Planner = per_layer, case: str = "plans"
) -> Verdict:
    """Judge a planner over a sequence of batches, as integers.

    Each batch is planned when it is drawn, so a generator may change, free or move the tensors
    of one before it gives the next. One batch alone shows nothing: a plan outlives its own batch.

    Args:
        batches: the sequence.
        plan: the planner under test.
        reference: plans each batch anew.
        case: how reports call it.

    Returns:
        DIFFERENT with a run for each batch, EQUAL, or UNDECIDED where the planner raised or all
        batches have one plan.

    Raises:
        UsageError: a batch that cannot be planned.
    """
    planned: list[plans.Planned] = []
    runs: list[Run] = []
    places: dict[Hashable, Hashable] = {}
    moved_in = False
    for batch in batches:
        name = f"batch {len(planned) + 1}"
        want, said = reference(batch).tensors, content_key(batch)
        moved_in |= places.setdefault(_place(batch), said) != said
        try:
            got = {name: tensor.clone() for name, tensor in plan(batch).tensors.items()}
        except Exception as error:  # noqa: BLE001 - whatever a planner raises is its outcome
            sentence = plain.line(f"{type(error).__name__}: {error}")
            crash = Finding(
                stage="candidate",
                rule="crash",
                status=Status.UNDECIDED,
                run=name,
                reading=sentence,
            )
            runs.append(Run(name=name, stages={}, findings=(crash,)))
            break
        planned.append(plans.Planned(want=want, got=got))
        found = tuple(plans.findings(planned, len(planned) - 1))
        counted = plans.stages(planned, len(planned) - 1, found)
        runs.append(Run(name=name, stages=counted, findings=found))
        del batch  # or its memory could never be handed to the next one
    rows = sum(len(each.want["row_start"]) for each in planned)
    return _sum_up(
        Verdict(
            case=case,
            op="index_plan",
            status=Status.UNDECIDED,
            contract="strict (default)",
            coverage=Coverage(rows=rows, scored_rows=rows),
            runs=tuple(runs),
            candidate=name_of(plan),
        ),
        moved_in=moved_in,
    )


def _place(batch: Batch) -> Hashable:
    """Where a batch's tensors stand."""
    tensors = (batch.extend_lens, batch.seq_lens, batch.page_table)
    return tuple((tensor.data_ptr(), tuple(tensor.shape)) for tensor in tensors)


def _sum_up(verdict: Verdict, *, moved_in: bool) -> Verdict:
    """The status of a sequence, and what it could not have shown."""
    statuses = [stage.status for run in verdict.runs for stage in run.stages.values()]
    statuses += [found.status for run in verdict.runs for found in run.findings]
    status = worst(statuses)
    shown = any(stage.power for stage in verdict.stages.values())
    if not shown and (status is Status.EQUAL or not statuses):
        note = "no power: no batch has another plan than the first, so none could outlive it"
        return replace(verdict, note=note)
    still = "" if moved_in else "no batch stood where another had: a key of addresses cannot show"
    return replace(verdict, status=status, note=still if status is Status.EQUAL else "")
