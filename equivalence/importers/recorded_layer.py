"""Plain recordings, `format = recorded-layer/0`: tensors of one layer and what its kernels gave."""

import re
from collections.abc import Container, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from equivalence import header, judge, ops, stages, store
from equivalence.case import JSON, Case
from equivalence.errors import InvalidCase, UsageError

FORMAT = "recorded-layer/0"
_KNOWN = {"positions"}
"""Tensors a recording may hold beside the op's own."""
_SETTINGS = ("arithmetic", "contract", "flags", "poison")

_FLAGS = {
    "randn": ("distinct-scores",),
    "repeat": ("exact-ties",),
    "plateau": ("zero-plateau",),
    "outlier": ("odd-windows",),
    "narrow": ("narrow-scores",),
}
_KEPT = ("device", "torch", "cuda", "kernel_scoring", "kernel_topk", "kind", "seed")


def read(path: Path, *, op: str | None = None, settings: Mapping[str, JSON] | None = None) -> Case:
    """One recording as a case, its reference digests included.

    Args:
        path: a safetensors file of this format.
        op: the op, where it should not be told from the tensors.
        settings: params, or the case's own `arithmetic`, `contract` and `flags`, to set;
            `poison` is what index buffers held before each launch.

    Raises:
        InvalidCase: the file is not such a recording, or its tensors do not fit the op.
        UsageError: an unknown op or setting.
    """
    head = header.read(path)
    if head.metadata.get("format") != FORMAT:
        have = head.metadata.get("format", "none")
        raise header.invalid(path, f"format {have!r}; this importer reads {FORMAT!r}")
    if op is not None and op not in ops.OPS:
        raise UsageError(f"no op named {op!r}: one of {', '.join(ops.OPS)}")
    tensors = store.plain_tensors(path, head.tensors)
    try:
        case = _case(path, tensors, head.metadata, op or _guess(tensors))
        case = _set(case, settings or {})
        ops.validate(case)
        case = replace(case, flags=case.flags | _flags(case, head.metadata))
        store.check_words(case)
        return replace(case, reference=judge.reference_digests(case))
    except UsageError:
        raise
    # A reference refuses tensors that it cannot compute with a ValueError.
    except ValueError as error:
        raise header.invalid(path, error) from error


def _guess(tensors: Mapping[str, Tensor]) -> str:
    """The op a recording's tensors belong to."""
    for mark, op in (
        ("kv_cache", "decode_indexer"),
        ("k_cache", "qsa_logits"),
        ("k_scale", "prefill_indexer"),
        ("logits", "ragged_topk"),
    ):
        if mark in tensors:
            return op
    raise InvalidCase(f"no op has these tensors: {', '.join(tensors)}; name one with --op")


def _case(path: Path, tensors: dict[str, Tensor], meta: Mapping[str, str], op: str) -> Case:
    """Inputs by the op's own names; launch chains as the format says."""
    spec = ops.find(op).spec
    source = dict(tensors)
    if "scores" in spec.inputs and "logits" in source:
        source["scores"] = source.pop("logits")
    inputs = {name: source[name] for name in spec.inputs if name in source}
    chains, used = _chains(source, spec.outputs)
    params: dict[str, JSON] = {}
    for key, name in (("topk", "k"), ("topk", "topk"), ("page_size", "page_size")):
        if key in meta and (name in spec.params or name in spec.defaults):
            params[name] = _number(meta, key)
    left = sorted(set(source) - used - set(inputs))
    strange = next((name for name in left if name not in _KNOWN), None)
    if strange is not None:
        known = ", ".join([*spec.inputs, *spec.outputs])
        raise InvalidCase(
            f"{strange} is no tensor of {op}: {known}; outputs may end in .run0, .run1"
        )
    provenance = {name: meta[name] for name in _KEPT if name in meta}
    provenance["source"] = path.name
    if left:
        provenance["not imported"] = ", ".join(left)
    if "poison" in meta:
        provenance["poison.logits"] = meta["poison"]
    return Case(
        op=op,
        inputs=inputs,
        params=params,
        arithmetic=ops.find(op).arithmetic,
        contract=_contract(meta),
        recorded=tuple(chains),
        provenance=provenance,
        name=path.stem,
        path=str(path),
    )


def _chains(
    source: Mapping[str, Tensor], outputs: Container[str]
) -> tuple[list[dict[str, Tensor]], set[str]]:
    """`logits` and the first raw_indices are one launch chain; every other output is its own."""
    runs = {name: re.fullmatch(r"(\w+?)(?:\.run(\d{1,6}))?", name) for name in source}
    found = sorted(
        (match[1] != "logits", match[1] != "raw_indices", match[1], int(match[2] or 0), name)
        for name, match in runs.items()
        if match and match[1] in outputs
    )
    chains: list[dict[str, Tensor]] = []
    for *_, stage, _, name in found:
        first = chains[0] if chains else {}
        if stage == "raw_indices" and set(first) == {"logits"}:
            first[stage] = source[name]
        else:
            chains.append({stage: source[name]})
    return chains, {name for *_, name in found}


def _contract(meta: Mapping[str, str]) -> str | None:
    """The documented contract of the kernels that were recorded."""
    clean = "clean_logits=True" in meta.get("kernel_scoring", "")
    if "fast_topk" in meta.get("kernel_topk", ""):
        return "sgl_kernel.fast_topk_v2" + (",dead=-inf" if clean else "")
    return None


def _number(meta: Mapping[str, str], key: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,18}", meta[key]):
        raise InvalidCase(f"metadata {key} is {meta[key]!r}; it is a whole number")
    return int(meta[key])


def _flags(case: Case, meta: Mapping[str, str]) -> frozenset[str]:
    """What a valid case hunts: by how its scores were made, and by what its windows are."""
    flags = set(_FLAGS.get(meta.get("kind", ""), ()))
    inputs, k = case.inputs, _number(meta, "topk") if "topk" in meta else 0
    start, end = inputs.get("row_start"), inputs.get("row_end")
    if start is not None and end is not None:
        if bool((start > 0).any()):
            flags.add("windows-not-from-zero")
        if bool((end == start).any()):
            flags.add("empty-rows")
        if bool((end - start <= k).any()):
            flags.add("short-rows")
    lengths = inputs.get("context_lens")
    if lengths is not None:
        flags.add("dirty-past-length")
        if lengths.shape[1] > 1:
            flags.add("draft-rows")
        if bool((lengths <= k).any()):
            flags.add("short-rows")
    if "poison" in meta:
        flags.add("dirty-past-length")
    return frozenset(flags)


def _set(case: Case, settings: Mapping[str, Any]) -> Case:
    """The case with what the command line sets."""
    spec = ops.find(case.op).spec
    for key, value in settings.items():
        if key in {**spec.params, **spec.defaults}:
            case = replace(case, params={**case.params, key: value})
        elif key == "arithmetic":
            case = replace(case, arithmetic=str(value))
        elif key == "contract":
            case = replace(case, contract=str(value))
        elif key == "poison":
            indices = (*stages.picked(case), "page_indices", "packed")
            poisons = {f"poison.{n}": str(value) for n in spec.outputs if n in indices}
            case = replace(case, provenance={**case.provenance, **poisons})
        elif key == "flags":
            case = replace(case, flags=case.flags | set(str(value).split("+")))
        else:
            known = ", ".join([*spec.params, *spec.defaults, *_SETTINGS])
            raise UsageError(f"--set {key}: {case.op} has {known}")
    return case
