"""What the twin says of a row of a case: the bridge from tensors to its plain lists."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import twin

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from equivalence.case import Case
    from equivalence.contract import Contract


def fp32_bits(values: Tensor) -> list[int]:
    """Unsigned bits of fp32 values."""
    return [int(b) & 0xFFFFFFFF for b in values.float().contiguous().view(torch.int32)]


def freedoms(contract: Contract) -> dict[str, str]:
    """The part of a contract that the twin knows."""
    return {key: str(getattr(contract, key)) for key in twin.CONTRACT_VALUES}


def window(case: Case, row: int) -> tuple[int, int]:
    """First column and length of a row's window, from the inputs alone."""
    if "row_start" in case.inputs:
        start, end = int(case.inputs["row_start"][row]), int(case.inputs["row_end"][row])
        return start, end - start
    if "context_lens" in case.inputs:
        return 0, int(case.inputs["context_lens"].reshape(-1)[row])
    return 0, 0


def table_of(case: Case, row: int) -> tuple[list[int], int]:
    """The page table row of a row and the keys a page; a slot map has pages of one key."""
    inputs = case.inputs
    for name in ("slot_map", "k_slots"):
        if name in inputs:
            return inputs[name][window(case, row)[0] :].tolist(), 1
    table = inputs["page_table"] if "page_table" in inputs else inputs["block_table"]
    size = case.params.get("page_size", 64)
    assert isinstance(size, int)
    if "context_lens" in inputs:
        return table[row // inputs["context_lens"].shape[1]].tolist(), size
    request = int(inputs["row_to_request"][row]) if "row_to_request" in inputs else row
    return table[request].tolist(), size


def legal(
    case: Case, outputs: Mapping[str, Tensor], scores: Tensor | None, row: int, contract: Contract
) -> dict[str, bool | None]:
    """Whether a row of each output is legal; slots beside picks are judged by those picks.

    Args:
        case: whose inputs give windows and tables.
        outputs: raw_indices, ragged_indices, page_indices, any of them.
        scores: [T, L], what the rows are picked from.
        row: its number.
        contract: the freedoms.
    """
    said: dict[str, bool | None] = {}
    start, visible = window(case, row)
    rules = freedoms(contract)
    cells: list[int] = []
    if scores is not None:
        cells = fp32_bits(scores[row, start : start + visible])
    k = case.params.get("k", case.params.get("topk", 0))
    assert isinstance(k, int)
    picks: list[int] | None = None
    for name in ("raw_indices", "ragged_indices"):
        if name in outputs:
            ragged = name == "ragged_indices"
            base = int(case.inputs["topk_indices_offset"][row]) if ragged else 0
            values = [v if v == -1 else v - base for v in outputs[name][row].tolist()]
            said[name] = twin.is_legal(values, cells, visible, k, contract=rules)
            picks = picks or values
    if "page_indices" in outputs:
        slots = outputs["page_indices"][row].tolist()
        table, size = table_of(case, row)
        beside = case.inputs["raw_indices"][row].tolist() if "raw_indices" in case.inputs else picks
        if beside is None:
            said["page_indices"] = twin.is_legal_pages(
                slots, cells, visible, k, table_row=table, page_size=size, contract=rules
            )
        elif all(-1 <= pick < len(table) * size for pick in beside):
            said["page_indices"] = slots == twin.translate(beside, table, size)
    return said


def logit(case: Case, row: int, column: int) -> int:
    """Bits of one cell of an indexer's scores."""
    inputs = case.inputs
    if "k" in inputs:
        key = inputs["k"].view(torch.uint8)[column].tolist()
        scale = fp32_bits(inputs["k_scale"][column : column + 1])[0]
        heads = inputs["q"][row]
    else:
        table, size = table_of(case, row)
        page = inputs["kv_cache"][table[column // size]].tolist()
        key, scale = twin.page_key(page, column % size, size)
        heads = inputs["q"].flatten(0, 1)[row]
    weights = fp32_bits(inputs["weights"][row])
    return twin.mqa_logit(heads.view(torch.uint8).tolist(), key, scale, weights)
