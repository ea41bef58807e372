"""Lint: everything that is wrong with the case files of a folder, one line each."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from equivalence import eligible, expected, header, ops, plain, store, windows
from equivalence.case import Case, held, take_rows
from equivalence.errors import InvalidCase, UsageError
from refimpl import fast
from refimpl.profiles import PUBLISHED

_MOST_ROWS = 8
"""Broken rows told one by one of each file; the rest are counted."""


def problems(paths: Sequence[Path]) -> Iterator[str]:
    """One sentence for each thing wrong with these files and folders.

    Every header, digest, tensor and window is read; nothing is judged.
    A file without the key `equivalence` is a problem only where it was named itself.

    Raises:
        UsageError: a path does not exist.
    """
    cases = store.find_cases(paths)
    for path in cases:
        try:
            case = store.load(path)
            yield from (plain.line(f"{path}: {problem}") for problem in _of_case(case))
        except InvalidCase as error:
            yield str(error)
    yield from _of_expectations(cases)


def _of_expectations(cases: Sequence[Path]) -> Iterator[str]:
    """Files of expectations that cannot be read, and expectations of no case."""
    try:
        foreseen = expected.beside(cases)
    except UsageError as error:
        yield str(error)
        return
    for folder, expectations in foreseen.items():
        for name in expected.unnamed(expectations, expected.names_near(folder)):
            sentence = f"{expected.FILE} expects something of {name!r}, which is no case here"
            yield plain.line(f"{folder}: {sentence}")


def _of_case(case: Case) -> Iterator[str]:
    """What only shows once tensors are read."""
    op = ops.find(case.op)
    try:
        loaded = held(case)
        rows = op.windows(loaded)
        broken = list(rows.broken.items())
        yield from (f"row {row}: {sentence}" for row, sentence in broken[:_MOST_ROWS])
        if len(broken) > _MOST_ROWS:
            yield f"{len(broken) - _MOST_ROWS:,} more rows are broken"
        eligible.expect(loaded, rows)
        if op.faults is not None:
            yield from (f"{found.rule}: {found.reading}" for found in op.faults(loaded))
        if not len(rows.start):
            yield "holds no row"
        elif op.score is not None and case.arithmetic is not None:
            # Nothing is left to score: the reference only says whether it could.
            one = take_rows(loaded, torch.arange(1))
            every = dict.fromkeys(range(len(op.windows(one).start)), "")
            nothing = windows.emptied(one, replace(rows, broken=every))
            if op.bound is not None and (case.arithmetic in PUBLISHED or "q_sf" in case.inputs):
                op.bound(nothing)
            else:
                op.score(nothing, fast.accumulate)
    except ValueError as error:
        yield str(error).removeprefix(str(header.invalid(Path(case.path), "")))
