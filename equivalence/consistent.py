"""Whether the parts of a case fit each other, as far as that shows without reading tensors."""

from collections.abc import Mapping

import torch
from torch import Tensor

from equivalence import specs, stages
from equivalence.case import Case
from equivalence.errors import InvalidCase
from equivalence.schema import Shaped
from equivalence.verdict import PAGES
from equivalence.windows import param
from refimpl.bits import SCALE_BYTES
from refimpl.compose import KINDS

_TABLES = ("page_table", "block_table", "slot_map", "k_slots")
_SCORES = ("logits", "scores")
_DIGESTED = frozenset(n for spec in specs.OPS.values() for n in spec.outputs) - {"scores"}
_INT32 = 1 << 31
_BYTE = 255
_BYTES = ("mask", *PAGES)
_NUMBERS = ("slot_pages", "owner", "local_page", "writer", "prefix_lens", "extend_lens")


def check(case: Case, sizes: Mapping[str, int]) -> None:
    """Check pages, launch chains, spaces, reference digests and poisons of a case of these sizes.

    Raises:
        InvalidCase: in one sentence that names the part.
    """
    _check_pages(case, sizes)
    _check_masks(case)
    _check_scales(case)
    _check_composed(case, sizes)
    known = specs.OPS[case.op].outputs
    for i, entry in enumerate(case.recorded):
        _check_base(case, entry, f"recorded.{i}")
    for name, space in case.spaces.items():
        if name not in known or known[name].dtypes != specs.INDEX:
            raise InvalidCase(f"spaces.{name} names no index output of {case.op}")
        if name in stages.MASKS and space.kind not in ("row-relative", "request-local"):
            raise InvalidCase(f"spaces.{name} cannot be {space.kind!r}: blocks count from the row")
        if (space.kind == "slot") != (name == "page_indices"):
            raise InvalidCase(f"spaces.{name} cannot be {space.kind!r}")
        if not -_INT32 <= space.pad < _INT32:
            raise InvalidCase(f"spaces.{name} has the pad {space.pad}; it is an int32")
    for name in case.reference:
        if name not in _DIGESTED:
            raise InvalidCase(f"reference.{name} names no output")
    poison_of(case)


def refuse_descriptors(case: Case) -> None:
    """Refuse runs of pages and addresses where page numbers belong.

    Raises:
        InvalidCase: naming the tensor.
    """
    if "slot_pages" not in specs.OPS[case.op].inputs:
        return
    inputs = getattr(case.inputs, "stubs", case.inputs)
    for name in _NUMBERS:
        held = inputs.get(name)
        shape, dtype = (getattr(held, part, None) for part in ("shape", "dtype"))
        if shape is not None and len(shape) == 2 and shape[1] == 2:  # noqa: PLR2004 - start, count
            raise InvalidCase(
                f"inputs.{name} is {list(shape)}: starts and counts of runs are descriptors; "
                "the op wants one number each, [n]"
            )
        if dtype in (torch.int64, torch.uint64):
            raise InvalidCase(
                f"inputs.{name} is {str(dtype).removeprefix('torch.')}: addresses and byte "
                "offsets are descriptors; the op wants numbers of pages and ranks, int32"
            )


def _check_composed(case: Case, sizes: Mapping[str, int]) -> None:
    """Pools and rows of a kind come together, of so many ranks, and a page holds page_size rows."""
    if "slot_pages" not in specs.OPS[case.op].inputs:
        return
    inputs = getattr(case.inputs, "stubs", case.inputs)
    if case.row_class is not None:
        raise InvalidCase(f"row_class has no meaning for {case.op}: a rank is live")
    if sizes.get("cp", param(case, "cp")) != param(case, "cp"):
        raise InvalidCase(
            f"inputs hold pools of {sizes['cp']} ranks; params.cp is {param(case, 'cp')}"
        )
    kinds = [kind for kind in KINDS if {f"{kind}_pools", f"{kind}_rows"} & set(inputs)]
    if not kinds:
        pairs = " or ".join(f"{kind}_pools and {kind}_rows" for kind in KINDS)
        raise InvalidCase(f"inputs hold no kind of page: {pairs}")
    for kind in kinds:
        _check_kind(case, kind, inputs, sizes)
    for i, entry in enumerate(case.recorded):
        for stage in PAGES:
            if stage in entry and stage.removesuffix("_pages") not in kinds:
                pools = stage.replace("pages", "pools")
                raise InvalidCase(f"recorded.{i}.{stage} need inputs.{pools}")


def _check_kind(
    case: Case, kind: str, inputs: Mapping[str, Shaped], sizes: Mapping[str, int]
) -> None:
    """The pools and the rows of one kind."""
    pools, rows = inputs.get(f"{kind}_pools"), inputs.get(f"{kind}_rows")
    if pools is None or rows is None:
        raise InvalidCase(f"inputs.{kind}_pools and inputs.{kind}_rows come together")
    if pools.dtype != rows.dtype:
        raise InvalidCase(
            f"inputs.{kind}_pools are {pools.dtype} and inputs.{kind}_rows {rows.dtype}: "
            "bytes of one dtype"
        )
    size, width = int(param(case, "page_size")), sizes[f"{kind}_bytes"]
    if kind == "index" and width <= SCALE_BYTES:
        raise InvalidCase(f"inputs.index_rows of {width} bytes have no key beside the scale")
    if sizes[f"{kind}_page_bytes"] != size * width:
        raise InvalidCase(
            f"inputs.{kind}_pools has pages of {sizes[f'{kind}_page_bytes']} bytes; "
            f"params.page_size {size} and rows of {width} bytes make it {size * width}"
        )


def poison_of(case: Case) -> dict[str, float]:
    """What output buffers held before the recorded launches, by output.

    Raises:
        InvalidCase: a `poison.OUTPUT` of the provenance is no number that the output can hold.
    """
    found: dict[str, float] = {}
    for key, text in case.provenance.items():
        stage = key.removeprefix("poison.")
        if stage == key:
            continue
        try:
            found[stage] = float(text) if stage in _SCORES else _whole(text, stage)
        except ValueError:
            kind = "a number" if stage in _SCORES else "a byte" if stage in _BYTES else "an int32"
            raise InvalidCase(f"provenance.{key} is {text!r}; it is {kind}") from None
    return found


def _check_pages(case: Case, sizes: Mapping[str, int]) -> None:
    """A page holds as many keys as page_size says."""
    size = param(case, "page_size")
    held = sizes.get("page_bytes", 0)
    if held and "D" not in sizes:
        if held % size or held // size <= SCALE_BYTES:
            raise InvalidCase(
                f"inputs.kv_cache has pages of {held} bytes;"
                f" params.page_size {size} keys and their scales do not fill them"
            )
    elif held and held != size * (sizes["D"] + sizes.get("G", SCALE_BYTES)):
        scales = "" if "G" not in sizes else f" and {sizes['G']} scale bytes"
        want = size * (sizes["D"] + sizes.get("G", SCALE_BYTES))
        raise InvalidCase(
            f"inputs.kv_cache has pages of {held} bytes;"
            f" params.page_size {size} and D {sizes['D']}{scales} make it {want}"
        )
    if "page_size" in sizes and sizes["page_size"] != size:
        raise InvalidCase(
            f"inputs.k_cache has pages of {sizes['page_size']} keys; params.page_size is {size}"
        )


def _check_masks(case: Case) -> None:
    """A consumer has one mask, and only a source publishes."""
    spec = specs.OPS[case.op]
    forms = [n for n in stages.MASKS if n in case.inputs and "mask" in spec.inputs]
    if len(forms) > 1:
        raise InvalidCase("inputs have mask and block_ids; a mask has one form")
    if forms and "topk_blocks" in {**spec.params, **spec.defaults} and stages.publishes(case):
        raise InvalidCase(f"inputs.{forms[0]} and params.topk_blocks: a layer applies or publishes")
    if case.op == "apply_mask" and not forms:
        raise InvalidCase("inputs.mask is missing, or inputs.block_ids")
    if "topk_blocks" not in {**spec.params, **spec.defaults} or stages.publishes(case):
        return
    if "rows" in case.inputs:
        raise InvalidCase("inputs.rows are published rows; params.topk_blocks is missing")
    for i, entry in enumerate(case.recorded):
        for name in stages.MASKS:
            if name in entry:
                raise InvalidCase(f"recorded.{i}.{name} needs params.topk_blocks")


def _check_scales(case: Case) -> None:
    """Keys come with one kind of scale, queries with the same."""
    inputs = getattr(case.inputs, "stubs", case.inputs)
    if "weights" not in specs.OPS[case.op].inputs or "q" not in inputs:
        return
    planes = "q_sf" in inputs
    if "k" in inputs and planes != ("k_sf" in inputs):
        raise InvalidCase("inputs.q_sf and inputs.k_sf come together, or neither does")
    if "k" in inputs and planes == ("k_scale" in inputs):
        raise InvalidCase("inputs hold k_scale, or q_sf and k_sf: one of them, not both or none")
    if str(inputs["q"].dtype) == "torch.uint8" and not planes:
        raise InvalidCase("inputs.q is e2m1, two values a byte: it takes the scales q_sf")


def _check_base(case: Case, entry: Mapping[str, Tensor], where: str) -> None:
    """Outputs of picks and slots need what they count from."""
    if "ragged_indices" in entry and "topk_indices_offset" not in case.inputs:
        raise InvalidCase(f"{where}.ragged_indices need inputs.topk_indices_offset")
    if "page_indices" in entry and not any(name in case.inputs for name in _TABLES):
        raise InvalidCase(f"{where}.page_indices need a page table or a slot map among the inputs")


def _whole(text: str, stage: str) -> int:
    value = float(text)
    least, end = (0, _BYTE + 1) if stage in _BYTES else (-_INT32, _INT32)
    if not value.is_integer() or not least <= value < end:
        raise ValueError(text)
    return int(value)
