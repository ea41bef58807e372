"""Launch: what other ways to make a call depend on."""

from dataclasses import dataclass

import torch
from torch import Tensor

from equivalence import ops, stages
from equivalence.case import Case
from equivalence.windows import Windows, param

TABLES = ("scores", "mask", "page_table", "block_table")
"""Inputs that may stand in a wider buffer."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Launch:
    """What schedules need to know of a call.

    Attributes:
        units: what can be called apart: rows, or decode requests.
        next_n: rows of a unit.
        visible: int64 [units] on the CPU, the most columns a row of it sees.
        turns: units at which another request begins.
        k: picks a row may hold, or columns of the blocks it publishes; 0 where nothing is chosen.
        columns: of the widest score row.
        heads: query heads of a row; None where nothing is scored.
        ordered: rows must ascend.
        tables: inputs that could stand in a wider buffer.
        per_column: an input that has one value a column, so that no column can be added; or "".
        cuda: whether the call runs on a CUDA device.
    """

    units: int
    next_n: int
    visible: Tensor
    turns: tuple[int, ...]
    k: int
    columns: int
    heads: int | None
    ordered: bool
    tables: tuple[str, ...]
    per_column: str
    cuda: bool


def launch_of(case: Case, windows: Windows) -> Launch:
    """What schedules need to know of a case held in memory."""
    inputs = case.inputs
    next_n = ops.validate(case).get("n", 1)
    visible = windows.visible.cpu().reshape(-1, next_n)
    request = inputs.get("row_to_request")
    edges = inputs.get("query_start_loc")
    turns: list[int] = []
    if edges is not None:
        turns = sorted(set(edges.tolist()) - {0, len(visible)})
    elif next_n == 1:
        # Requests of concatenated keys begin at columns of their own.
        owner = windows.start if request is None else request
        turns = ((owner[1:] != owner[:-1]).nonzero()[:, 0] + 1).tolist()
    return Launch(
        units=len(visible),
        next_n=next_n,
        visible=visible.amax(1),
        turns=tuple(turns),
        k=stages.k_of(case) or _published(case),
        columns=stages.columns_of(case),
        heads=int(inputs["q"].shape[-2]) if "q" in inputs else None,
        ordered=edges is not None,
        tables=tuple(n for n in TABLES if n in inputs),
        per_column=next((n for n in ("slot_map", "picks") if n in inputs), ""),
        cuda=windows.start.is_cuda,
    )


def _published(case: Case) -> int:
    """Columns of the blocks that a row publishes."""
    if not stages.publishes(case):
        return 0
    return int(param(case, "topk_blocks")) * int(param(case, "block_size"))


def corners(launch: Launch) -> list[int]:
    """The first unit, the last, the longest, the shortest that sees anything, one above k."""
    above = launch.visible.masked_fill(launch.visible <= launch.k, torch.iinfo(torch.int64).max)
    found = [0, launch.units - 1, int(launch.visible.argmax()), int(above.argmin())]
    short = shortest(launch)
    return list(dict.fromkeys(found if short is None else [*found, short]))


def shortest(launch: Launch) -> int | None:
    """The shortest unit that sees anything."""
    seen = (launch.visible > 0).nonzero()[:, 0]
    return int(seen[launch.visible[seen].argmin()]) if len(seen) else None
