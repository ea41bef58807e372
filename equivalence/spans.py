"""Spans: the windows of the rows of each kind of op."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from equivalence.case import Case
from equivalence.errors import InvalidCase
from equivalence.windows import SLOTS, Bad, Windows, bad_pages, build, param
from refimpl import pages as paging

_LONGEST = 1 << 24
"""Columns that a row may have where no tensor holds them."""


def dense(case: Case) -> Windows:
    """Windows of [row_start, row_end) over L columns."""
    start, end = case.inputs["row_start"].long(), case.inputs["row_end"].long()
    name = "scores" if "scores" in case.inputs else "k"
    columns = case.inputs[name].shape[1 if name == "scores" else 0]
    relative = param(case, "columns") == "row-relative"
    scored = case.inputs.get("score_end", end).long()
    bad = [
        Bad(
            which=scored > end,
            sentence="score_end {} is past row_end {}",
            values=(scored, end),
        ),
        Bad(which=start < 0, sentence="row_start {} is negative", values=(start,)),
        Bad(which=end < start, sentence="row_end {} is before row_start {}", values=(end, start)),
        Bad(
            which=end > columns,
            sentence="row_end {} is past the {} columns",
            values=(end, columns),
        ),
    ]
    width = param(case, "width")
    if width is not None:
        bad.append(
            Bad(
                which=(end - start if relative else end) > width,
                sentence="the window {}-{} does not fit into width {}",
                values=(start, end, width),
            )
        )
    table = case.inputs.get("page_table", case.inputs.get("block_table"))
    slots = case.inputs.get("slot_map", case.inputs.get("k_slots"))
    if table is not None:
        request = case.inputs.get("row_to_request")
        bad += bad_pages(case, table, request, end - start, pages=None)
    elif slots is not None:
        wide = slots.long()
        strange = functional.pad(((wide < 0) | (wide >= SLOTS)).long().cumsum(0), (1, 0))
        first, last = start.clamp(0, columns), end.clamp(0, columns)
        bad.append(
            Bad(
                which=(strange[last] > strange[first]) & (last > first),
                sentence="the slot map has no slot for some column in {}-{}",
                values=(start, end),
            )
        )
    return build(case, start, end, torch.zeros_like(start) if relative else start, bad)


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
    pages, more = len(case.inputs["k_cache"]), []
    if "positions" in case.inputs:
        more = [_future(case, visible.long(), case.inputs["positions"].long())]
    return _from_zero(case, "visible_blocks", table, request, pages=pages, more=more)


def translate(case: Case) -> Windows:
    """Picks that come with the case: every column of the request's table is visible."""
    raw, table = case.inputs["raw_indices"], case.inputs["page_table"]
    zero = torch.zeros(len(raw), dtype=torch.int64, device=raw.device)
    visible = zero + table.shape[1] * param(case, "page_size")
    low = raw.amin(1) if raw.shape[1] else zero
    high = raw.amax(1) if raw.shape[1] else zero - 1
    request = case.inputs.get("row_to_request")
    bad = [
        Bad(which=low < -1, sentence="raw_indices {} is neither pick nor pad", values=(low,)),
        Bad(
            which=high >= visible,
            sentence="raw_indices {} is past the {} columns of its table",
            values=(high, visible),
        ),
        *bad_pages(case, table, request, high + 1, pages=None),
    ]
    return build(case, zero, visible, zero, bad)


def expand(case: Case) -> Windows:
    """Rows whose blocks come with the case: each sees as many as it says."""
    visible, position = (case.inputs[name].long() for name in ("visible_blocks", "positions"))
    zero = torch.zeros_like(visible)
    bad = [
        Bad(which=visible < 0, sentence="visible_blocks {} is negative", values=(visible,)),
        Bad(which=position < -1, sentence="position {} is none", values=(position,)),
        _future(case, visible, position),
    ]
    return build(case, zero, visible, zero, bad)


def _future(case: Case, visible: Tensor, position: Tensor) -> Bad:
    """Rows that see a block whose last token is still to come."""
    size = int(param(case, "block_size"))
    return Bad(
        which=(visible > 0) & (visible * size > position + 1),
        sentence="{} visible blocks are more than position {} has",
        values=(visible, position),
    )


def rows(case: Case) -> Windows:
    """Rows that are made or moved whole: they see nothing."""
    like = next(iter(case.inputs.values()))
    count = int(param(case, "rows") or len(like))
    zero = torch.zeros(count, dtype=torch.int64, device=like.device)
    return build(case, zero, zero, zero, [])


def ranks(case: Case) -> Windows:
    """Ranks that each hold all of a result: they see nothing."""
    zero = torch.zeros(int(param(case, "cp")), dtype=torch.int64)
    zero = zero.to(next(iter(case.inputs.values())).device)
    return build(case, zero, zero, zero, [])


def gather_keys(case: Case) -> Windows:
    """One row a key of every request, request after request."""
    lens, table = case.inputs["seq_lens"].long(), case.inputs["block_table"]
    total = int(lens.clamp(min=0).sum())
    if total != param(case, "rows"):
        raise InvalidCase(
            f"params.rows is {param(case, 'rows')}; inputs.seq_lens hold {total} keys"
        )
    request = torch.arange(len(lens), device=lens.device)
    pages = len(case.inputs["kv_cache"])
    for bad in bad_pages(case, table, request, lens, pages=pages):
        for at in bad.which.nonzero()[:1, 0].tolist():
            values = [v if isinstance(v, int) else int(v[at]) for v in bad.values]
            raise InvalidCase(f"request {at}: {bad.sentence.format(*values)}")
    return rows(case)


def move_tokens(case: Case) -> Windows:
    """One row a page of the buffer."""
    size, pad = (int(param(case, name)) for name in ("page_size", "pad"))
    try:
        paging.refuse_moves(**case.inputs, page_size=size, pad=pad)
    except ValueError as error:
        raise InvalidCase(str(error)) from error
    zero = torch.zeros(len(case.inputs["kv_cache"]), dtype=torch.int64)
    zero = zero.to(case.inputs["kv_cache"].device)
    return build(case, zero, zero, zero, [])


def merge(case: Case) -> Windows:
    """Windows of [0, context_lens), whose columns stand on several ranks."""
    end = case.inputs["context_lens"].long()
    zero = torch.zeros_like(end)
    most = _LONGEST
    bad = [
        Bad(which=end < 0, sentence="context_lens {} is negative", values=(end,)),
        Bad(which=end > most, sentence="context_lens {} is past {}", values=(end, most)),
    ]
    return build(case, zero, end, zero, bad)


def _from_zero(
    case: Case,
    name: str,
    table: Tensor,
    request: Tensor,
    *,
    pages: int,
    more: Sequence[Bad] = (),
) -> Windows:
    """Windows that begin at column 0 of a request's pages."""
    end = case.inputs[name].reshape(-1).long()
    start = torch.zeros_like(end)
    bad = [Bad(which=end < 0, sentence=name + " {} is negative", values=(end,))]
    return build(
        case, start, end, start, [*bad, *more, *bad_pages(case, table, request, end, pages=pages)]
    )
