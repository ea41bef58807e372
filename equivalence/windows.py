"""Windows: what each row of a call may pick, and which rows' metadata cannot be."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from equivalence import specs
from equivalence.case import BY_DESIGN, PADDING, ROW_CLASSES, Case
from equivalence.errors import InvalidCase

_CELLS = 1 << 22
SLOTS = 1 << 31
"""Slots are int32."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Windows:
    """What each row of a call may pick.

    Attributes:
        start: int64 [T], the window's first column of the concatenated K.
        visible: int64 [T], columns in the window; 0 where the row is broken.
        column: int64 [T], where the window begins in the score tensor.
        broken: row -> why its metadata cannot be.
    """

    start: Tensor
    visible: Tensor
    column: Tensor
    broken: Mapping[int, str]


@dataclass(frozen=True, kw_only=True, eq=False)
class Bad:
    """Rows with one problem: bool [T], and a sentence with the values [T] it names."""

    which: Tensor
    sentence: str
    values: tuple[Tensor | int, ...] = ()


def live(case: Case, windows: Windows) -> Tensor:
    """Rows that a kernel is meant to write, and whose windows can be, bool [T]."""
    rows = torch.ones_like(windows.start, dtype=torch.bool)
    for kind in BY_DESIGN if case.row_class is not None else ():
        rows &= case.row_class != kind
    if windows.broken:
        rows[list(windows.broken)] = False
    return rows


def param(case: Case, name: str) -> Any:  # noqa: ANN401 - a JSON value whose type the op knows
    """A parameter of the case, or the op's default."""
    return case.params.get(name, specs.OPS[case.op].defaults.get(name))


def emptied(case: Case, windows: Windows) -> Case:
    """The case with nothing left to read in its broken rows, so that the others can be called."""
    if not windows.broken:
        return case
    rows = torch.tensor(list(windows.broken), device=windows.start.device)
    inputs = dict(case.inputs)
    for name, value in (
        ("row_start", 0),
        ("row_end", 0),
        ("context_lens", 0),
        ("visible_blocks", 0),
        ("row_to_request", 0),
        ("positions", -1),
        ("score_end", 0),
        ("raw_indices", -1),
    ):
        if name in inputs:
            tensor = inputs[name].clone(memory_format=torch.contiguous_format)
            flat = tensor if name == "raw_indices" else tensor.view(-1)
            flat[rows] = value
            inputs[name] = tensor
    return replace(case, inputs=inputs)


def _check_published(listed: Tensor, rows: int) -> None:
    """Raise InvalidCase unless published rows ascend and are rows of the call."""
    wide = listed.long()
    if bool((wide.diff() <= 0).any()):
        at = int((wide.diff() <= 0).nonzero()[0])
        one, two = (int(x) for x in wide[at : at + 2])
        raise InvalidCase(f"inputs.rows does not ascend: {one} stands before {two}")
    if len(wide) and not (int(wide[0]) >= 0 and int(wide[-1]) < rows):
        odd = int(wide[0]) if int(wide[0]) < 0 else int(wide[-1])
        raise InvalidCase(f"inputs.rows has row {odd}; the call has {rows:,} rows, from 0 on")


def bad_pages(
    case: Case, table: Tensor, request: Tensor | None, visible: Tensor, *, pages: int | None
) -> list[Bad]:
    """Rows without a table row, longer than it, or with an impossible page in what they need."""
    rows, (requests, most) = len(visible), table.shape
    if rows and not requests:
        raise InvalidCase(f"a page table of no requests cannot serve {rows} rows")
    if request is None:
        if requests != rows:
            raise InvalidCase(
                f"a page table of {requests} requests and {rows} rows need row_to_request"
            )
        request = torch.arange(rows, device=table.device)
    request = request.long()
    columns = most * param(case, "page_size")
    nowhere = (request < 0) | (request >= requests)
    found = [
        Bad(
            which=nowhere,
            sentence="row_to_request {} names none of {} requests",
            values=(request, requests),
        ),
        Bad(
            which=visible > columns,
            sentence="{} columns are past the {} of its page table",
            values=(visible, columns),
        ),
    ]
    if not (rows and requests):
        return found
    most_pages = SLOTS // param(case, "page_size") if pages is None else pages
    first = _first_strange(table, most_pages)
    mine = torch.where(nowhere, 0, request)
    needed = -(-visible.clamp(min=0) // param(case, "page_size"))
    at = first[mine].clamp(max=most - 1)
    found.append(
        Bad(
            which=~nowhere & (first[mine] < needed),
            sentence="page {} in entry {} of its page table is none"
            + ("" if pages is None else f" of {pages} pages"),
            values=(table[mine, at], at),
        )
    )
    return found


def _first_strange(table: Tensor, most_pages: int) -> Tensor:
    """The first entry of each table row that is no page, or the table's width, int64 [requests]."""
    requests, most = table.shape
    first = torch.full((requests,), most, dtype=torch.int64, device=table.device)
    # int32 cannot hold 2^31, and every page number is below it.
    highest = min(most_pages - 1, SLOTS - 1)
    step = max(1, _CELLS // (most + 1))
    for i in range(0, requests, step):
        strange = (table[i : i + step] < 0) | (table[i : i + step] > highest)
        bad = strange.any(1)
        first[i : i + step][bad] = strange[bad].to(torch.uint8).argmax(1)
    return first


def build(case: Case, start: Tensor, end: Tensor, column: Tensor, bad: list[Bad]) -> Windows:
    """Windows where a broken row is empty, and a padding row with a backward window is no fault."""
    if "rows" in case.inputs:
        _check_published(case.inputs["rows"], len(start))
    empty = torch.zeros_like(start, dtype=torch.bool)
    if case.row_class is not None:
        kind = case.row_class
        empty = (kind == PADDING) & (end <= start)
        for design in BY_DESIGN:
            empty |= kind == design
        odd = (kind < 0) | (kind >= len(ROW_CLASSES))
        bad = [Bad(which=odd, sentence="row_class {} is no class", values=(kind,)), *bad]
    broken: dict[int, str] = {}
    for each in bad:
        for row in (each.which & ~empty).nonzero()[:, 0].tolist():
            values = [v if isinstance(v, int) else int(v[row]) for v in each.values]
            broken.setdefault(row, each.sentence.format(*values))
    if broken:
        empty[list(broken)] = True
    return Windows(
        start=torch.where(empty, 0, start),
        visible=torch.where(empty, 0, end - start),
        column=torch.where(empty, 0, column),
        broken=dict(sorted(broken.items())),
    )
