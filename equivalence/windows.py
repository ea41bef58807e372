"""Windows: what each row of a call may pick, and which rows' metadata cannot be."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from equivalence import schema
from equivalence.case import BY_DESIGN, PADDING, ROW_CLASSES, Case
from equivalence.errors import InvalidCase

_CELLS = 1 << 22
_SLOTS = 1 << 31
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
class _Bad:
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
    return case.params.get(name, schema.OPS[case.op].defaults.get(name))


def dense(case: Case) -> Windows:
    """Windows of [row_start, row_end) over L columns."""
    start, end = case.inputs["row_start"].long(), case.inputs["row_end"].long()
    name = "scores" if "scores" in case.inputs else "k"
    columns = case.inputs[name].shape[1 if name == "scores" else 0]
    relative = param(case, "columns") == "row-relative"
    bad = [
        _Bad(which=start < 0, sentence="row_start {} is negative", values=(start,)),
        _Bad(which=end < start, sentence="row_end {} is before row_start {}", values=(end, start)),
        _Bad(
            which=end > columns,
            sentence="row_end {} is past the {} columns",
            values=(end, columns),
        ),
    ]
    width = param(case, "width")
    if width is not None:
        bad.append(
            _Bad(
                which=(end - start if relative else end) > width,
                sentence="the window {}-{} does not fit into width {}",
                values=(start, end, width),
            )
        )
    table = case.inputs.get("page_table", case.inputs.get("block_table"))
    slots = case.inputs.get("slot_map", case.inputs.get("k_slots"))
    if table is not None:
        request = case.inputs.get("row_to_request")
        bad += _bad_pages(case, table, request, end - start, pages=None)
    elif slots is not None:
        wide = slots.long()
        strange = functional.pad(((wide < 0) | (wide >= _SLOTS)).long().cumsum(0), (1, 0))
        first, last = start.clamp(0, columns), end.clamp(0, columns)
        bad.append(
            _Bad(
                which=(strange[last] > strange[first]) & (last > first),
                sentence="the slot map has no slot for some column in {}-{}",
                values=(start, end),
            )
        )
    return _windows(case, start, end, torch.zeros_like(start) if relative else start, bad)


def paged(case: Case) -> Windows:
    """Windows of [0, context_lens) over the pages of a request."""
    table, lengths = case.inputs["block_table"], case.inputs["context_lens"]
    requests, next_n = lengths.shape
    request = torch.arange(requests, device=lengths.device).repeat_interleave(next_n)
    pages = len(case.inputs["kv_cache"])
    return _from_zero(case, "context_lens", table, request, pages=pages)


def qsa(case: Case) -> Windows:
    """Windows of [0, visible_blocks) over the pages of a request."""
    table, visible = case.inputs["page_table"], case.inputs["visible_blocks"]
    request = torch.zeros_like(visible, dtype=torch.int64)
    edges = case.inputs.get("query_start_loc")
    if edges is not None:
        edges = edges.long()
        if len(visible) and not (
            bool((edges.diff() >= 0).all())
            and int(edges[0]) == 0
            and int(edges[-1]) == len(visible)
        ):
            raise InvalidCase(
                f"inputs.query_start_loc does not ascend from 0 to the {len(visible)} rows"
            )
        rows = torch.arange(len(visible), device=edges.device)
        request = torch.searchsorted(edges, rows, right=True) - 1
    elif len(table) != 1:
        raise InvalidCase(f"{len(table)} requests of a page table need inputs.query_start_loc")
    pages = len(case.inputs["k_cache"])
    return _from_zero(case, "visible_blocks", table, request, pages=pages)


def translate(case: Case) -> Windows:
    """Picks that come with the case: every column of the request's table is visible."""
    raw, table = case.inputs["raw_indices"], case.inputs["page_table"]
    zero = torch.zeros(len(raw), dtype=torch.int64, device=raw.device)
    visible = zero + table.shape[1] * param(case, "page_size")
    low = raw.amin(1) if raw.shape[1] else zero
    high = raw.amax(1) if raw.shape[1] else zero - 1
    request = case.inputs.get("row_to_request")
    bad = [
        _Bad(which=low < -1, sentence="raw_indices {} is neither pick nor pad", values=(low,)),
        _Bad(
            which=high >= visible,
            sentence="raw_indices {} is past the {} columns of its table",
            values=(high, visible),
        ),
        *_bad_pages(case, table, request, high + 1, pages=None),
    ]
    return _windows(case, zero, visible, zero, bad)


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
        ("raw_indices", -1),
    ):
        if name in inputs:
            tensor = inputs[name].clone(memory_format=torch.contiguous_format)
            flat = tensor if name == "raw_indices" else tensor.view(-1)
            flat[rows] = value
            inputs[name] = tensor
    return replace(case, inputs=inputs)


def _from_zero(case: Case, name: str, table: Tensor, request: Tensor, *, pages: int) -> Windows:
    """Windows that begin at column 0 of a request's pages."""
    end = case.inputs[name].reshape(-1).long()
    start = torch.zeros_like(end)
    bad = [_Bad(which=end < 0, sentence=name + " {} is negative", values=(end,))]
    return _windows(
        case, start, end, start, [*bad, *_bad_pages(case, table, request, end, pages=pages)]
    )


def _bad_pages(
    case: Case, table: Tensor, request: Tensor | None, visible: Tensor, *, pages: int | None
) -> list[_Bad]:
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
        _Bad(
            which=nowhere,
            sentence="row_to_request {} names none of {} requests",
            values=(request, requests),
        ),
        _Bad(
            which=visible > columns,
            sentence="{} columns are past the {} of its page table",
            values=(visible, columns),
        ),
    ]
    if not (rows and requests):
        return found
    most_pages = _SLOTS // param(case, "page_size") if pages is None else pages
    first = _first_strange(table, most_pages)
    mine = torch.where(nowhere, 0, request)
    needed = -(-visible.clamp(min=0) // param(case, "page_size"))
    at = first[mine].clamp(max=most - 1)
    found.append(
        _Bad(
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
    highest = min(most_pages - 1, _SLOTS - 1)
    step = max(1, _CELLS // (most + 1))
    for i in range(0, requests, step):
        strange = (table[i : i + step] < 0) | (table[i : i + step] > highest)
        bad = strange.any(1)
        first[i : i + step][bad] = strange[bad].to(torch.uint8).argmax(1)
    return first


def _windows(case: Case, start: Tensor, end: Tensor, column: Tensor, bad: list[_Bad]) -> Windows:
    """Windows where a broken row is empty, and a padding row with a backward window is no fault."""
    empty = torch.zeros_like(start, dtype=torch.bool)
    if case.row_class is not None:
        kind = case.row_class
        empty = (kind == PADDING) & (end <= start)
        for design in BY_DESIGN:
            empty |= kind == design
        odd = (kind < 0) | (kind >= len(ROW_CLASSES))
        bad = [_Bad(which=odd, sentence="row_class {} is no class", values=(kind,)), *bad]
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
