"""Hypothesis strategies: small cases full of ties, plateaus, special values and odd windows.

They need hypothesis, which the rest of the package does not.
"""

from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from equivalence.case import Case
from equivalence.contract import FREEDOMS, OF_MASKS, Contract

__all__ = [
    "PICK_FREEDOMS",
    "contracts",
    "page_tables",
    "pick_contracts",
    "ragged_topk_cases",
    "score_bits",
    "scores",
    "topk_pages_cases",
    "windows",
]

PICK_FREEDOMS = (
    "order",
    "ties",
    "short_rows",
    "holes",
    "empty_rows",
    "minus_inf",
    "nan",
    "zero_sign",
)
"""The keys of a contract that say which picks of a row are legal."""

_SIGN = 1 << 31
_ZEROS = (0x00000000, 0x80000000)
_INFINITIES = (0x7F800000, 0xFF800000)
_NANS = (0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF)
_FINITE = (0x3F800000, 0x3F800001, 0xBF800000, 0x00000001, 0x80000001, 0x7F7FFFFF, 0xFF7FFFFF)


def score_bits(*, nan: bool = False) -> SearchStrategy[int]:
    """Bits of one fp32 score, 0 to 2**32 - 1: few values, so that they meet, and any value.

    Args:
        nan: whether NaNs of every kind are among them.
    """
    special = (*_ZEROS, *_INFINITIES, *_FINITE, *(_NANS if nan else ()))
    anything = st.integers(0, 2**32 - 1)
    if not nan:
        anything = anything.filter(lambda bits: bits % _SIGN <= _INFINITIES[0])
    return st.sampled_from(special) | anything


@st.composite
def scores(draw: Any, *, rows: int, columns: int, nan: bool = False) -> Tensor:  # noqa: ANN401 - hypothesis' draw
    """fp32 [rows, columns] of at most four values, or each its own."""
    kind = score_bits(nan=nan)
    if draw(st.booleans()):
        kind = st.sampled_from(draw(st.lists(kind, min_size=1, max_size=4)))
    cells = draw(st.lists(kind, min_size=rows * columns, max_size=rows * columns))
    signed = [bits - 2 * _SIGN if bits >= _SIGN else bits for bits in cells]
    return torch.tensor(signed, dtype=torch.int32).view(torch.float32).reshape(rows, columns)


@st.composite
def windows(draw: Any, *, rows: int, columns: int) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - as above
    """row_start and row_end, int32 [rows]: forward windows inside the columns, empty ones too."""
    edge = st.integers(0, columns)
    spans = [sorted((draw(edge), draw(edge))) for _ in range(rows)]
    start, end = torch.tensor(spans, dtype=torch.int32).reshape(rows, 2).unbind(1)
    return start.contiguous(), end.contiguous()


def contracts() -> SearchStrategy[Contract]:
    """Every combination of freedoms."""
    keys = {key: st.sampled_from(values) for key, values in FREEDOMS.items()}
    return st.builds(Contract, **keys, reserved_pages=st.integers(0, 2))


def pick_contracts(**fixed: str) -> SearchStrategy[Contract]:
    """Every combination of the freedoms of picks; some may be fixed."""
    keys = {
        key: st.sampled_from([value for value in FREEDOMS[key] if value != OF_MASKS.get(key)])
        for key in PICK_FREEDOMS
        if key not in fixed
    }
    return st.builds(Contract, **keys, **{key: st.just(value) for key, value in fixed.items()})


@st.composite
def page_tables(
    draw: Any,  # noqa: ANN401 - as above
    *,
    requests: int,
    pages: int,
    shared: bool = False,
) -> Tensor:
    """Physical pages int32 [requests, pages], from 1 on.

    Args:
        draw: hypothesis' own.
        requests: rows of the table.
        pages: logical pages a request.
        shared: whether pages may repeat, within a request and between requests.
    """
    count = requests * pages
    most = max(1, count // 2) if shared else 2 * count
    numbers = draw(
        st.lists(st.integers(1, most), min_size=count, max_size=count, unique=not shared)
    )
    return torch.tensor(numbers, dtype=torch.int32).reshape(requests, pages)


@st.composite
def ragged_topk_cases(
    draw: Any,  # noqa: ANN401 - as above
    *,
    most_rows: int = 3,
    most_columns: int = 10,
    nan: bool = False,
) -> Case:
    """`ragged_topk` of up to so many rows and columns, k of 1 up to the columns."""
    rows, columns = draw(st.integers(1, most_rows)), draw(st.integers(1, most_columns))
    start, end = draw(windows(rows=rows, columns=columns))
    return Case(
        op="ragged_topk",
        inputs={
            "scores": draw(scores(rows=rows, columns=columns, nan=nan)),
            "row_start": start,
            "row_end": end,
        },
        params={"k": draw(st.integers(1, columns))},
    )


@st.composite
def topk_pages_cases(
    draw: Any,  # noqa: ANN401 - as above
    *,
    most_rows: int = 3,
    most_columns: int = 10,
    nan: bool = False,
    shared: bool = False,
) -> Case:
    """A `ragged_topk_cases` with a page table row for each query row."""
    case: Case = draw(ragged_topk_cases(most_rows=most_rows, most_columns=most_columns, nan=nan))
    rows, columns = case.inputs["scores"].shape
    size = draw(st.integers(1, 4))
    table = draw(page_tables(requests=rows, pages=-(-columns // size), shared=shared))
    return Case(
        op="topk_pages",
        inputs={**case.inputs, "page_table": table},
        params={**case.params, "page_size": size},
    )
