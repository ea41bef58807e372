"""Whether the parts of a step fit each other, as far as that shows without reading tensors."""

from collections.abc import Mapping

import torch

from equivalence.case import Case
from equivalence.errors import InvalidCase
from equivalence.schema import Shaped
from equivalence.verdict import PAGES
from equivalence.windows import param
from refimpl.batch import TENSORS
from refimpl.bits import SCALE_BYTES
from refimpl.compose import KINDS


def refuse_descriptors(case: Case) -> None:
    """Refuse runs of pages and addresses where page numbers belong.

    Raises:
        InvalidCase: naming the tensor.
    """
    inputs = getattr(case.inputs, "stubs", case.inputs)
    for name in TENSORS:
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


def check(case: Case, sizes: Mapping[str, int]) -> None:
    """Pools and rows of a kind come together, of so many ranks, and a page holds page_size rows.

    Raises:
        InvalidCase: in one sentence that names the part.
    """
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
