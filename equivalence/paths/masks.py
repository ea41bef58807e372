"""How engines publish a mask: candidates of publish_mask, and the bytes of masks each holds.

All choose blocks alike, so what differs between them is memory, form and rows alone.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from equivalence.errors import UsageError
from equivalence.paths.layer import check_whole
from equivalence.paths.publishing import Keeper, call_of, named, publish
from refimpl import blocks, fast, forms, layer, selection

PIECE_ROWS = 550
"""Rows of a piece in the old way of SGLang."""


def pieces(
    *,
    piece_rows: int = PIECE_ROWS,
    keeper: str | Keeper = "reference",
    **call: Any,  # noqa: ANN401 - the inputs and parameters of publish_mask
) -> dict[str, Tensor]:
    """A bool mask of all rows, piece by piece, then concatenated: in memory twice.

    Args:
        piece_rows: rows of a piece.
        keeper: a name in KEEPERS, or a function like them.
        call: the fields of `Call`.

    Returns:
        mask bool [T, lc], also of rows that nobody asks for.

    Raises:
        UsageError: an input is missing or unknown, or a setting is out of range.
    """
    given = call_of(call, pieces)
    check_whole("piece_rows", piece_rows)
    columns = forms.aligned(visible=given.visible(given.every))
    made = [
        publish(given, rows, "bool", keeper, columns=columns)
        for rows in torch.split(given.every, piece_rows)
    ]
    return {"mask": torch.cat(made)}


def preallocated(
    *,
    keeper: str | Keeper = "reference",
    **call: Any,  # noqa: ANN401 - likewise
) -> dict[str, Tensor]:
    """A bool mask of all rows, written straight into one tensor; see `pieces`."""
    given = call_of(call, preallocated)
    return {"mask": publish(given, given.every, "bool", keeper)}


def full_then_tail(
    *,
    keeper: str | Keeper = "reference",
    **call: Any,  # noqa: ANN401 - likewise
) -> dict[str, Tensor]:
    """A bool mask of all rows, of which the declared ones are then copied: mask bool [P, lc]."""
    given = call_of(call, full_then_tail)
    return {"mask": publish(given, given.every, "bool", keeper)[given.published]}


def tail_only(
    *,
    keeper: str | Keeper = "reference",
    **call: Any,  # noqa: ANN401 - likewise
) -> dict[str, Tensor]:
    """A bool mask of the declared rows and no others: mask bool [P, lc]."""
    given = call_of(call, tail_only)
    return {"mask": publish(given, given.published, "bool", keeper)}


def as_ids(
    *,
    ascending: bool = False,
    keeper: str | Keeper = "reference",
    **call: Any,  # noqa: ANN401 - likewise
) -> dict[str, Tensor]:
    """The blocks of the declared rows: block_ids int32 [P, n], pads -1, or INT32_MAX ascending."""
    given = call_of(call, as_ids)
    form: forms.Form = "ascending" if ascending else "unordered"
    return {"block_ids": publish(given, given.published, form, keeper)}


def as_packed(
    *,
    keeper: str | Keeper = "reference",
    **call: Any,  # noqa: ANN401 - likewise
) -> dict[str, Tensor]:
    """A bit a column of the declared rows: mask uint8 [P, lc / 8]."""
    given = call_of(call, as_packed)
    return {"mask": publish(given, given.published, "packed", keeper)}


WAYS: Mapping[str, Callable[..., dict[str, Tensor]]] = MappingProxyType(
    {
        "pieces": pieces,
        "preallocated": preallocated,
        "full_then_tail": full_then_tail,
        "tail_only": tail_only,
        "as_ids": as_ids,
        "as_packed": as_packed,
    }
)


def peak_bytes(
    *,
    way: str,
    rows: int,
    columns: int,
    topk_blocks: int,
    published: int | None = None,
    block_size: int = blocks.BLOCK,
) -> int:
    """Bytes of masks that are alive at once, what is given back among them.

    Not counted: what choosing the blocks takes, which does not grow with the rows.

    Args:
        way: a name in WAYS.
        rows: of the call.
        columns: of a mask row, lc.
        topk_blocks: blocks a row publishes at most.
        published: rows that are declared; all when None.
        block_size: columns a block.

    Raises:
        UsageError: there is no such way.
    """
    named(way, WAYS, "way")
    few = rows if published is None else published
    one = forms.form_bytes(rows=1, columns=columns, topk_blocks=topk_blocks, block_size=block_size)
    return {
        "pieces": 2 * rows * one["bool"],
        "preallocated": rows * one["bool"],
        "full_then_tail": (rows + few) * one["bool"],
        "tail_only": few * one["bool"],
        "as_ids": few * one["unordered"],
        "as_packed": few * one["packed"],
    }[way]


def source(
    *,
    way: str | Callable[..., dict[str, Tensor]] = "preallocated",
    **call: Any,  # noqa: ANN401 - the inputs and parameters of prefill_indexer
) -> dict[str, Tensor]:
    """A candidate of prefill_indexer that publishes its mask a certain way.

    Args:
        way: a name in WAYS, or a candidate of publish_mask.
        call: of a source layer, topk_blocks among it.

    Raises:
        UsageError: there is no such way, or the layer publishes nothing.
    """
    publisher: Callable[..., dict[str, Tensor]] = named(way, WAYS, "way")
    publishes = {n: call.pop(n) for n in ("topk_blocks", "rows") if call.get(n) is not None}
    if "topk_blocks" not in publishes:
        raise UsageError("a source layer needs 'topk_blocks'")
    outputs = layer.prefill_indexer(**call, accumulate=fast.accumulate)
    start, end = call["row_start"], call["row_end"]
    if call.get("columns") == "row-relative":
        start, end = torch.zeros_like(start), end - start
    pins = {name: call.get(name, 0) for name in ("init_tokens", "local_tokens")}
    scores = selection.pin_tokens(scores=outputs["logits"], row_start=start, row_end=end, **pins)
    if "block_size" in call:
        publishes["block_size"] = call["block_size"]
    return outputs | publisher(scores=scores, row_start=start, row_end=end, **publishes)
