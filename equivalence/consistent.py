"""Whether the parts of a case fit each other, as far as that shows without reading tensors."""

from collections.abc import Mapping

from torch import Tensor

from equivalence import specs, stages
from equivalence.case import Case
from equivalence.errors import InvalidCase
from equivalence.verdict import PAGES
from equivalence.windows import param
from refimpl.bits import SCALE_BYTES

_TABLES = ("page_table", "block_table", "slot_map", "k_slots")
_SCORES = ("logits", "scores")
_DIGESTED = frozenset(n for spec in specs.OPS.values() for n in spec.outputs) - {"scores"}
_INT32 = 1 << 31
_BYTE = 255
_BYTES = ("mask", "moved", *PAGES)


def check(case: Case, sizes: Mapping[str, int]) -> None:
    """Check pages, launch chains, spaces, reference digests and poisons of a case of these sizes.

    Raises:
        InvalidCase: in one sentence that names the part.
    """
    _check_pages(case, sizes)
    _check_masks(case)
    _check_scales(case)
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
