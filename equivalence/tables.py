"""Markdown tables of what is built in: ops and documented contracts."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from equivalence import ops
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


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)
