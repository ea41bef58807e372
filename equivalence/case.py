"""Case: what a kernel was called with and what it gave. Space: what its indices count from."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor

from equivalence import layout, schema, specs
from equivalence.errors import InvalidCase

JSON: TypeAlias = "str | int | float | bool | list[JSON] | dict[str, JSON] | None"
SPACES = ("row-relative", "absolute", "request-local", "slot")
ROW_CLASSES = ("live", "padding", "unwritten-by-design", "reused")
PADDING = 1
BY_DESIGN = (2, 3)


@dataclass(frozen=True, kw_only=True)
class Space:
    """What the values of an index tensor mean.

    Attributes:
        kind: "row-relative" (0 is the row's start), "absolute" (a column of the concatenated K),
            "request-local", or "slot" (a physical KV slot).
        pad: the value of an unused slot.
    """

    kind: str
    pad: int = -1

    def __post_init__(self) -> None:
        """The set of spaces is closed."""
        if self.kind not in SPACES:
            message = f"no space named {self.kind!r}: one of {', '.join(SPACES)}"
            raise InvalidCase(message)


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One recorded or generated call.

    Attributes:
        op: a name of `ops.OPS`.
        inputs: tensors the kernel is called with, by keyword.
        params: the rest of its keywords.
        arithmetic: how the reference computes scores (a profile of refimpl.scoring);
            never passed to a kernel.
        spaces: of index outputs that differ from the op's own.
        contract: of the recorded kernel, as `Contract.parse` reads it; of recorded runs alone.
        recorded: one entry a launch chain: outputs of one entry are judged jointly, slot by slot.
        row_class: int8 [T] index into ROW_CLASSES; None means all rows are live.
        flags: the faults this case hunts, by name.
        provenance: free text about the origin.
        reference: digests of the reference's outputs, by output.
        name: how reports call it.
        path: its file, or "".
    """

    op: str
    inputs: Mapping[str, Tensor]
    params: Mapping[str, JSON] = field(default_factory=dict)
    arithmetic: str | None = None
    spaces: Mapping[str, Space] = field(default_factory=dict)
    contract: str | None = None
    recorded: tuple[Mapping[str, Tensor], ...] = ()
    row_class: Tensor | None = None
    flags: frozenset[str] = frozenset()
    provenance: Mapping[str, str] = field(default_factory=dict)
    reference: Mapping[str, str] = field(default_factory=dict)
    name: str = "case"
    path: str = ""


def held(case: Case, *, device: torch.device | str | None = None) -> Case:
    """The case with every tensor in memory, on `device` where one is given."""

    def put(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: tensor if device is None else layout.moved(tensor, device)
            for name, tensor in tensors.items()
        }

    row_class = case.row_class
    if row_class is not None and device is not None:
        row_class = row_class.to(device)
    return replace(
        case,
        inputs=put(case.inputs),
        recorded=tuple(put(entry) for entry in case.recorded),
        row_class=row_class,
    )


def take_rows(case: Case, rows: Tensor) -> Case:
    """The same call with only these rows (int64), in this order, and the requests they belong to.

    Decode rows come by whole requests: all next_n rows of a request stay.
    Rows of an op that has query_start_loc are ascending.
    A call that cannot be cut stays as it is.
    Digests of the reference are dropped, since they speak of every row.
    """
    spec = specs.OPS[case.op]
    if spec.whole:
        return replace(case, reference={})
    sizes = schema.bind(spec.inputs, case.inputs)
    whole = schema.whole_requests(rows, next_n=sizes.get("n", 1))
    # Without row_to_request, row i reads table row i.
    row_tables = (
        "row_to_request" in spec.inputs
        and "row_to_request" not in case.inputs
        and sizes.get("R") == sizes.get("T")
    )
    published = _published(case, whole)

    def take(tensor: Tensor, dims: tuple[schema.Dim, ...]) -> Tensor:
        if not dims:
            return tensor
        if dims[0] in ("T", "B*n") or (dims[0] == "R" and row_tables):
            return _pick(tensor, whole)
        if dims[0] == "B":
            return _pick(tensor, whole[:: sizes.get("n", 1)] // sizes.get("n", 1))
        if dims[0] == "P":
            few = published is not None and len(tensor) == len(case.inputs["rows"])
            return _pick(tensor, published[1] if few and published is not None else whole)
        if "T" in dims:
            return tensor.index_select(dims.index("T"), whole.to(tensor.device))
        return tensor

    inputs = {name: take(t, spec.inputs[name].dims) for name, t in case.inputs.items()}
    if "query_start_loc" in inputs:
        edges = case.inputs["query_start_loc"].to(whole)
        inputs["query_start_loc"] = torch.searchsorted(whole, edges).int()
    if published is not None:
        inputs["rows"] = published[0].to(inputs["rows"])
    return replace(
        case,
        inputs=inputs,
        recorded=tuple(
            {name: take(t, spec.outputs[name].dims) for name, t in entry.items()}
            for entry in case.recorded
        ),
        row_class=None if case.row_class is None else _pick(case.row_class, whole),
        reference={},
    )


def place_of(rows: Tensor, wanted: Tensor) -> Tensor:
    """Where each wanted row stands in the ascending list `rows`, int64; -1 where it does not."""
    listed = rows.to(wanted)
    at = torch.searchsorted(listed, wanted)
    found = at < len(listed)
    found &= listed[at.clamp(max=max(0, len(listed) - 1))] == wanted if len(listed) else found
    return torch.where(found, at, -1)


def published_of(case: Case, rows: Tensor) -> Tensor:
    """Which of some rows publish their mask, int64: all of them where the case lists none."""
    listed = case.inputs.get("rows")
    if listed is None:
        return torch.arange(len(rows), device=rows.device)
    return (place_of(listed, rows) >= 0).nonzero()[:, 0]


def _published(case: Case, rows: Tensor) -> tuple[Tensor, Tensor] | None:
    """Of some rows: the published ones by their new numbers, and their places in what is published.

    None where the case declares no published rows.
    """
    if "rows" not in case.inputs:
        return None
    place = place_of(case.inputs["rows"], rows.to(case.inputs["rows"].device))
    kept = (place >= 0).nonzero()[:, 0]
    return kept, place[kept]


def _pick(tensor: Tensor, rows: Tensor) -> Tensor:
    """A view where the rows are consecutive, a copy elsewhere."""
    first, count = int(rows[0]) if len(rows) else 0, len(rows)
    if count and int(rows[-1]) - first + 1 == count and bool((rows.diff() == 1).all()):
        return tensor[first : first + count]
    return layout.taken(tensor, rows.to(tensor.device))
