"""Cases of a few rows, made by hand, and files that are wrong in one way."""

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equivalence import metadata, store
from equivalence.case import Case
from refimpl.topk import ragged_topk

K = 8


def call_of(case: Case, **changes: Any) -> dict[str, Any]:  # noqa: ANN401 - keywords of an op
    """The keywords a candidate of this case is called with, some of them others."""
    return {**case.inputs, **case.params, **changes}


def ints(*values: object) -> Tensor:
    """An int32 tensor."""
    return torch.tensor(values, dtype=torch.int32)


def scores(*, rows: int = 4, columns: int = 32) -> Tensor:
    """Distinct fp32 scores [rows, columns]."""
    generator = torch.Generator().manual_seed(7)
    order = torch.rand(rows, columns, generator=generator).argsort(1)
    return order.float() / 4 - 2


def topk(name: str = "tiny", **changes: Any) -> Case:  # noqa: ANN401 - fields of a Case
    """`ragged_topk`, 4 rows of 32 columns, k 8: two rows select, one is short, one is empty."""
    values, start, end = scores(), ints(0, 3, 10, 5), ints(32, 31, 14, 5)
    picks = ragged_topk(scores=values, row_start=start, row_end=end, k=K)
    case = Case(
        op="ragged_topk",
        inputs={"scores": values, "row_start": start, "row_end": end},
        params={"k": K},
        recorded=({"raw_indices": picks},),
        provenance={"poison.raw_indices": "-7"},
        name=name,
    )
    return replace(case, **changes)


def pages(**changes: Any) -> Case:  # noqa: ANN401 - fields of a Case
    """`topk_pages` over two requests, pages of 4 keys; picks and slots are one launch chain."""
    base = topk()
    table = ints([5, 3, 9, 7, 2, 4, 6, 8], [11, 12, 13, 14, 15, 16, 17, 18])
    request = ints(0, 0, 1, 1)
    raw = base.recorded[0]["raw_indices"]
    page = table[request.long()].gather(1, raw.clamp(min=0).long() // 4)
    slots = torch.where(raw < 0, -1, page * 4 + raw % 4).int()
    case = replace(
        base,
        op="topk_pages",
        inputs={**base.inputs, "page_table": table, "row_to_request": request},
        params={"k": K, "page_size": 4},
        recorded=({"raw_indices": raw, "page_indices": slots},),
    )
    return replace(case, **changes)


def _bytes(*shape: int) -> Tensor:
    """e4m3 values of moderate size."""
    generator = torch.Generator().manual_seed(11)
    return torch.randn(*shape, generator=generator).to(torch.float8_e4m3fn)


def decode(**changes: Any) -> Case:  # noqa: ANN401 - fields of a Case
    """`decode_indexer`: two requests of one row, 16 heads of 32, pages of 4 keys."""
    values = _bytes(6, 4, 32).view(torch.uint8).reshape(6, 128)
    scale = torch.full((6, 4), 0.5).view(torch.uint8)
    inputs = {
        "q": _bytes(2, 1, 16, 32),
        "kv_cache": torch.cat([values, scale], 1),
        "weights": scores(rows=2, columns=16),
        "context_lens": ints([9], [8]),
        "block_table": ints([1, 2, 3], [4, 5, 0]),
    }
    case = Case(
        op="decode_indexer",
        inputs=inputs,
        params={"topk": 4, "page_size": 4},
        arithmetic="deep_gemm.sm90",
        name="decode",
    )
    return replace(case, **changes)


def prefill(**changes: Any) -> Case:  # noqa: ANN401 - fields of a Case
    """`prefill_indexer`: three rows over 12 keys, 16 heads of 32, nothing recorded."""
    inputs = {
        "q": _bytes(3, 16, 32),
        "k": _bytes(12, 32),
        "k_scale": torch.full((12,), 0.25),
        "weights": scores(rows=3, columns=16),
        "row_start": ints(0, 2, 4),
        "row_end": ints(12, 9, 4),
    }
    case = Case(
        op="prefill_indexer",
        inputs=inputs,
        params={"topk": 4},
        arithmetic="deep_gemm.sm90",
        name="prefill",
    )
    return replace(case, **changes)


def qsa(**changes: Any) -> Case:  # noqa: ANN401 - fields of a Case
    """`qsa_logits`: four rows of two requests, 4 heads of 32, pages of 4 keys."""
    inputs = {
        "q": _bytes(4, 4, 32),
        "k_cache": _bytes(6, 4, 1, 32),
        "page_table": ints([1, 2], [3, 4]),
        "visible_blocks": ints(3, 8, 0, 5),
        "query_start_loc": ints(0, 2, 4),
    }
    case = Case(
        op="qsa_logits",
        inputs=inputs,
        params={"page_size": 4},
        arithmetic="vllm_qsa_prefill.sm90",
        name="qsa",
    )
    return replace(case, **changes)


def swap(case: Case, **tensors: Tensor | None) -> Case:
    """The case with some inputs replaced, or left out where None."""
    inputs = {name: t for name, t in {**case.inputs, **tensors}.items() if t is not None}
    return replace(case, inputs=inputs)


def put(folder: Path, case: Case) -> Path:
    """The case's file in a folder."""
    path = folder / f"{case.name}.safetensors"
    store.save(case, path)
    return path


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    """The header's JSON, and the bytes after it."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write(path: Path, table: object, data: bytes) -> None:
    """A file of this header and these bytes."""
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def reseal(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit the case's JSON in place and seal it again, as a hostile writer would."""
    table, data = header_of(path)
    meta = json.loads(table["__metadata__"]["equivalence"])
    edit(meta)
    shapes = {n: [t["dtype"], t["shape"]] for n, t in table.items() if n != "__metadata__"}
    if "digest" in meta:
        unsealed = {name: value for name, value in meta.items() if name != "digest"}
        meta["digest"] = sealed(unsealed, shapes)
    table["__metadata__"]["equivalence"] = json.dumps(meta, sort_keys=True)
    write(path, table, data)


def sealed(meta: Mapping[str, Any], shapes: Mapping[str, Any]) -> str:
    """The seal, or any text where the JSON has none."""
    try:
        return metadata.seal(meta, shapes)
    except ValueError:
        return ""
