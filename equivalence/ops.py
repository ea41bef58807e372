"""The registry: of every op its tensors, its reference scores, its windows, and its slots."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equivalence import consistent, schema, windows
from equivalence.case import Case
from equivalence.checks.pages import SlotsOf
from equivalence.errors import InvalidCase
from equivalence.windows import Windows, param
from refimpl import scoring
from refimpl.pages import translate_pages
from refimpl.scoring import Accumulate

PICKS = ("raw_indices", "ragged_indices")
_MOST = {"k": 1 << 20, "topk": 1 << 20, "page_size": 1 << 20, "width": 1 << 24}
"""The largest value of a parameter: memory is made by each."""


@dataclass(frozen=True, kw_only=True)
class Op:
    """One op.

    Attributes:
        spec: its tensors and parameters.
        windows: rows -> Windows.
        score: the reference's scores of a case; None where scores are an input or not needed.
        arithmetic: the profile a reference uses unless the case names one.
        slots: the map from picks to physical slots; None where the inputs hold none.
        primary: the output that a bare tensor is taken for.
    """

    spec: schema.OpSpec
    windows: Callable[[Case], Windows]
    primary: str
    score: Callable[[Case, Accumulate], Tensor] | None = None
    arithmetic: str | None = None
    slots: Callable[[Case], SlotsOf | None] = lambda _: None


def find(name: str) -> Op:
    """The op of this name.

    Raises:
        InvalidCase: there is none.
    """
    if name not in OPS:
        raise InvalidCase(f"no op named {name!r}: one of {', '.join(OPS)}")
    return OPS[name]


def k_of(case: Case) -> int:
    """Picks a row may hold; 0 for ops that pick nothing."""
    value = case.params.get("k", case.params.get("topk", 0))
    return int(value) if isinstance(value, int) else 0


def validate(case: Case) -> dict[str, int]:
    """Check what can be known without reading tensors; the sizes of the op's dimensions.

    Raises:
        InvalidCase: in one sentence.
    """
    spec = find(case.op).spec
    _check_params(case, spec)
    if case.arithmetic is not None and case.arithmetic not in scoring.PROFILES:
        raise InvalidCase(
            f"no arithmetic named {case.arithmetic!r}: one of {', '.join(scoring.PROFILES)}"
        )
    sizes = schema.bind(spec.inputs, case.inputs)
    rows = sizes["B"] * sizes["n"] if spec.rows == "B*n" else sizes["T"]
    for i, entry in enumerate(case.recorded):
        outputs = {name: spec.outputs[name] for name in entry if name in spec.outputs}
        schema.bind(outputs or spec.outputs, entry, sizes, where=f"recorded.{i}")
    consistent.check(case, sizes)
    kind = case.row_class
    if kind is not None and (kind.dtype != torch.int8 or tuple(kind.shape) != (rows,)):
        raise InvalidCase(f"row_class is {kind.dtype} {list(kind.shape)}; it is int8 [{rows}]")
    return {**sizes, "rows": rows}


def _check_params(case: Case, spec: schema.OpSpec) -> None:
    """Every parameter is the op's, and of its kind."""
    known = {**spec.params, **spec.defaults}
    for name, value in case.params.items():
        if name not in known:
            raise InvalidCase(
                f"params.{name} is not one of {case.op}'s: {', '.join(known) or 'it has none'}"
            )
        if name == "columns":
            if value not in ("absolute", "row-relative"):
                raise InvalidCase(f"params.columns is {value!r}; it is absolute or row-relative")
        elif (type(value) is not int or not 1 <= value <= _MOST[name]) and (
            (name, value) != ("width", None)
        ):
            raise InvalidCase(f"params.{name} is {value!r}; it is 1 to {_MOST[name]:,}")
    for name in spec.params:
        if name not in case.params:
            raise InvalidCase(f"params.{name} is missing")


_SCORERS: Mapping[str, tuple[Callable[..., Tensor], tuple[str, ...], str]] = {
    "mqa": (scoring.mqa_logits, ("columns", "width"), "deep_gemm.sm90"),
    "paged": (scoring.paged_mqa_logits, ("page_size",), "deep_gemm.sm90"),
    "qsa": (scoring.qsa_logits, ("page_size",), "vllm_qsa_prefill.sm90"),
}


def _scorer(kind: str) -> Callable[[Case, Accumulate], Tensor]:
    function, params, arithmetic = _SCORERS[kind]
    names = {
        "mqa": schema.OPS["mqa_logits"].inputs,
        "paged": schema.OPS["paged_mqa_logits"].inputs,
        "qsa": schema.OPS["qsa_logits"].inputs,
    }[kind]

    def score(case: Case, accumulate: Accumulate) -> Tensor:
        tensors = {name: case.inputs[name] for name in names if name in case.inputs}
        return function(
            **tensors,
            **{name: param(case, name) for name in params},
            arithmetic=case.arithmetic or arithmetic,
            accumulate=accumulate,
        )

    return score


def _table_slots(case: Case, table: Tensor, request: Tensor) -> SlotsOf:
    size = param(case, "page_size")

    def slots(rows: Tensor, columns: Tensor) -> Tensor:
        return translate_pages(
            raw_indices=columns.int(),
            page_table=table,
            page_size=size,
            row_to_request=request[rows],
        ).long()

    return slots


def _dense_slots(case: Case) -> SlotsOf | None:
    table = case.inputs.get("page_table", case.inputs.get("block_table"))
    slot_map = case.inputs.get("slot_map", case.inputs.get("k_slots"))
    if table is not None:
        rows = torch.arange(_row_count(case), device=table.device)
        request = case.inputs.get("row_to_request", rows).long()
        # A padding row may name any request: it has no column to look up.
        return _table_slots(case, table, request.clamp(0, len(table) - 1))
    if slot_map is None:
        return None
    start = case.inputs["row_start"].long()
    # An empty window may begin where the map ends, or there may be no map at all.
    held = slot_map if len(slot_map) else slot_map.new_zeros(1)
    last = len(held) - 1
    return lambda rows, columns: held[(start[rows][:, None] + columns).clamp(0, last)].long()


def _paged_slots(case: Case) -> SlotsOf:
    requests, next_n = case.inputs["context_lens"].shape
    table = case.inputs["block_table"]
    request = torch.arange(requests, device=table.device).repeat_interleave(next_n)
    return _table_slots(case, table, request)


def _row_count(case: Case) -> int:
    return validate(case)["rows"]


def base_of(case: Case, stage: str, windows: Windows) -> Tensor:
    """What an output of picks adds to a window-relative column, int64 [T].

    Raises:
        InvalidCase: the output's space cannot be one of picks.
    """
    space = case.spaces.get(stage)
    kind = "row-relative" if space is None else space.kind
    if stage == "ragged_indices":
        if "topk_indices_offset" not in case.inputs:
            raise InvalidCase("ragged_indices need the input topk_indices_offset")
        return case.inputs["topk_indices_offset"].long()
    if kind in ("row-relative", "request-local"):
        return torch.zeros_like(windows.start)
    if kind == "absolute":
        return windows.start
    raise InvalidCase(f"{stage} cannot be in the space {kind!r}")


def width_of(case: Case, stage: str) -> int:
    """Columns of a scores output, or the fewest slots of an index output."""
    if stage == "logits":
        if "k" in case.inputs:
            return int(param(case, "width") or len(case.inputs["k"]))
        table = case.inputs["block_table" if "kv_cache" in case.inputs else "page_table"]
        return int(table.shape[1]) * int(param(case, "page_size"))
    if "raw_indices" in case.inputs:
        return int(case.inputs["raw_indices"].shape[1])
    return k_of(case)


def columns_of(case: Case) -> int:
    """Columns of the widest score row that judging the case needs."""
    if "scores" in case.inputs:
        return int(case.inputs["scores"].shape[1])
    return 1 if find(case.op).score is None else width_of(case, "logits")


def page_size_of(case: Case) -> int:
    """Keys a page; 1 where a slot map stands for the pages."""
    paged = {"page_table", "block_table"} & set(case.inputs)
    return int(param(case, "page_size")) if paged else 1


def dtype_of(stage: str) -> torch.dtype:
    """The dtype of an output: fp32 scores, int32 indices."""
    return torch.float32 if stage == "logits" else torch.int32


def pad_of(case: Case, stage: str) -> int:
    """The value of an unused slot of an output."""
    space = case.spaces.get(stage)
    return -1 if space is None else space.pad


def _op(name: str, windows: Callable[[Case], Windows], primary: str, **rest: Any) -> Op:  # noqa: ANN401
    return Op(spec=schema.OPS[name], windows=windows, primary=primary, **rest)


OPS: Mapping[str, Op] = {
    "mqa_logits": _op(
        "mqa_logits", windows.dense, "logits", score=_scorer("mqa"), arithmetic="deep_gemm.sm90"
    ),
    "paged_mqa_logits": _op(
        "paged_mqa_logits",
        windows.paged,
        "logits",
        score=_scorer("paged"),
        arithmetic="deep_gemm.sm90",
    ),
    "qsa_logits": _op(
        "qsa_logits",
        windows.qsa,
        "logits",
        score=_scorer("qsa"),
        arithmetic="vllm_qsa_prefill.sm90",
    ),
    "ragged_topk": _op("ragged_topk", windows.dense, "raw_indices"),
    "topk_pages": _op("topk_pages", windows.dense, "page_indices", slots=_dense_slots),
    "translate_pages": _op(
        "translate_pages", windows.translate, "page_indices", slots=_dense_slots
    ),
    "prefill_indexer": _op(
        "prefill_indexer",
        windows.dense,
        "raw_indices",
        score=_scorer("mqa"),
        arithmetic="deep_gemm.sm90",
        slots=_dense_slots,
    ),
    "decode_indexer": _op(
        "decode_indexer",
        windows.paged,
        "raw_indices",
        score=_scorer("paged"),
        arithmetic="deep_gemm.sm90",
        slots=_paged_slots,
    ),
}
