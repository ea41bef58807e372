"""Whether all ranks hold the same bits, whatever these should be."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from equivalence import layout, plain, ranks, wording
from equivalence.checks.rows import hexadecimal
from equivalence.errors import NotEquivalent, Undecided, UsageError
from equivalence.replay import Outcome, plain_of
from equivalence.verdict import Evidence, Finding, Run, Stage, Status, Verdict
from equivalence.wording import form

_OP = "ranks"


def assert_ranks_identical(outcomes: Sequence[Outcome]) -> None:
    """Every rank succeeded, and all ranks' outputs are the same bits.

    Args:
        outcomes: one a rank, as `Pool.run` gives them.

    Raises:
        NotEquivalent: two ranks differ; the message names ranks, output, place and both values.
        Undecided: a rank failed, there is one rank alone, or no rank gave any value.
        UsageError: these are no outcomes of ranks.
    """
    __tracebackhide__ = True
    outcomes = _plain(outcomes)
    failure = ranks.failure(outcomes)
    if failure is not None:
        message = f"ranks failed ({failure.rule}): {failure.message}"
        raise Undecided(message, _verdict(message, failure.rule, Status.UNDECIDED))
    values = any(tensor.numel() for outcome in outcomes for tensor in outcome.outputs.values())
    if not values or len(outcomes) == 1:
        gave = "values, and no other rank is there" if values else "no value"
        who = f"{len(outcomes)} rank{'' if len(outcomes) == 1 else 's'}"
        message = f"{who} gave {gave}: nothing was compared"
        raise Undecided(message, _verdict(message, "not-compared", Status.UNDECIDED))
    found = {
        rank: difference
        for rank, outcome in enumerate(outcomes)
        if (difference := _difference(rank, outcomes[0], outcome)) is not None
    }
    if found:
        sentence, output, evidence = next(iter(found.values()))
        message = (
            f"{wording.ranks(list(found))} of {len(outcomes)} diverged from rank 0: {sentence}"
        )
        verdict = _verdict(message, "diverged", Status.DIFFERENT, output, evidence)
        raise NotEquivalent(message, verdict)


def _plain(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The outcomes, whose outputs are plain tensors.

    Raises:
        UsageError: they are something else.
    """
    if not isinstance(outcomes, Sequence):
        kind = type(outcomes).__name__
        raise UsageError(f"outcomes are a list of one a rank, as Pool.run returns it, not {kind}")
    if not outcomes:
        raise UsageError("no outcome of any rank was given: Pool.run returns one for each")
    made = []
    for rank, outcome in enumerate(outcomes):
        if not isinstance(outcome, Outcome):
            kind = type(outcome).__name__
            raise UsageError(f"an outcome of a rank is what Pool.run returns, not {kind}")
        outputs = {}
        for name, tensor in outcome.outputs.items():
            try:
                outputs[name] = plain_of(tensor)
            except (TypeError, AttributeError) as error:
                told = f"{plain.line(name)} of rank {rank} cannot be read: {error}"
                raise UsageError(told) from error
        made.append(replace(outcome, outputs=outputs))
    return made


def _difference(
    rank: int, first: Outcome, other: Outcome
) -> tuple[str, str, tuple[Evidence, ...]] | None:
    """The first difference of a rank from rank 0: the sentence, the output and both values."""
    for name in dict.fromkeys([*first.outputs, *other.outputs]):
        if name not in first.outputs or name not in other.outputs:
            has, lacks = (0, rank) if name in first.outputs else (rank, 0)
            sentence = f"rank {has} gives {plain.line(name)} and rank {lacks} does not"
            return sentence, name, ()
        want, got = first.outputs[name], other.outputs[name]
        if want.dtype is not got.dtype or want.shape != got.shape:
            kinds = f"rank 0 gives {form(want)} and rank {rank} {form(got)}"
            return f"{plain.line(name)}: {kinds}", name, ()
        cells = _differing(want, got)
        if cells is not None:
            return _told(rank, name, want, got, cells)
    return None


def _differing(want: Tensor, got: Tensor) -> Tensor | None:
    """Which cells differ in bits, of the tensor's shape; None where none does."""
    a, b = layout.flat_bytes(want), layout.flat_bytes(got)
    if torch.equal(a, b):
        return None
    cells = (a != b).view(-1, want.dtype.itemsize).any(1)
    return cells.view(want.shape)


def _told(
    rank: int, name: str, want: Tensor, got: Tensor, cells: Tensor
) -> tuple[str, str, tuple[Evidence, ...]]:
    """Where two ranks differ first, in decimal and bits."""
    at = tuple(cells.nonzero()[0].tolist())
    evidence = tuple(
        Evidence(
            label=f"rank {which}",
            place=f"{list(at)}",
            value=_value(tensor[at]),
            bits=hexadecimal(tensor[at]),
        )
        for which, tensor in ((0, want), (rank, got))
    )
    sides = [f"{each.label} holds {each.value} ({each.bits})" for each in evidence]
    sentence = (
        f"{plain.line(name)}{list(at)}: {' and '.join(sides)}; "
        f"{int(cells.sum())} of {cells.numel()} cells differ"
    )
    return sentence, name, evidence


def _value(cell: Tensor) -> str:
    """A cell in decimal; two halves of a byte as that byte."""
    if cell.dtype is torch.float4_e2m1fn_x2:
        return str(cell.view(torch.uint8).item())
    narrow = cell.dtype.itemsize == 1 and cell.is_floating_point()
    return str((cell.to(torch.float32) if narrow else cell).item())


def _verdict(
    message: str,
    rule: str,
    status: Status,
    output: str = "outputs",
    evidence: tuple[Evidence, ...] = (),
) -> Verdict:
    """What is known, as data."""
    finding = Finding(stage=output, rule=rule, status=status, run=_OP, evidence=evidence)
    stage = Stage(status=status, rules={rule: 1})
    run = Run(name=_OP, stages={output: stage}, findings=(finding,))
    return Verdict(case=_OP, op=_OP, status=status, note=message, runs=(run,))
