"""Masks compared on a GPU beside `torch.equal`, and what judging published ones takes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.measuring import best, timed
from equivalence import judge, memory, sides
from equivalence.case import Case
from equivalence.checks.maskwords import differing
from equivalence.contract import Contract
from refimpl.blocks import row_blocks
from refimpl.masks import publish

Form = Literal["bool", "packed"]
FORMS: tuple[Form, ...] = ("bool", "packed")
GARBAGE = 77


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the part runs with; the defaults are the claims', a test takes small ones.

    Attributes:
        device: where.
        rows: of a mask.
        columns: of a mask, a multiple of 8.
        topk_blocks: that a mask judged by its scores admits.
        rounds: calls of which the best time counts.
    """

    device: str = "cuda"
    rows: int = 1 << 14
    columns: int = 1 << 17
    topk_blocks: int = 2_048
    rounds: int = 5


def masks(setup: Setup) -> Iterator[dict[str, Any]]:
    """Rates of comparing by form and windows; then the judge of masks by their scores."""
    random = torch.Generator(device=setup.device).manual_seed(0)
    blocks = torch.randint(
        0,
        2,
        (setup.rows, setup.columns // 8),
        dtype=torch.uint8,
        device=setup.device,
        generator=random,
    )
    for windows, visible in _windows(setup, random).items():
        rates = {}
        for form in FORMS:
            row = _compared(setup, *pair(blocks, form, visible), visible)
            rates[form] = row["positions_per_second"]
            to_bool = rates[form] / rates["bool"]
            yield {"what": "compared", "form": form, "windows": windows, **row, "to_bool": to_bool}
    del blocks
    yield from _judged(setup, random)


def _windows(setup: Setup, random: torch.Generator) -> dict[str, Tensor]:
    """Columns each row sees."""
    rows, columns = setup.rows, setup.columns
    ragged = torch.randint(
        columns // 4, columns + 1, (rows,), device=setup.device, generator=random
    )
    return {
        "full": torch.full_like(ragged, columns),
        "causal": columns - rows + torch.arange(rows, device=setup.device) + 1,
        "ragged": ragged,
    }


def pair(blocks: Tensor, form: Form, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Two masks that are the same in the windows; past a shorter one the second is garbage."""
    each = 1 if form == "bool" else 8
    want = blocks.repeat_interleave(8, 1) if form == "bool" else blocks * 255
    got = want.clone()
    place = torch.arange(got.shape[1], device=got.device)
    for rows in row_blocks(*got.shape):
        got[rows].masked_fill_(place * each >= visible[rows, None], GARBAGE)
    if form == "bool":
        return want.view(torch.bool), got.view(torch.bool)
    return want, got


def _compared(setup: Setup, want: Tensor, got: Tensor, visible: Tensor) -> dict[str, Any]:
    """Time, rate and memory of `differing`, beside `torch.equal` of the mask and its copy."""
    device = torch.device(setup.device)
    same = want.clone()
    compare = partial(differing, want=want, got=got, visible=visible)
    with memory.measured(device) as meter:
        found = compare()
    assert not bool(found.any())
    taken = _best(setup, device, compare)
    equal = _best(setup, device, lambda: torch.equal(want, same))
    positions = int(visible.sum())
    # Both masks are read.
    read = 2 * positions * want.shape[1] / setup.columns
    rate, peer = read / taken, 2 * want.numel() / equal
    return {
        "positions": positions,
        "seconds": taken,
        "positions_per_second": positions / taken,
        "bytes_per_second": rate,
        "equal_bytes_per_second": peer,
        "ratio_to_equal": rate / peer,
        "judge_bytes": meter.peak,
    }


def _best(setup: Setup, device: torch.device, call: Callable[[], object]) -> float:
    call()
    return best(device, call, rounds=setup.rounds)


def _judged(setup: Setup, random: torch.Generator) -> Iterator[dict[str, Any]]:
    """Masks the reference published, one bit of one of them flipped, each judged by its scores."""
    device = torch.device(setup.device)
    rows, columns = setup.rows, setup.columns
    scores = torch.randn(rows, columns, device=device, generator=random)
    end = columns - rows + 1 + torch.arange(rows, dtype=torch.int32, device=device)
    case = Case(
        op="publish_mask",
        inputs={"scores": scores, "row_start": torch.zeros_like(end), "row_end": end},
        params={"topk_blocks": setup.topk_blocks},
        name=f"masks {rows:,} x {columns:,}",
    )
    for form in FORMS:
        mask = publish(
            scores=scores,
            row_start=case.inputs["row_start"],
            row_end=end,
            topk_blocks=setup.topk_blocks,
            form=form,
        )
        for flipped in (False, True):
            if flipped:
                _flip(mask, rows // 2)
            given = [sides.given(case, {"mask": mask}, form)]
            weigh = partial(judge.weigh, case, given, contract=Contract())
            with memory.measured(device) as meter:
                verdict, taken = timed(device, weigh)
            stage = verdict.stages["mask"]
            yield {
                "what": "judged",
                "form": form,
                "flipped": int(flipped),
                "rows": rows,
                "columns": columns,
                "status": verdict.status.value,
                "rules": dict(stage.rules),
                "failing": list(stage.failing),
                "seconds": taken,
                "judge_bytes": meter.peak,
            }


def _flip(mask: Tensor, row: int) -> None:
    """Another value of a row's first block, in every cell of it."""
    cells = slice(0, 8) if mask.dtype is torch.bool else slice(0, 1)
    mask[row, cells] = ~mask[row, cells]
