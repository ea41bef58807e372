"""Case <-> safetensors: one file a case, its meaning in one metadata key, its bytes digested.

Tensors are stored packed under `inputs.NAME`, `recorded.I.NAME` and `row_class`.
The key `equivalence` holds JSON: schema, op, params and the rest of a Case,
the strides of tensors that were not packed, and a digest of every tensor and of the JSON itself.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from equivalence import digest, flags, header, layout, metadata, ops, plain, poisons
from equivalence.case import Case, Space
from equivalence.contract import Contract
from equivalence.errors import InvalidCase, UsageError
from equivalence.schema import DTYPES

SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Stub:
    """What a header knows of a tensor: enough to check it before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Lazy(Mapping[str, Tensor]):
    """Tensors of one file by name, read when asked for and checked against their digests."""

    def __init__(self, path: Path, prefix: str, stubs: Mapping[str, Stub], meta: Any) -> None:  # noqa: ANN401
        """Know the names; read nothing."""
        self.path, self.prefix, self.stubs, self._meta = path, prefix, dict(stubs), meta

    def __getitem__(self, name: str) -> Tensor:
        """Read one tensor.

        Raises:
            InvalidCase: its bytes are not the ones that were stored.
        """
        if name not in self.stubs:
            raise KeyError(name)
        return _read(self.path, self.prefix + name, self._meta)

    def __contains__(self, name: object) -> bool:
        """Whether there is such a tensor; nothing is read."""
        return name in self.stubs

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self.stubs)

    def __len__(self) -> int:
        """How many there are."""
        return len(self.stubs)


def save(case: Case, path: Path | str) -> None:
    """Write a case to a file of its own, all or nothing.

    Args:
        case: any case that `ops.validate` accepts.
        path: the file; its folder is made.

    Raises:
        InvalidCase: the case does not fit its op, or holds what no file can.
        OSError: the file cannot be written.
    """
    path = Path(path)
    ops.validate(case)
    check_words(case)
    tensors = {f"inputs.{name}": t for name, t in case.inputs.items()}
    for i, entry in enumerate(case.recorded):
        tensors |= {f"recorded.{i}.{name}": t for name, t in entry.items()}
    if case.row_class is not None:
        tensors["row_class"] = case.row_class
    layouts = {name: layout.of(t) for name, t in tensors.items()}
    packed = {name: layout.packed(t) for name, t in tensors.items()}
    meta: dict[str, Any] = {
        "schema": metadata.SCHEMA,
        "op": case.op,
        "params": dict(case.params),
        "arithmetic": case.arithmetic,
        "spaces": {n: {"kind": s.kind, "pad": s.pad} for n, s in case.spaces.items()},
        "contract": case.contract,
        "recorded": [sorted(entry) for entry in case.recorded],
        "flags": sorted(case.flags),
        "provenance": dict(case.provenance),
        "reference": dict(case.reference),
        "layout": {name: each for name, each in layouts.items() if each is not None},
        "digests": {name: digest.of_tensor(t) for name, t in packed.items()},
    }
    shapes = {name: [_dtype_name(t.dtype), list(t.shape)] for name, t in packed.items()}
    meta["digest"] = metadata.seal(meta, shapes)
    metadata.check(meta)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The library makes a file that only its owner may read.
        part.touch()
        mode = part.stat().st_mode
        save_file(packed, part, metadata={header.KEY: metadata.canonical(meta)})
        part.chmod(mode)
        part.replace(path)
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error
    finally:
        part.unlink(missing_ok=True)


def load(path: Path) -> Case:
    """Read a case's header; tensors are read on use.

    Raises:
        InvalidCase: in one line naming the file, the part and the reason.
    """
    try:
        return _load(path)
    except InvalidCase as error:
        raise header.invalid(path, error) from error


def _load(path: Path) -> Case:
    head = header.read(path)
    if header.KEY not in head.metadata:
        recording = "format" in head.metadata
        hint = "; `equivalence import` makes cases of recordings" if recording else ""
        raise InvalidCase(f"no case: its metadata has no key `equivalence`{hint}")
    meta = metadata.read(head)
    for name, entry in head.tensors.items():
        if entry.dtype not in DTYPES:
            raise InvalidCase(f"{name} is {entry.dtype}; a case holds {', '.join(DTYPES)}")
    stubs = {name: Stub(entry.shape, DTYPES[entry.dtype]) for name, entry in head.tensors.items()}
    _check_layouts(meta, stubs)
    entries = [_under(f"recorded.{i}.", stubs) for i in range(len(meta["recorded"]))]
    case = Case(
        op=meta["op"],
        inputs=Lazy(path, "inputs.", _under("inputs.", stubs), meta),
        params=meta["params"],
        arithmetic=meta["arithmetic"],
        spaces={n: Space(kind=s["kind"], pad=s["pad"]) for n, s in meta["spaces"].items()},
        contract=meta["contract"],
        recorded=tuple(
            Lazy(path, f"recorded.{i}.", entry, meta) for i, entry in enumerate(entries)
        ),
        row_class=_read(path, "row_class", meta) if "row_class" in stubs else None,
        flags=frozenset(meta["flags"]),
        provenance=meta["provenance"],
        reference=meta["reference"],
        name=plain.line(path.stem),
        path=str(path),
    )
    ops.validate(case)
    check_words(case)
    return case


def check_words(case: Case) -> None:
    """Refuse words of a case that are none: its contract and its flags.

    Raises:
        InvalidCase: naming the word, and those that exist.
    """
    try:
        if case.contract is not None:
            Contract.parse(case.contract)
    except UsageError as error:
        raise InvalidCase(f"contract: {error}") from error
    for flag in sorted(case.flags - set(flags.known())):
        raise InvalidCase(f"no flag named {flag!r}: one of {', '.join(flags.known())}")


def _check_layouts(meta: Mapping[str, Any], stubs: Mapping[str, Stub]) -> None:
    """Every layout describes a tensor of the case."""
    for name, fields in meta["layout"].items():
        if name not in stubs:
            raise InvalidCase(f"layout.{name} names no tensor of the case")
        try:
            layout.check(fields, stubs[name].shape, stubs[name].dtype)
        except InvalidCase as error:
            raise InvalidCase(f"layout.{name}: {error}") from error


def _under(prefix: str, stubs: Mapping[str, Stub]) -> dict[str, Stub]:
    return {n.removeprefix(prefix): s for n, s in stubs.items() if n.startswith(prefix)}


def _dtype_name(dtype: torch.dtype) -> str:
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    raise InvalidCase(f"{dtype} cannot be stored in a case")


def _read(path: Path, name: str, meta: Mapping[str, Any]) -> Tensor:
    """One tensor, checked, over poisoned memory where it was strided."""
    tensor = plain_tensors(path, [name])[name]
    if digest.of_tensor(tensor) != meta["digests"][name]:
        raise header.invalid(path, f"{name} is not what was stored: its digest differs")
    fields = meta["layout"].get(name)
    if fields is None:
        return tensor
    size = layout.extent(tensor.shape, fields["stride"], fields["offset"])
    memory = torch.empty(size, dtype=tensor.dtype)
    poisons.fill(memory, 0)
    strided = memory.as_strided(tensor.shape, fields["stride"], fields["offset"])
    layout.as_bytes(strided).copy_(layout.as_bytes(tensor))
    return strided


def plain_tensors(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Tensors of any safetensors file, as its bytes are.

    Raises:
        InvalidCase: one of them cannot be read.
    """
    tensors: dict[str, Tensor] = {}
    for name in names:
        try:
            with safe_open(path, framework="pt") as file:
                tensors[name] = file.get_tensor(name)
        except (SafetensorError, OSError, ValueError) as error:
            raise header.invalid(path, f"{name} cannot be read: {error}") from error
    return tensors


fixtures_dir = flags.fixtures_dir


def find(paths: Sequence[Path]) -> list[Path]:
    """The safetensors files named, and those under the folders named, in order and once each.

    Links to folders are not followed.

    Raises:
        UsageError: a path does not exist, or a folder cannot be searched.
    """
    found: list[Path] = []
    for path in paths:
        try:
            if path.is_dir():
                found += sorted(_under_folder(path))
            elif path.exists() or path.is_symlink():
                found.append(path)
            else:
                raise UsageError(plain.line(f"{path} does not exist"))
        except OSError as error:
            where = plain.line(error.filename or path)
            raise UsageError(f"{where} cannot be searched: {error.strerror}") from error
    return list(dict.fromkeys(found))


def _under_folder(folder: Path) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise error

    for place, folders, files in os.walk(folder, onerror=fail):
        for name in [*files, *folders]:
            if name.endswith(SUFFIX):
                yield Path(place, name)


def find_cases(paths: Sequence[Path]) -> list[Path]:
    """The files named, and those under the folders named that mean to be cases or cannot be read.

    Raises:
        UsageError: as `find`.
    """
    return [path for path in find(paths) if path in set(paths) or _may_be_case(path)]


def _may_be_case(path: Path) -> bool:
    try:
        return header.is_case(path)
    except InvalidCase:
        return True


def load_cases(*paths: Path | str, op: str | None = None) -> list[Case]:
    """Cases of files and folders: headers now, tensors on use.

    Args:
        paths: files, or folders searched for *.safetensors; in folders, files that are no case
            are passed over.
        op: only cases of this op.

    Raises:
        InvalidCase: a file cannot be read, or no case is found.
        UsageError: a path does not exist, or `op` is none.
    """
    if op is not None and op not in ops.OPS:
        raise UsageError(f"no op named {op!r}: one of {', '.join(ops.OPS)}")
    cases = [load(path) for path in find_cases([Path(path) for path in paths])]
    chosen = [case for case in cases if op is None or case.op == op]
    if not chosen:
        where = ", ".join(map(str, paths)) or "no path"
        raise InvalidCase(f"no case{f' of op {op}' if op else ''} in {where}")
    return chosen
