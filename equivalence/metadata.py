"""The JSON that makes a safetensors file a case: its fields, its one text and its seal."""

import json
from collections.abc import Collection, Mapping
from typing import Any

from equivalence import digest, header
from equivalence.errors import InvalidCase

SCHEMA = 1

_FIELDS: Mapping[str, type | tuple[type, ...]] = {
    "schema": int,
    "op": str,
    "params": dict,
    "arithmetic": (str, type(None)),
    "spaces": dict,
    "contract": (str, type(None)),
    "recorded": list,
    "flags": list,
    "provenance": dict,
    "reference": dict,
    "layout": dict,
    "digests": dict,
    "digest": str,
}


def read(head: header.Header) -> dict[str, Any]:
    """The JSON of a case, where it is whole and unchanged.

    Raises:
        InvalidCase: it is not, and why.
    """
    text = head.metadata[header.KEY]
    try:
        meta = header.parse(text)
    except InvalidCase as error:
        raise InvalidCase(f"metadata `equivalence` is {error}") from error
    if not isinstance(meta, dict) or type(meta.get("schema")) is not int:
        raise InvalidCase("metadata `equivalence` has no schema number")
    if meta["schema"] != SCHEMA:
        raise InvalidCase(f"schema {meta['schema']} is not known; this version reads {SCHEMA}")
    if set(meta) != set(_FIELDS):
        odd = ", ".join(sorted(set(meta) ^ set(_FIELDS)))
        raise InvalidCase(f"metadata `equivalence` has unknown or missing fields: {odd}")
    check(meta)
    shapes = {name: [entry.dtype, list(entry.shape)] for name, entry in head.tensors.items()}
    unsealed = {name: value for name, value in meta.items() if name != "digest"}
    _check_names(meta, head.tensors)
    if seal(unsealed, shapes) != meta["digest"] or canonical(meta) != text:
        raise InvalidCase(
            "the metadata, or a tensor's dtype or shape, is not what was stored: its digest differs"
        )
    return meta


def check(meta: Mapping[str, Any]) -> None:
    """Every field is flat and of its type, so that nothing later meets another.

    Raises:
        InvalidCase: naming the field.
    """
    for name, kind in _FIELDS.items():
        if not isinstance(meta[name], kind):
            raise InvalidCase(f"metadata `equivalence`.{name} has the wrong type")
    flat = (int, float, str, type(None))
    good = {
        "params": all(isinstance(v, flat) for v in meta["params"].values()),
        "recorded": all(
            _texts(names) and names == sorted(set(names)) for names in meta["recorded"]
        ),
        "spaces": all(
            isinstance(s, dict)
            and set(s) == {"kind", "pad"}
            and isinstance(s["kind"], str)
            and type(s["pad"]) is int
            and -(1 << 31) <= s["pad"] < 1 << 31
            for s in meta["spaces"].values()
        ),
        "flags": _texts(meta["flags"]),
        "layout": all(isinstance(fields, dict) for fields in meta["layout"].values()),
        **{
            name: _texts(list(meta[name].values()))
            for name in ("provenance", "reference", "digests")
        },
    }
    for name, fits in good.items():
        if not fits:
            raise InvalidCase(f"metadata `equivalence`.{name} holds a value of the wrong type")


def _check_names(meta: Mapping[str, Any], tensors: Collection[str]) -> None:
    """The tensors of the file, its digests and its launch chains name each other."""
    known = set(meta["digests"])
    for name in sorted(known ^ set(tensors)):
        raise InvalidCase(f"{name} is {'missing' if name in known else 'in no list of the case'}")
    listed = {f"recorded.{i}.{name}" for i, names in enumerate(meta["recorded"]) for name in names}
    for name in sorted(listed ^ {name for name in tensors if name.startswith("recorded.")}):
        raise InvalidCase(f"{name} is {'missing' if name in listed else 'in no launch chain'}")
    for name in tensors:
        if not name.startswith(("inputs.", "recorded.")) and name != "row_class":
            raise InvalidCase(f"{name} is no tensor of a case")


def _texts(values: Any) -> bool:  # noqa: ANN401 - untrusted JSON
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def canonical(meta: Mapping[str, Any]) -> str:
    """The one text of this JSON.

    Raises:
        InvalidCase: a number in it is NaN or infinite.
    """
    try:
        return json.dumps(meta, sort_keys=True, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise InvalidCase(f"metadata `equivalence` cannot be JSON: {error}") from error


def seal(meta: Mapping[str, Any], shapes: Mapping[str, Any]) -> str:
    """A digest over the case's JSON and the tensors' dtypes and shapes."""
    return digest.of_bytes(f"[{canonical(meta)}, {canonical(shapes)}]".encode())
