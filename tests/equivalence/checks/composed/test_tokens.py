"""What a page that is no whole page of anything is instead, sentence by sentence."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from paged import made
from tiny import ints
from torch import Tensor

from equivalence import poisons
from equivalence.case import Case
from equivalence.compose import judging
from equivalence.drawn.compose import case_of
from equivalence.planted import compose as planted

BATCH = replace(made([(10, 9)]), owner=ints(-1, 0, 1, 0, 1, 1))
"""Slots 0 and 1 are prefix. Slot 2 carries two tokens of rank 0 before its new tokens 0 and 1; slot
3 has new tokens 2 to 5, slot 4 has 6 to 8. Rank 0 writes slots 2 and 3, rank 1 writes slot 4."""
RANDOM = torch.Generator().manual_seed(0)
POOLS = torch.randint(1, 256, (2, 2, 6, 32), generator=RANDOM, dtype=torch.uint8)
POOLS[1, 1, 2, 8:16] = POOLS[1, 1, 2, 24:]
"""Tokens 1 and 3 of slot 1 are the same."""
ROWS = torch.randint(1, 256, (2, 9, 8), generator=RANDOM, dtype=torch.uint8)
ROWS[1, 8] = 0
CASE = case_of(
    BATCH, pools={"token": POOLS, "index": POOLS}, rows={"token": ROWS, "index": ROWS}, fp8=False
)
POISON = poisons.BYTE[1]
Edit = Callable[[Tensor], object]


def put(tokens: slice | list[int], value: Tensor | int) -> Edit:
    """Tokens of a token page, replaced."""

    def edit(page: Tensor) -> None:
        page.view(4, 8)[tokens] = torch.as_tensor(value, dtype=torch.uint8)

    return edit


def plus(tokens: slice, value: Tensor) -> Edit:
    """Tokens of a token page, and something on top of them."""
    return lambda page: page.view(4, 8)[tokens].add_(value)


def regrouped(first: list[int], second: list[int]) -> Edit:
    """A page whose tokens stand in two parts of so many bytes, from one order to another."""

    def edit(page: Tensor) -> None:
        parts = torch.split(page, [4 * width for width in first])
        rows = torch.cat([part.view(4, -1) for part in parts], 1)
        page.copy_(torch.cat([part.flatten() for part in torch.split(rows, second, 1)]))

    return edit


def told(slot: int, edit: Edit, *, kind: str = "token", case: Case = CASE) -> tuple[str, str]:
    """The rule and the reading of one page of rank 0 in layer 1."""
    outputs = planted.right(case)
    edit(outputs[f"{kind}_pages"][0, 1, slot])
    found = judging.judge(case, outputs).findings[0]
    assert found.place.startswith(f"rank 0 layer 1 {kind} slot {slot} ")
    return found.rule, found.reading


@pytest.mark.parametrize(
    ("slot", "edit", "rule", "reading"),
    [
        (
            3,
            put([1], POISON),
            "unwritten",
            "every byte of token 1 is A7, the buffer's poison: never written, new ones of rank 0",
        ),
        (
            0,
            put([1], POISON),
            "unwritten",
            "every byte of token 1 is A7, the buffer's poison: never written, of rank 0, the owner",
        ),
        (
            2,
            put([0, 1], 0),
            "bits",
            "the carried tokens 0-1 of rank 0, the owner, are zero: only new tokens were placed",
        ),
        (2, put([0], 0), "bits", "token 0 is zero, of rank 0, the owner; the others are right"),
        (
            2,
            put([2, 3], 0),
            "bits",
            "tokens 2-3 are zero, new ones of rank 0; the others are right",
        ),
        (
            2,
            put([1, 2], 0),
            "bits",
            "tokens 1-2 are zero, of rank 0, the owner; the others are right",
        ),
        (
            3,
            put([0, 2], 0),
            "bits",
            "tokens 0 2 are zero, new ones of rank 0; the others are right",
        ),
        (0, put([3], 0), "bits", "token 3 is zero, of rank 0, the owner; the others are right"),
        (
            3,
            plus(slice(1, 3), ROWS[1, 3:5]),
            "two-writers",
            "tokens 1-2 twice the right bytes mod 256: added up twice",
        ),
        (
            3,
            plus(slice(1, 2), POOLS[1, 1, 4, 8:16]),
            "two-writers",
            "token 1 plus what rank 1, the owner, had there, byte by byte mod 256",
        ),
        (
            3,
            regrouped([8], [4, 4]),
            "bits",
            "rows are planar, 4 and 4 bytes of every token: here a token's bytes stand together",
        ),
        (
            3,
            put(slice(4), ROWS[1, 3:7]),
            "page-mismatch",
            "tokens 0-3 hold the rows of the token after, of ranks 0 1: shifted by one",
        ),
        (
            3,
            put(slice(4), ROWS[1, 1:5]),
            "page-mismatch",
            "tokens 0-3 hold the rows of the token before, of rank 0: shifted by one",
        ),
        (
            3,
            put([1], ROWS[1, 2]),
            "page-mismatch",
            "token 1 holds the row of the token before, of rank 0: shifted by one",
        ),
        (
            3,
            put([0, 1], ROWS[1, 6:8]),
            "page-mismatch",
            "tokens 0-1 hold the rows 4 tokens after, of rank 1",
        ),
        (
            3,
            put([0, 1], ROWS[1, :2]),
            "page-mismatch",
            "tokens 0-1 hold the rows 2 tokens before, of rank 0",
        ),
        (
            3,
            put([0, 1], ROWS[1, [7, 5]]),
            "page-mismatch",
            "tokens 0-1 hold the rows of new tokens 7 5, of ranks 0 1",
        ),
        (
            2,
            put([0], ROWS[1, 3]),
            "page-mismatch",
            "token 0 holds the bytes of token 1 of page 4, which slot 3 has",
        ),
        (
            0,
            put([0, 3], POOLS[1, 1, 2, :16].view(2, 8)),
            "page-mismatch",
            "tokens 0 3 hold the bytes of tokens 0 3 of page 2, which slot 1 has",
        ),
        (3, put([0, 1], ROWS[1, [6, 8]]), "bits", ""),
        (3, put([1], ROWS[1, 3] ^ 1), "bits", ""),
    ],
)
def test_a_page_is_read_token_by_token(slot: int, edit: Edit, rule: str, reading: str) -> None:
    """Which tokens are wrong, what they hold instead, and whose it is."""
    assert told(slot, edit) == (rule, reading)


@pytest.mark.parametrize(
    ("edit", "reading"),
    [
        (
            regrouped([4, 4], [8]),
            "rows are interleaved in a planar page: each token's scale behind its key",
        ),
        (
            regrouped([8], [4, 4]),
            "a planar page was read as interleaved, then made planar again",
        ),
    ],
)
def test_the_other_layout_of_an_index_page_is_named(edit: Edit, reading: str) -> None:
    """Keys and scales apart, or each token's beside each other."""
    assert told(3, edit, kind="index") == ("bits", reading)


def test_tokens_without_room_for_a_scale_are_not_planar() -> None:
    """Three bytes are no key and four of a scale."""
    held = {"token": POOLS[..., :12]}, {"token": ROWS[..., :3]}
    small = case_of(BATCH, pools=held[0], rows=held[1], fp8=False)
    assert told(3, regrouped([3], [2, 1]), case=small) == ("bits", "")


def test_a_carried_page_may_have_room_left() -> None:
    """What its owner has behind the new token may be zero already."""
    short, pools = replace(made([(10, 1)]), owner=ints(-1, 0, 1, 0)), POOLS.clone()
    pools[1, 0, 3, 24:] = 0
    case = case_of(short, pools={"token": pools}, rows={"token": ROWS[:, :1]}, fp8=False)
    assert told(2, put([0, 1], 0), case=case) == (
        "bits",
        "the carried tokens 0-1 of rank 0, the owner, are zero: only new tokens were placed",
    )
