"""Markdown tables: ops and their tensors, contracts, ways to compose pages, cases of a folder.

A page says which table it has: `filled` makes anew those under `<!-- tensors ragged_topk -->` and
the like.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from equivalence import flags, ops, plain, specs, stages, units
from equivalence.case import Case, held
from equivalence.compose import requests, steps
from equivalence.contract import FREEDOMS, Contract, named_contract, named_contracts
from equivalence.paths.ipc.known import EVERY, FAULTS, NEEDS
from equivalence.paths.ipc.ways import WAYS
from refimpl import forms, profiles


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


def of_tensors(name: str) -> str:
    """What one op takes and gives: shapes by the names of their dimensions, and dtypes."""
    spec = specs.OPS[name]
    rows = []
    for way, tensors in (("in", spec.inputs), ("out", spec.outputs)):
        for tensor, what in tensors.items():
            optional = "?" if what.optional else ""
            shape = f"[{', '.join(map(str, what.dims))}]"
            dtypes = " ".join(dtype.lower() for dtype in what.dtypes)
            rows.append((f"`{tensor}`{optional}", way, shape, dtypes))
    rows += [(f"`{param}`", "param", "", kind.__name__) for param, kind in spec.params.items()]
    rows += [(f"`{param}`?", "param", "", f"{default}") for param, default in spec.defaults.items()]
    return _table((f"`{name}`", "", "shape", "dtype, or default"), rows)


def of_freedoms() -> str:
    """Every contract key and its values, the strict one first."""
    rows = [(f"`{key}`", " ".join(f"`{v}`" for v in values)) for key, values in FREEDOMS.items()]
    pages = "`1` or any number of pages that hold no key"
    return _table(("key", "values"), [*rows, ("`reserved_pages`", pages)])


def of_sources(*names: str) -> str:
    """What is claimed of documented kernels, with its source, their limits and their faults."""
    rows = []
    for name in names:
        entry = named_contract(name)
        told = [
            (f"`{key}={getattr(entry.freedoms, key)}`", text) for key, text in entry.claims.items()
        ]
        told += [("limits", "; ".join(entry.limits))] if entry.limits else []
        told += [("known fault", fault) for fault in entry.faults]
        rows += [
            ("" if i else f"`{name}`", what, _cell(text)) for i, (what, text) in enumerate(told)
        ]
    return _table(("kernel", "claim", "source"), rows)


def of_arithmetic(*names: str) -> str:
    """What is known of kernels' arithmetic: bits that were measured, or a bound alone."""
    claims = {
        "measured": "bits, measured on {}",
        "exact": "the formula, no kernel's bits",
        "published": "a bound, of what is published",
    }
    known = [profiles.find(name) for name in names]
    rows = [(f"`{p.name}`", claims[p.status].format(p.device), p.source) for p in known]
    return _table(("arithmetic", "what is claimed", "source"), rows)


def of_forms(rows: str, columns: str, topk_blocks: str) -> str:
    """What a mask of this size takes in each of its forms."""
    width, slots = int(columns), int(topk_blocks)
    sizes = forms.form_bytes(rows=int(rows), columns=width, topk_blocks=slots)
    shapes = {
        "bool": ("bool [rows, lc]", "True where a column may be picked"),
        "packed": ("uint8 [rows, lc / 8]", "bit j % 8 of byte j // 8 is column j, lowest first"),
        "unordered": ("int32 [rows, n]", "blocks in any order, pads -1"),
        "ascending": ("int32 [rows, n]", "blocks in ascending order, pads 2147483647"),
    }
    made = [
        (f"`{form}`", *shapes[form], f"{size:,}", units.size(size)) for form, size in sizes.items()
    ]
    return _table(("form", "tensor", "a cell", "bytes", ""), made)


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


def of_ways() -> str:
    """Every way to compose pages, as the command line names it, and what a rank does in it."""
    rows = [(f"`{name}`", _first_line(way.run)) for name, way in WAYS.items()]
    return _table(("way", "what a rank does, layer by layer"), rows)


def _first_line(documented: object) -> str:
    return (inspect.getdoc(documented) or "").partition("\n")[0]


def of_scenarios() -> str:
    """Every scenario of composed pages: what each of its steps reads and adds, in order."""
    rows = []
    for name in requests.NAMES:
        batches = [
            (case.inputs["prefix_lens"], case.inputs["extend_lens"])
            for case in steps.sequence(name, cp=1, layers=1, kinds=("index",))
        ]
        counts = (
            [len(extend) for _, extend in batches],
            [int(prefix.sum()) for prefix, _ in batches],
            [int(extend.sum()) for _, extend in batches],
        )
        rows.append((f"`{name}`", *(" / ".join(f"{n:,}" for n in each) for each in counts)))
    return _table(("scenario", "requests in each step", "prefix tokens", "new tokens"), rows)


def of_faults() -> str:
    """Every fault that a way can have on purpose: what it does, and what a run must say of it."""
    rows = []
    for name, fault in FAULTS.items():
        ways = "all" if fault.ways == EVERY else " ".join(f"`{way}`" for way in fault.ways)
        rules = " or ".join(f"`{rule}`" for rule in fault.rules)
        needs = "; ".join(NEEDS[need] for need in fault.needs)
        rows.append((f"`{name}`", fault.does, ways, rules or "must change nothing", needs))
    return _table(("fault", "what goes wrong", "ways", "must be found as", "shows only with"), rows)


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
                f"{stages.k_of(case):,}" if stages.k_of(case) else "",
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


_MAKERS: Mapping[str, Callable[..., str]] = {
    "ops": of_ops,
    "tensors": of_tensors,
    "freedoms": of_freedoms,
    "contracts": of_contracts,
    "sources": of_sources,
    "arithmetic": of_arithmetic,
    "forms": of_forms,
    "ways": of_ways,
    "scenarios": of_scenarios,
    "faults": of_faults,
}
_MARKED = re.compile(r"^(<!-- (\w+)((?: [^ \n]+)*) -->\n)(?:\|.*\n)*", re.MULTILINE)


def filled(text: str) -> str:
    """A page whose marked tables are those of the code."""
    return _MARKED.sub(lambda m: m[1] + _MAKERS[m[2]](*m[3].split()), text)
