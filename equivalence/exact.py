"""Exact outputs: references that give some rows of an output whole, so that bits are compared.

Each takes a case and the rows wanted (int64, ascending), and gives tensors of these by output.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from equivalence import layout
from equivalence.case import Case, place_of, take_rows
from equivalence.checks import owners
from equivalence.windows import param
from refimpl import pages, quant, ranks


def gathered(case: Case, rows: Tensor) -> Mapping[str, Tensor]:
    """Rows of all ranks by their numbers; nothing where a row has not one owner."""
    ids = case.inputs["row_ids"]
    if any(owners.findings(ids, rows=int(param(case, "rows")))):
        return {}
    place = place_of(rows, ids.long().flatten()).reshape(ids.shape).int()
    return {"rows": ranks.gather_rows(shards=case.inputs["shards"], row_ids=place, rows=len(rows))}


def gathered_keys(case: Case, rows: Tensor) -> Mapping[str, Tensor]:
    """Keys out of planar pages, of the requests that the wanted rows belong to."""
    edges = case.inputs["seq_lens"].long().clamp(min=0).cumsum(0)
    if not len(rows):
        return {}
    first, last = torch.searchsorted(edges, rows[[0, -1]], right=True).tolist()
    some = slice(first, last + 1)
    found = pages.gather_batch(
        kv_cache=case.inputs["kv_cache"],
        block_table=case.inputs["block_table"][some],
        seq_lens=case.inputs["seq_lens"][some],
        page_size=int(param(case, "page_size")),
    )
    before = int(edges[first - 1]) if first else 0
    return {name: layout.taken(tensor, rows - before) for name, tensor in found.items()}


def moved_tokens(case: Case, rows: Tensor) -> Mapping[str, Tensor]:
    """Pages after the tokens were moved, sources read from where they stood before."""
    where, cache = _moves_to(case, rows), case.inputs["kv_cache"]
    out = layout.taken(cache, rows)
    pages.copy_tokens(out, cache, **where)
    return {"moved": out}


def moved_into(case: Case, rows: Tensor) -> Mapping[str, Tensor]:
    """The bytes of pages that tokens are moved to: no other one may change."""
    where, width = _moves_to(case, rows), case.inputs["kv_cache"].shape[1]
    free = torch.zeros(len(rows), width, dtype=torch.bool, device=rows.device)
    at = pages.token_bytes(where["destination"], page_size=where["page_size"], width=width)
    free[at] = True
    return {"moved": free}


def _moves_to(case: Case, rows: Tensor) -> dict[str, Any]:
    """The moves into some pages, whose destinations are counted over these pages alone."""
    size, pad = (int(param(case, name)) for name in ("page_size", "pad"))
    source, destination = (case.inputs[name].long() for name in ("source", "destination"))
    page = place_of(rows, torch.where(destination == pad, -1, destination // size))
    some = page >= 0
    to = page * size + destination % size
    return {"source": source[some], "destination": to[some], "page_size": size}


def quantized_q(case: Case, rows: Tensor) -> Mapping[str, Tensor]:
    """Queries as e4m3, their scales, and the weights that carry them."""
    part = take_rows(case, rows)
    return quant.quantize_q(
        **part.inputs,
        style=str(param(case, "style")),
        heads=param(case, "heads"),
        softmax_scale=param(case, "softmax_scale"),
    )


def quantized_k(case: Case, rows: Tensor) -> Mapping[str, Tensor]:
    """Keys as e4m3 and their scales."""
    part = take_rows(case, rows)
    return quant.quantize_k(x=part.inputs["x"], style=str(param(case, "style")))
