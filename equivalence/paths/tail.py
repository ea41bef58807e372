"""Only the last rows of each request go on: cut before the layer is computed, or after.

Under bounded replay of a sliding window of 128 tokens, late layers read the last
min(128, extend) rows of each request and no others (SGLang 0.5.23
dsv4/attn_metadata_kernels.py:457). The other rows of an output stay unwritten, by design.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from equivalence.case import ROW_CLASSES, Case
from equivalence.errors import InvalidCase, UsageError
from equivalence.paths import chunked
from equivalence.paths.layer import check_whole
from refimpl.masks import TAIL

WINDOW = TAIL
"""Rows of a request that go on."""
_UNWRITTEN = ROW_CLASSES.index("unwritten-by-design")
_OF_ROWS = ("q", "weights", "row_start", "row_end", "row_to_request", "topk_indices_offset")

Path: TypeAlias = Callable[..., Mapping[str, Tensor]]
"""A candidate of prefill_indexer that returns a mapping."""


def tail_rows(*, row_to_request: Tensor, most: int = WINDOW) -> Tensor:
    """The last `most` rows of every request, or all of a shorter one; int64, ascending.

    Args:
        row_to_request: int32 [T], the request of each row; requests may stand in any order.
        most: rows of a request that go on.

    Raises:
        UsageError: most is below 1.
    """
    check_whole("most", most)
    request, order = row_to_request.sort(stable=True)
    after = torch.searchsorted(request, request, right=True)
    at = torch.arange(len(request), device=request.device)
    kept = order[after - at <= most]
    return kept.sort().values


def whole(
    *,
    most: int = WINDOW,
    path: Path = chunked.original,
    **call: Any,  # noqa: ANN401 - see below
) -> dict[str, Tensor]:
    """A candidate of prefill_indexer: every row is computed, then the tail is sliced.

    Args:
        most: rows of a request that go on.
        path: computes the layer.
        call: the op's inputs and parameters, row_to_request among them, and settings of `path`.

    Returns:
        The outputs of `path`, [T, ...], of which only tail rows are written.

    Raises:
        UsageError: nothing says which request a row is of, or most is below 1.
    """
    rows = tail_rows(row_to_request=_requests(call), most=most)
    return spread({name: given[rows] for name, given in path(**call).items()}, rows, call)


def only(
    *,
    most: int = WINDOW,
    path: Path = chunked.original,
    **call: Any,  # noqa: ANN401 - see `whole`
) -> dict[str, Tensor]:
    """A candidate of prefill_indexer, as `whole`: the tail is cut, then computed alone."""
    rows = tail_rows(row_to_request=_requests(call), most=most)
    return spread(path(**cut(call, rows)), rows, call)


def cut(call: Mapping[str, Any], rows: Tensor) -> dict[str, Any]:
    """The call with these rows, int64, alone; row i of the result is row rows[i]."""
    own = [name for name in _OF_ROWS if call.get(name) is not None]
    # fp8 has no indexing on every device: take its bytes.
    short = {
        name: call[name].view(torch.uint8)[rows].view(call[name].dtype)
        if call[name].element_size() == 1
        else call[name][rows]
        for name in own
    }
    if call.get("block_table") is not None and call.get("row_to_request") is None:
        short["block_table"] = call["block_table"][rows]
    return {**call, **short}


def spread(
    outputs: Mapping[str, Tensor], rows: Tensor, call: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Outputs of these rows as outputs of all rows; the others are not written."""
    every = len(call["q"])
    told = {}
    for name, tensor in outputs.items():
        told[name] = tensor.new_empty((every, *tensor.shape[1:]))
        told[name][rows] = tensor
    return told


def tail_case(case: Case, *, most: int = WINDOW) -> Case:
    """The case with its other rows declared unwritten by design, so that nobody judges them.

    Raises:
        InvalidCase: nothing says which request a row is of.
    """
    try:
        requests = _requests(case.inputs)
    except UsageError as error:
        raise InvalidCase(str(error)) from error
    rows = tail_rows(row_to_request=requests, most=most)
    if case.row_class is None:
        kind = torch.zeros(len(requests), dtype=torch.int8, device=requests.device)
    else:
        kind = case.row_class.clone()
    gone = torch.ones_like(kind, dtype=torch.bool)
    gone[rows] = False
    kind[gone] = _UNWRITTEN
    return replace(case, row_class=kind, reference={})


def _requests(call: Mapping[str, Any]) -> Tensor:
    """The request of each row, int [T]."""
    given: Tensor | None = call.get("row_to_request")
    if given is not None:
        return given
    table: Tensor | None = call.get("block_table")
    if table is None:
        raise UsageError("the tail of a request takes row_to_request: which rows are its own")
    # Without it, row i reads table row i.
    return torch.arange(len(table), device=table.device)
