"""Slot maps: from the picks of a call to physical slots, by its page table or slot map."""

import torch
from torch import Tensor

from equivalence.case import Case
from equivalence.checks.pages import SlotsOf
from equivalence.windows import param
from refimpl.pages import translate_pages


def dense(case: Case) -> SlotsOf | None:
    """Slots of rows that name their request, or whose flattened K has a slot a column."""
    table = case.inputs.get("page_table", case.inputs.get("block_table"))
    slot_map = case.inputs.get("slot_map", case.inputs.get("k_slots"))
    if table is not None:
        count = len(case.inputs["raw_indices" if "raw_indices" in case.inputs else "row_start"])
        rows = torch.arange(count, device=table.device)
        request = case.inputs.get("row_to_request", rows).long()
        # A padding row may name any request: it has no column to look up.
        return _of_table(case, table, request.clamp(0, len(table) - 1))
    if slot_map is None:
        return None
    start = case.inputs["row_start"].long()
    # An empty window may begin where the map ends, or there may be no map at all.
    held = slot_map if len(slot_map) else slot_map.new_zeros(1)
    last = len(held) - 1
    return lambda rows, columns: held[(start[rows][:, None] + columns).clamp(0, last)].long()


def paged(case: Case) -> SlotsOf:
    """Slots of decode rows, next_n of each request."""
    requests, next_n = case.inputs["context_lens"].shape
    table = case.inputs["block_table"]
    request = torch.arange(requests, device=table.device).repeat_interleave(next_n)
    return _of_table(case, table, request)


def _of_table(case: Case, table: Tensor, request: Tensor) -> SlotsOf:
    size = param(case, "page_size")

    def slots(rows: Tensor, columns: Tensor) -> Tensor:
        return translate_pages(
            raw_indices=columns.int(),
            page_table=table,
            page_size=size,
            row_to_request=request[rows],
        ).long()

    return slots


def page_size_of(case: Case) -> int:
    """Keys a page; 1 where a slot map stands for the pages."""
    known = {"page_table", "block_table"} & set(case.inputs)
    return int(param(case, "page_size")) if known else 1
