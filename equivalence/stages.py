"""Outputs: what each tensor that an op gives must look like, and what its values count from."""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from equivalence import schema, specs
from equivalence.case import Case
from equivalence.errors import InvalidCase
from equivalence.verdict import PAGES
from equivalence.windows import Windows, param
from refimpl.bits import SCALE_BYTES
from refimpl.profiles import find

PICKS = ("raw_indices", "ragged_indices", "block_ids")
"""Outputs whose values are columns, or blocks where blocks are what is picked."""
MASKS = ("mask", "block_ids")
"""Outputs that publish which columns later layers may pick."""

_BITS = 8


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What an output must look like.

    Attributes:
        rows: how many rows it may have.
        dims: what a row is made of; of a wider one the fewest columns.
        wider: whether it may have more.
        dtypes: what it may be.
    """

    rows: tuple[int, ...]
    dims: tuple[int, ...]
    wider: bool
    dtypes: tuple[torch.dtype, ...]

    def misfit(self, tensor: Tensor) -> tuple[str, str, str] | None:
        """The rule, what is wanted and what was got; None where it fits."""
        least = self.dims[0] if self.dims else 0
        if tensor.dtype is torch.uint8 and torch.bool in self.dtypes:
            least = -(-least // _BITS)
        count, *cells = tensor.shape or (-1,)
        fits = count in self.rows and len(cells) == len(self.dims)
        if self.wider:
            wide = fits and cells[0] >= least and tuple(cells[1:]) == self.dims[1:]
        else:
            wide = fits and tuple(cells) == self.dims
        if not wide:
            rows = " or ".join(map(str, dict.fromkeys(self.rows)))
            dims = list(map(str, self.dims))
            dims[:1] = [f"{least} or wider"] if self.wider else dims[:1]
            return "shape", f"[{', '.join([rows, *dims])}]", str(list(tensor.shape))
        if tensor.dtype not in self.dtypes:
            return "dtype", " or ".join(map(_name, self.dtypes)), _name(tensor.dtype)
        return None


def fit(case: Case, stage: str, windows: Windows, *, rows: int) -> Fit:
    """What output `stage` of a case of this many rows must look like."""
    if is_mask(case, stage):
        listed = case.inputs.get("rows")
        visible = windows.visible if listed is None else windows.visible[listed.long()]
        most = int(visible.max()) if len(visible) else 0
        ids = stage == "block_ids"
        return Fit(
            rows=(len(visible), rows),
            # A row of too few slots lacks blocks, which says more.
            dims=(0 if ids else most,),
            wider=True,
            dtypes=(torch.int32,) if ids else (torch.bool, torch.uint8),
        )
    if stage == "strays":
        cells = specs.OPS[case.op].outputs[stage].dims[2]
        return Fit(rows=(rows,), dims=(0, int(cells)), wider=True, dtypes=dtypes_of(case, stage))
    picks = stage in (*PICKS, "page_indices")
    known = picks or stage in ("logits", "packed")
    return Fit(
        rows=(rows,),
        dims=(width_of(case, stage),) if known else dims_of(case, stage),
        wider=picks,
        dtypes=(torch.int32,) if picks else dtypes_of(case, stage),
    )


def unwanted(case: Case, stage: str) -> str:
    """Why nothing can be said of an output that its op may give, or ""."""
    pools = stage.replace("pages", "pools")
    return f"the case has no {pools}" if stage in PAGES and pools not in case.inputs else ""


def picked(case: Case) -> tuple[str, ...]:
    """The outputs of its op that are picks: blocks are not where they may make a mask."""
    given = specs.OPS[case.op].outputs
    return tuple(n for n in PICKS if n in given and (n not in MASKS or "mask" not in given))


def publishes(case: Case) -> bool:
    """Whether the call publishes a mask."""
    return param(case, "topk_blocks") is not None


def is_mask(case: Case, stage: str) -> bool:
    """Whether an output is a mask that the call publishes."""
    return stage in MASKS and publishes(case)


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
    """Columns of an output that has no choice, or the fewest slots of an index output."""
    if stage == "logits":
        if "k" in case.inputs:
            return int(param(case, "width") or len(case.inputs["k"]))
        table = case.inputs["block_table" if "kv_cache" in case.inputs else "page_table"]
        return int(table.shape[1]) * int(param(case, "page_size"))
    if stage == "packed":
        held = case.inputs.get("block_ids")
        blocks = k_of(case) if held is None else held.shape[1]
        return (blocks + 1) * int(param(case, "block_size"))
    if stage in (*PICKS, "page_indices"):
        raw = case.inputs.get("raw_indices")
        return k_of(case) if raw is None else int(raw.shape[1])
    return prod(dims_of(case, stage))


def dims_of(case: Case, stage: str) -> tuple[int, ...]:
    """What every row of an output is made of, where that has one shape."""
    sizes = schema.bind(specs.OPS[case.op].inputs, case.inputs)
    if case.op == "gather_keys":
        sizes["D"] = sizes["page_bytes"] // int(param(case, "page_size")) - SCALE_BYTES
    return tuple(sizes[str(dim)] for dim in specs.OPS[case.op].outputs[stage].dims[1:])


def dtypes_of(case: Case, stage: str) -> tuple[torch.dtype, ...]:
    """The dtypes an output may have: those of its op, or of the input it is made from."""
    if stage == "logits":
        return (torch.float32 if case.arithmetic is None else find(case.arithmetic).logits,)
    for made_from in ("scores", "shards"):
        if made_from in case.inputs and stage in ("scores", "rows"):
            return (case.inputs[made_from].dtype,)
    return tuple(schema.DTYPES[name] for name in specs.OPS[case.op].outputs[stage].dtypes)


def pad_of(case: Case, stage: str) -> int:
    """The value of an unused slot of an output."""
    space = case.spaces.get(stage)
    return -1 if space is None else space.pad


def k_of(case: Case) -> int:
    """Picks a row may hold; 0 for ops that pick nothing."""
    value = case.params.get("k", case.params.get("topk", 0))
    return int(value) if isinstance(value, int) else 0


def columns_of(case: Case) -> int:
    """Columns of the widest score row that judging the case needs."""
    if "scores" in case.inputs:
        return int(case.inputs["scores"].shape[-1])
    given = specs.OPS[case.op].outputs
    if "logits" in given:
        return width_of(case, "logits")
    # Of what is compared whole every value is a cell.
    exact = [name for name in given if name in ("rows", "values", "packed", "moved")]
    return max((width_of(case, name) for name in exact), default=1)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
