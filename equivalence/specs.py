"""Every op as data: its tensors, its parameters, and what it gives."""

from collections.abc import Mapping

from equivalence.schema import DTYPES, Dim, OpSpec, TensorSpec

SCORES = ("F32", "BF16", "F16")
INDEX = ("I32",)


def _optional(dtypes: tuple[str, ...], *dims: Dim) -> TensorSpec:
    return TensorSpec(dtypes, dims, optional=True)


_WINDOWS = {"row_start": TensorSpec(INDEX, ("T",)), "row_end": TensorSpec(INDEX, ("T",))}
_KEYS = ("F8_E4M3", "U8")
"""e4m3 a value, or e2m1 two values a byte: then D counts bytes, and ue8m0 scales stand in `_sf`."""
_WEIGHTS = ("F32", "BF16")
_BYTES = ("U8", "F8_E4M3")
_DENSE = {
    "q": TensorSpec(_KEYS, ("T", "H", "D")),
    "k": TensorSpec(_KEYS, ("L", "D")),
    "k_scale": _optional(("F32",), "L"),
    "weights": TensorSpec(_WEIGHTS, ("T", "H")),
    "q_sf": _optional(("U8",), "T", "H", "G"),
    "k_sf": _optional(("U8",), "L", "G"),
    **_WINDOWS,
}
_PAGED = {
    "q": TensorSpec(_KEYS, ("B", "n", "H", "D")),
    "kv_cache": TensorSpec(("U8",), ("pages", "page_bytes")),
    "weights": TensorSpec(_WEIGHTS, ("B*n", "H")),
    "q_sf": _optional(("U8",), "B", "n", "H", "G"),
    "context_lens": TensorSpec(INDEX, ("B", "n")),
    "block_table": TensorSpec(INDEX, ("B", "table")),
}
_QSA = {
    "q": TensorSpec(("BF16", "F8_E4M3"), ("T", "H", "D")),
    "k_cache": TensorSpec(("BF16", "F8_E4M3"), ("pages", "page_size", 1, "D")),
    "page_table": TensorSpec(INDEX, ("R", "table")),
    "visible_blocks": TensorSpec(INDEX, ("T",)),
    "query_start_loc": _optional(INDEX, "R+1"),
}
_DENSE_LOGITS = {"logits": TensorSpec(("F32", "BF16"), ("T", "width"))}
_PAGED_LOGITS = {"logits": TensorSpec(("F32", "BF16"), ("B*n", "width"))}


def _picks(rows: Dim, *names: str) -> dict[str, TensorSpec]:
    return {name: TensorSpec(INDEX, (rows, "slots")) for name in names}


def _masks(rows: Dim) -> dict[str, TensorSpec]:
    """A mask that a consumer applies, in one of its forms."""
    return {
        "mask": _optional(("BOOL", "U8"), rows, "lc"),
        "block_ids": _optional(INDEX, rows, "blocks"),
    }


_COLUMNS: Mapping[str, int | str | None] = {"columns": "absolute", "width": None}
_ROWS = {"rows": _optional(INDEX, "P")}
_PUBLISHED = {
    "mask": TensorSpec(("BOOL", "U8"), ("P", "cells")),
    "block_ids": TensorSpec(INDEX, ("P", "ids")),
}
_LAYER: Mapping[str, int | str | None] = {
    "page_size": 64,
    "block_size": 8,
    "topk_blocks": None,
    "init_tokens": 0,
    "local_tokens": 0,
}

OPS: Mapping[str, OpSpec] = {
    "mqa_logits": OpSpec(inputs=_DENSE, outputs=_DENSE_LOGITS, defaults=_COLUMNS),
    "paged_mqa_logits": OpSpec(
        inputs=_PAGED, outputs=_PAGED_LOGITS, defaults={"page_size": 64}, rows="B*n"
    ),
    "qsa_logits": OpSpec(
        inputs=_QSA,
        outputs=_DENSE_LOGITS,
        defaults={"page_size": 64},
    ),
    "ragged_topk": OpSpec(
        inputs={"scores": TensorSpec(SCORES, ("T", "L")), **_WINDOWS, **_masks("T")},
        outputs=_picks("T", "raw_indices"),
        params={"k": int},
        defaults={"block_size": 8},
    ),
    "topk_pages": OpSpec(
        inputs={
            "scores": TensorSpec(SCORES, ("T", "L")),
            **_WINDOWS,
            "page_table": _optional(INDEX, "R", "table"),
            "row_to_request": _optional(INDEX, "T"),
            "slot_map": _optional(("I32", "I64"), "L"),
            "topk_indices_offset": _optional(INDEX, "T"),
            **_masks("T"),
        },
        outputs=_picks("T", "raw_indices", "ragged_indices", "page_indices"),
        params={"k": int},
        defaults={"page_size": 64, "block_size": 8},
    ),
    "translate_pages": OpSpec(
        inputs={
            "raw_indices": TensorSpec(INDEX, ("T", "slots")),
            "page_table": TensorSpec(INDEX, ("R", "table")),
            "row_to_request": _optional(INDEX, "T"),
        },
        outputs=_picks("T", "page_indices"),
        params={"page_size": int},
    ),
    "prefill_indexer": OpSpec(
        inputs={
            **_DENSE,
            "row_to_request": _optional(INDEX, "T"),
            "block_table": _optional(INDEX, "R", "table"),
            "k_slots": _optional(("I32", "I64"), "L"),
            "topk_indices_offset": _optional(INDEX, "T"),
            "score_end": _optional(INDEX, "T"),
            **_masks("T"),
            **_ROWS,
        },
        outputs={
            **_DENSE_LOGITS,
            **_PUBLISHED,
            **_picks("T", "raw_indices", "ragged_indices", "page_indices"),
        },
        params={"topk": int},
        defaults={**_COLUMNS, **_LAYER},
    ),
    "decode_indexer": OpSpec(
        inputs={**_PAGED, **_masks("B*n"), **_ROWS},
        outputs={**_PAGED_LOGITS, **_PUBLISHED, **_picks("B*n", "raw_indices", "page_indices")},
        params={"topk": int},
        defaults=_LAYER,
        rows="B*n",
    ),
    "publish_mask": OpSpec(
        inputs={"scores": TensorSpec(SCORES, ("T", "L")), **_WINDOWS, **_ROWS},
        outputs=_PUBLISHED,
        params={"topk_blocks": int},
        defaults={"block_size": 8},
    ),
    "apply_mask": OpSpec(
        inputs={"scores": TensorSpec(SCORES, ("T", "L")), **_WINDOWS, **_masks("T")},
        outputs={"scores": TensorSpec(SCORES, ("T", "L"))},
        defaults={"block_size": 8},
    ),
    "expand_blocks": OpSpec(
        inputs={
            "block_ids": TensorSpec(INDEX, ("T", "blocks")),
            "positions": TensorSpec(("I32", "I64"), ("T",)),
            "visible_blocks": TensorSpec(INDEX, ("T",)),
        },
        outputs={"packed": TensorSpec(INDEX, ("T", "packed"))},
        defaults={"block_size": 4},
    ),
    "qsa_indexer": OpSpec(
        inputs={**_QSA, "positions": TensorSpec(("I32", "I64"), ("T",))},
        outputs={
            **_DENSE_LOGITS,
            **_picks("T", "block_ids"),
            "packed": TensorSpec(INDEX, ("T", "packed")),
        },
        params={"topk": int},
        defaults={"page_size": 64, "block_size": 4},
    ),
    "gather_rows": OpSpec(
        inputs={
            "shards": TensorSpec(tuple(DTYPES), ("ranks", "places", "W")),
            "row_ids": TensorSpec(INDEX, ("ranks", "places")),
        },
        outputs={"rows": TensorSpec(tuple(DTYPES), ("rows", "W"))},
        params={"rows": int},
        rows="rows",
        whole=True,
    ),
    "merge_topk": OpSpec(
        inputs={
            "scores": TensorSpec(SCORES, ("ranks", "T", "m")),
            "picks": TensorSpec(INDEX, ("ranks", "T", "m")),
            "context_lens": TensorSpec(INDEX, ("T",)),
        },
        outputs=_picks("T", "raw_indices"),
        params={"k": int},
        defaults={"interleave": 1},
    ),
    "quantize_q": OpSpec(
        inputs={
            "x": TensorSpec(("BF16", "F32"), ("T", "H", "D")),
            "weights": _optional(("BF16", "F32"), "T", "H"),
        },
        outputs={
            "values": TensorSpec(("F8_E4M3",), ("T", "H", "D")),
            "scale": TensorSpec(("F32",), ("T", "H")),
            "weights": TensorSpec(("F32",), ("T", "H")),
        },
        params={"style": str},
        defaults={"heads": None, "softmax_scale": None},
    ),
    "quantize_k": OpSpec(
        inputs={"x": TensorSpec(("BF16", "F32"), ("T", "D"))},
        outputs={
            "values": TensorSpec(("F8_E4M3",), ("T", "D")),
            "scale": TensorSpec(("F32",), ("T",)),
        },
        params={"style": str},
    ),
    "gather_keys": OpSpec(
        inputs={
            "kv_cache": TensorSpec(("U8",), ("pages", "page_bytes")),
            "block_table": TensorSpec(INDEX, ("B", "table")),
            "seq_lens": TensorSpec(INDEX, ("B",)),
        },
        outputs={
            "values": TensorSpec(("F8_E4M3",), ("rows", "D")),
            "k_scale": TensorSpec(("F32",), ("rows",)),
        },
        params={"rows": int},
        defaults={"page_size": 64},
        rows="rows",
        whole=True,
    ),
    "move_tokens": OpSpec(
        inputs={
            "kv_cache": TensorSpec(("U8",), ("pages", "page_bytes")),
            "source": TensorSpec(("I32", "I64"), ("m",)),
            "destination": TensorSpec(("I32", "I64"), ("m",)),
        },
        outputs={"moved": TensorSpec(("U8",), ("pages", "page_bytes"))},
        defaults={"page_size": 64, "pad": 0},
        rows="pages",
        whole=True,
        caches={"kv_cache": "moved"},
    ),
    "compose_pages": OpSpec(
        inputs={
            "token_pools": _optional(_BYTES, "layers", "cp", "pool_pages", "token_page_bytes"),
            "index_pools": _optional(_BYTES, "layers", "cp", "pool_pages", "index_page_bytes"),
            "token_rows": _optional(_BYTES, "layers", "T", "token_bytes"),
            "index_rows": _optional(_BYTES, "layers", "T", "index_bytes"),
            "slot_pages": TensorSpec(INDEX, ("S",)),
            "owner": TensorSpec(INDEX, ("N",)),
            "local_page": TensorSpec(INDEX, ("N",)),
            "writer": TensorSpec(INDEX, ("T",)),
            "prefix_lens": TensorSpec(INDEX, ("R",)),
            "extend_lens": TensorSpec(INDEX, ("R",)),
        },
        outputs={
            "token_pages": TensorSpec(_BYTES, ("cp", "layers", "S", "token_page_bytes")),
            "index_pages": TensorSpec(_BYTES, ("cp", "layers", "S", "index_page_bytes")),
            "row_locations": TensorSpec(INDEX, ("cp", "T")),
            "strays": TensorSpec(INDEX, ("cp", "m", 6)),
        },
        params={"cp": int},
        defaults={
            "page_size": 64,
            "pool_group": 1,
            "staging_pages": None,
            "max_tokens": None,
            "max_requests": None,
        },
        rows="cp",
        whole=True,
    ),
}
