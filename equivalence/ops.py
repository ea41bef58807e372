"""The registry: of every op its tensors, its reference scores, its windows, and its slots."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equivalence import consistent, exact, params, schema, slotmap, spans, specs
from equivalence.case import Case
from equivalence.checks import owners, quant
from equivalence.checks.composed import fitting, weighing
from equivalence.checks.pages import SlotsOf
from equivalence.errors import InvalidCase
from equivalence.verdict import Coverage, Finding, Run
from equivalence.windows import Windows, param
from refimpl import bound, scoring
from refimpl.profiles import PROFILES, PUBLISHED
from refimpl.scoring import Accumulate


@dataclass(frozen=True, kw_only=True)
class Op:
    """One op.

    Attributes:
        spec: its tensors and parameters.
        windows: rows -> Windows.
        score: the reference's scores of a case; None where scores are an input or not needed.
        bound: the reference's scores and how far a kernel may lie from them, fp64 each.
        arithmetic: the profile a reference uses unless the case names one.
        slots: the map from picks to physical slots; None where the inputs hold none.
        exact: some rows of the outputs that are compared bit for bit.
        free: of exact outputs, which bytes of some rows the call may change, bool; another one
            that differs was written outside.
        reading: what wrong rows of an exact output look like, see `checks.quant.reading`.
        faults: what is wrong with a call, whatever it gave.
        weigh: (case, sides, progress) -> runs and rows judged, of an op that is not judged block
            by block; then a call with faults is refused before anything is called.
        readable: (case) refuses inputs that are of another kind, before their sizes are read.
        fits: (case, sizes) refuses parts that do not fit each other, beyond `consistent.check`.
        primary: the output that a bare tensor is taken for.
    """

    spec: schema.OpSpec
    windows: Callable[[Case], Windows]
    primary: str
    score: Callable[[Case, Accumulate], Tensor] | None = None
    bound: Callable[[Case], tuple[Tensor, Tensor]] | None = None
    arithmetic: str | None = None
    slots: Callable[[Case], SlotsOf | None] = lambda _: None
    exact: Callable[[Case, Tensor], Mapping[str, Tensor]] | None = None
    free: Callable[[Case, Tensor], Mapping[str, Tensor]] = lambda *_: {}
    reading: Callable[..., str] | None = None
    faults: Callable[[Case], Iterable[Finding]] | None = None
    weigh: Callable[..., tuple[list[Run], Coverage]] | None = None
    readable: Callable[[Case], None] = lambda _: None
    fits: Callable[[Case, Mapping[str, int]], None] = lambda *_: None


def find(name: str) -> Op:
    """The op of this name.

    Raises:
        InvalidCase: there is none.
    """
    if name not in OPS:
        raise InvalidCase(f"no op named {name!r}: one of {', '.join(OPS)}")
    return OPS[name]


def validate(case: Case) -> dict[str, int]:
    """Check what can be known without reading tensors; the sizes of the op's dimensions.

    Raises:
        InvalidCase: in one sentence.
    """
    op = find(case.op)
    spec = op.spec
    params.check(case, spec)
    known = {**PROFILES, **PUBLISHED}
    if case.arithmetic is not None and case.arithmetic not in known:
        raise InvalidCase(f"no arithmetic named {case.arithmetic!r}: one of {', '.join(known)}")
    op.readable(case)
    sizes = schema.bind(spec.inputs, case.inputs)
    rows = _row_count(case, spec, sizes)
    if spec.rows == "rows":
        sizes["rows"] = rows
    sizes.setdefault("P", rows)
    for i, entry in enumerate(case.recorded):
        given = {name: spec.outputs[name] for name in entry if name in spec.outputs}
        _bind_recorded(given or spec.outputs, entry, sizes, rows=rows, where=f"recorded.{i}")
    op.fits(case, sizes)
    consistent.check(case, sizes)
    kind = case.row_class
    if kind is not None and (kind.dtype != torch.int8 or tuple(kind.shape) != (rows,)):
        raise InvalidCase(f"row_class is {kind.dtype} {list(kind.shape)}; it is int8 [{rows}]")
    return {**sizes, "rows": rows}


def _bind_recorded(
    specs_of: Mapping[str, schema.TensorSpec],
    entry: Mapping[str, Tensor],
    sizes: Mapping[str, int],
    *,
    rows: int,
    where: str,
) -> None:
    """Outputs of one chain fit; a mask may publish all rows where only some must be."""
    held: Mapping[str, schema.Shaped] = getattr(entry, "stubs", entry)
    every = {n for n, of in specs_of.items() if "P" in of.dims and n in held}
    every = {name for name in every if _first(held[name]) == rows}
    some = {name: of for name, of in specs_of.items() if name not in every}
    if some:
        schema.bind(some, {n: t for n, t in held.items() if n not in every}, sizes, where=where)
    for name in every:
        one = {name: held[name]}
        schema.bind({name: specs_of[name]}, one, {**sizes, "P": rows}, where=where)


def _first(tensor: schema.Shaped) -> int | None:
    """The first dimension of a tensor, where it has one."""
    return next(iter(tensor.shape), None)


def _row_count(case: Case, spec: schema.OpSpec, sizes: Mapping[str, int]) -> int:
    if spec.rows == "rows":
        return int(param(case, "rows"))
    if spec.rows == "cp":
        return int(param(case, "cp"))
    return sizes["B"] * sizes["n"] if spec.rows == "B*n" else sizes[str(spec.rows)]


_KINDS: Mapping[str, tuple[Callable[..., Tensor], Callable[..., Any], tuple[str, ...], str]] = {
    "mqa_logits": (scoring.mqa_logits, bound.mqa_bound, ("columns", "width"), "deep_gemm.sm90"),
    "paged_mqa_logits": (
        scoring.paged_mqa_logits,
        bound.paged_mqa_bound,
        ("page_size",),
        "deep_gemm.sm90",
    ),
    "qsa_logits": (
        scoring.qsa_logits,
        bound.qsa_bound,
        ("page_size",),
        "vllm_qsa_prefill.sm90",
    ),
}
"""By the op that only scores: its scores, its bound, the parameters of both, the arithmetic."""


def _scored(kind: str) -> dict[str, Any]:
    """What an op needs to score as this one does."""
    function, bounded, names, arithmetic = _KINDS[kind]

    def call(case: Case) -> dict[str, Any]:
        tensors = {n: case.inputs[n] for n in specs.OPS[kind].inputs if n in case.inputs}
        return tensors | {name: param(case, name) for name in names}

    def score(case: Case, accumulate: Accumulate) -> Tensor:
        if "q_sf" in case.inputs:
            raise InvalidCase("no bits are known of ue8m0 scales: judge with scores=bound")
        chain = {"arithmetic": case.arithmetic or arithmetic, "accumulate": accumulate}
        return function(**call(case), **chain)

    def bounds(case: Case) -> tuple[Tensor, Tensor]:
        tensors = call(case)
        scales = {"q_scale": tensors.pop("q_sf", None), "k_scale": tensors.pop("k_sf", None)}
        tensors |= {name: scale for name, scale in scales.items() if scale is not None}
        both: tuple[Tensor, Tensor] = bounded(**tensors, arithmetic=case.arithmetic or arithmetic)
        return both

    return {"score": score, "bound": bounds, "arithmetic": arithmetic}


def _owners(case: Case) -> Iterable[Finding]:
    return owners.findings(case.inputs["row_ids"], rows=int(param(case, "rows")))


def _op(name: str, windows: Callable[[Case], Windows], primary: str, **rest: Any) -> Op:  # noqa: ANN401
    return Op(spec=specs.OPS[name], windows=windows, primary=primary, **rest)


OPS: Mapping[str, Op] = {
    "mqa_logits": _op("mqa_logits", spans.dense, "logits", **_scored("mqa_logits")),
    "paged_mqa_logits": _op(
        "paged_mqa_logits",
        spans.paged,
        "logits",
        **_scored("paged_mqa_logits"),
    ),
    "qsa_logits": _op(
        "qsa_logits",
        spans.qsa,
        "logits",
        **_scored("qsa_logits"),
    ),
    "ragged_topk": _op("ragged_topk", spans.dense, "raw_indices"),
    "topk_pages": _op("topk_pages", spans.dense, "page_indices", slots=slotmap.dense),
    "translate_pages": _op("translate_pages", spans.translate, "page_indices", slots=slotmap.dense),
    "prefill_indexer": _op(
        "prefill_indexer",
        spans.dense,
        "raw_indices",
        **_scored("mqa_logits"),
        slots=slotmap.dense,
    ),
    "decode_indexer": _op(
        "decode_indexer",
        spans.paged,
        "raw_indices",
        **_scored("paged_mqa_logits"),
        slots=slotmap.paged,
    ),
    "publish_mask": _op("publish_mask", spans.dense, "mask"),
    "apply_mask": _op("apply_mask", spans.dense, "scores"),
    "expand_blocks": _op("expand_blocks", spans.expand, "packed"),
    "qsa_indexer": _op(
        "qsa_indexer",
        spans.qsa,
        "packed",
        **_scored("qsa_logits"),
    ),
    "gather_rows": _op("gather_rows", spans.rows, "rows", exact=exact.gathered, faults=_owners),
    "merge_topk": _op("merge_topk", spans.merge, "raw_indices"),
    "quantize_q": _op(
        "quantize_q", spans.rows, "values", exact=exact.quantized_q, reading=quant.reading
    ),
    "quantize_k": _op(
        "quantize_k", spans.rows, "values", exact=exact.quantized_k, reading=quant.reading
    ),
    "gather_keys": _op(
        "gather_keys",
        spans.gather_keys,
        "values",
        exact=exact.gathered_keys,
        reading=quant.reading,
    ),
    "move_tokens": _op(
        "move_tokens",
        spans.move_tokens,
        "moved",
        exact=exact.moved_tokens,
        free=exact.moved_into,
        reading=quant.reading,
    ),
    "compose_pages": _op(
        "compose_pages",
        spans.ranks,
        "token_pages",
        faults=weighing.refused,
        weigh=weighing.weigh,
        readable=fitting.refuse_descriptors,
        fits=fitting.check,
    ),
}
