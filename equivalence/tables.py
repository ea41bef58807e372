"""Markdown tables: ops, documented contracts, and the cases of a folder."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from equivalence import flags, ops, plain
from equivalence.case import Case, held
from equivalence.contract import Contract, named_contracts


def of_ops() -> str:
    """Every op: what goes in, what can be judged, whose bits the reference has."""
    head = ("op", "inputs", "params", "outputs judged", "arithmetic to name")
    return _table(
        head,
        (
            (
                f"`{name}`",
                ", ".join(n + ("?" if t.optional else "") for n, t in op.spec.inputs.items()),
                ", ".join([*op.spec.params, *(f"{n}?" for n in op.spec.defaults)]),
                ", ".join(op.spec.outputs),
                f"`{op.arithmetic}`" if op.arithmetic else "",
            )
            for name, op in ops.OPS.items()
        ),
    )


def of_contracts() -> str:
    """Every documented kernel: what it may do differently, and what it is known to do wrong."""
    head = ("kernel", "may differ", "known faults")
    return _table(
        head,
        (
            (f"`{name}`", _freedoms(entry.freedoms), str(len(entry.faults) or ""))
            for name, entry in named_contracts().items()
        ),
    )


def _freedoms(contract: Contract) -> str:
    text = str(replace(contract, name=None))
    return "nothing" if text == "strict" else f"`{text}`"


def of_cases(cases: Iterable[Case]) -> str:
    """A Markdown table of cases: what each holds and hunts."""
    head = ("case", "op", "rows", "columns", "k", "recorded kernel", "hunts")
    rows = []
    for case in cases:
        sizes = ops.validate(case)
        windows = ops.find(case.op).windows(held(case))
        widest = int(windows.visible.max()) if len(windows.visible) else 0
        kernels = [case.provenance.get(f"kernel_{kind}", "") for kind in ("scoring", "topk")]
        rows.append(
            [
                _cell(case.name),
                f"`{case.op}`",
                f"{sizes['rows']:,}",
                f"{widest:,}",
                f"{ops.k_of(case):,}" if ops.k_of(case) else "",
                _cell("; ".join(filter(None, kernels))),
                _cell(", ".join(sorted(case.flags))),
            ]
        )
    return _table(head, rows)


def _cell(text: str) -> str:
    """Text that stays inside a cell of a Markdown table."""
    return plain.line(text).replace("|", "\\|")


def fixtures_readme(folder: Path, cases: Iterable[Case]) -> str:
    """The text of the README of a folder of fixtures."""
    hunted = _table(("flag", "hunts"), flags.known().items())
    return f"""\
# Fixtures

Recorded layers that ship with the project, one file a case under `{folder.name}/`.
`flags.toml` says what each flag hunts,
`expected.toml` which recorded run is known to be wrong.
This file is written by `equivalence show --readme fixtures/cases`; edit its makers, not it.

{of_cases(cases)}
## Flags

{hunted}"""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)
