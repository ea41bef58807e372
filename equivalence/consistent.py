"""Whether the parts of a case fit each other, as far as that shows without reading tensors."""

from collections.abc import Mapping

from torch import Tensor

from equivalence.case import Case
from equivalence.errors import InvalidCase
from equivalence.windows import param

_TABLES = ("page_table", "block_table", "slot_map", "k_slots")
_OUTPUTS = ("logits", "raw_indices", "ragged_indices", "page_indices")
_INT32 = 1 << 31


def check(case: Case, sizes: Mapping[str, int]) -> None:
    """Check pages, launch chains, spaces, reference digests and poisons of a case of these sizes.

    Raises:
        InvalidCase: in one sentence that names the part.
    """
    _check_pages(case, sizes)
    for i, entry in enumerate(case.recorded):
        _check_base(case, entry, f"recorded.{i}")
    for name, space in case.spaces.items():
        if name not in _OUTPUTS or name == "logits":
            raise InvalidCase(f"spaces.{name} names no index output of {case.op}")
        if (space.kind == "slot") != (name == "page_indices"):
            raise InvalidCase(f"spaces.{name} cannot be {space.kind!r}")
        if not -_INT32 <= space.pad < _INT32:
            raise InvalidCase(f"spaces.{name} has the pad {space.pad}; it is an int32")
    for name in case.reference:
        if name not in _OUTPUTS:
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
            found[stage] = float(text) if stage == "logits" else _whole(text)
        except ValueError:
            kind = "a number" if stage == "logits" else "an int32"
            raise InvalidCase(f"provenance.{key} is {text!r}; it is {kind}") from None
    return found


def _check_pages(case: Case, sizes: Mapping[str, int]) -> None:
    """A page holds as many keys as page_size says."""
    size = param(case, "page_size")
    if "page_bytes" in sizes and sizes["page_bytes"] != size * (sizes["D"] + 4):
        raise InvalidCase(
            f"inputs.kv_cache has pages of {sizes['page_bytes']} bytes;"
            f" params.page_size {size} and D {sizes['D']} make it {size * (sizes['D'] + 4)}"
        )
    if "page_size" in sizes and sizes["page_size"] != size:
        raise InvalidCase(
            f"inputs.k_cache has pages of {sizes['page_size']} keys; params.page_size is {size}"
        )


def _check_base(case: Case, entry: Mapping[str, Tensor], where: str) -> None:
    """Outputs of picks and slots need what they count from."""
    if "ragged_indices" in entry and "topk_indices_offset" not in case.inputs:
        raise InvalidCase(f"{where}.ragged_indices need inputs.topk_indices_offset")
    if "page_indices" in entry and not any(name in case.inputs for name in _TABLES):
        raise InvalidCase(f"{where}.page_indices need a page table or a slot map among the inputs")


def _whole(text: str) -> int:
    value = float(text)
    if not value.is_integer() or not -_INT32 <= value < _INT32:
        raise ValueError(text)
    return int(value)
