"""The twin of published masks: scalar and slow, from the contract, in plain lists.

Like `twin`, it shares nothing with refimpl. Scores are the fp32 bits of one row's window,
columns count from the row's start, and a mask is the set of the blocks that a row publishes.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

import twin

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

INT32_MAX = 2**31 - 1


class Rules(NamedTuple):
    """The settings of a source layer."""

    topk_blocks: int
    block_size: int = 8
    nan: str = "propagate"
    short_rows: str = "identity"
    zero_sign: str = "distinct"
    ties: str = "lowest"


def blocks_of(window: Sequence[int], size: int) -> list[list[int]]:
    """The window cut into blocks from its first column on; the last may be short."""
    return [list(window[at : at + size]) for at in range(0, len(window), size)]


def block_score(cells: Iterable[int], nan: str) -> int:
    """The bits that win a block."""
    best = twin.MINUS_INF
    for bits in cells:
        if twin.is_nan(bits):
            if nan != "ignore":
                return twin.NAN
        elif twin.order_key(bits) > twin.order_key(best):
            best = bits
    return best


def _ranks(window: Sequence[int], rules: Rules) -> dict[int, int] | None:
    """Block -> key of every block that competes; None where all are published unread."""
    cells = blocks_of(window, rules.block_size)
    if not cells or (rules.short_rows == "identity" and len(cells) <= rules.topk_blocks):
        return None
    keys = {}
    for block, inside in enumerate(cells):
        bits = block_score(inside, rules.nan)
        if block == len(cells) - 1:
            keys[block] = 1 << 40
        elif bits != twin.MINUS_INF:
            keys[block] = twin.order_key(bits, rules.zero_sign, "first")
    return keys


def _survivors(kept: Iterable[int], window: Sequence[int], rules: Rules) -> frozenset[int]:
    cells = blocks_of(window, rules.block_size)
    lost = {
        block
        for block, inside in enumerate(cells[:-1])
        if rules.nan == "drop" and any(twin.is_nan(bits) for bits in inside)
    }
    return frozenset(kept) - lost


def published(window: Sequence[int], rules: Rules) -> frozenset[int]:
    """The blocks a row publishes, ties at the cutoff by their rule: sort, then cut."""
    keys = _ranks(window, rules)
    if keys is None:
        return frozenset(range(len(blocks_of(window, rules.block_size))))
    side = -1 if rules.ties == "highest" else 1
    order = sorted(keys, key=lambda block: (-keys[block], side * block))
    kept = order[: rules.topk_blocks]
    if rules.ties == "all":
        kept = [block for block in order if keys[block] >= keys[kept[-1]]]
    return _survivors(kept, window, rules)


def legal_published(window: Sequence[int], rules: Rules) -> set[frozenset[int]]:
    """Every set a row may publish, by trial: no block left out beats one that is kept."""
    keys = _ranks(window, rules)
    if keys is None or rules.ties == "all":
        return {published(window, rules)}
    return {
        _survivors(kept, window, rules)
        for kept in combinations(keys, min(rules.topk_blocks, len(keys)))
        if all(keys[a] >= keys[b] for a in kept for b in keys if b not in kept)
    }


def judged(kept: Iterable[int], window: Sequence[int], rules: Rules) -> str:
    """The class or rule of the blocks that a row published."""
    got, want = frozenset(kept), published(window, rules._replace(ties=_broken_by(rules)))
    legal = legal_published(window, rules)
    if got == want:
        return "identical"
    if got in legal:
        return "tied" if rules.ties == "any" else "wrong-tie"
    need = len(want)
    if len(got) > need:
        return "mask-extra"
    if len(got) < need or not frozenset.intersection(*legal) <= got:
        return "mask-missing"
    return "mask-extra"


def _broken_by(rules: Rules) -> str:
    return "lowest" if rules.ties == "any" else rules.ties


def bools(kept: Iterable[int], visible: int, columns: int, size: int) -> list[bool]:
    """A row of the bool form: dead columns are False."""
    blocks = set(kept)
    return [j < visible and j // size in blocks for j in range(columns)]


def octets(row: Sequence[bool]) -> list[int]:
    """A row of the packed form: column j is bit j % 8 of byte j // 8."""
    packed = [0] * -(-len(row) // 8)
    for j, admitted in enumerate(row):
        packed[j // 8] += admitted << j % 8
    return packed


def ids(kept: Iterable[int], slots: int, pad: int) -> list[int]:
    """A row of block ids, ascending, then pads."""
    row = sorted(kept)
    return row + [pad] * (slots - len(row))


def masked(window: Sequence[int], admitted: Sequence[bool]) -> list[int]:
    """The window's scores, -inf where the mask does not admit."""
    return [bits if ok else twin.MINUS_INF for bits, ok in zip(window, admitted, strict=False)]


def consumed(
    window: Sequence[int], admitted: Sequence[bool], k: int, order: Mapping[str, str]
) -> list[int]:
    """A consumer's picks, best first: a short row is 0 .. visible-1, an -inf pick is a pad."""
    if len(window) <= k and order.get("short_rows", "identity") == "identity":
        picks = list(range(len(window)))
    else:
        applied = masked(window, admitted)
        keys = [
            twin.order_key(bits, order.get("zero_sign", "distinct"), order["nan"])
            for bits in applied
        ]
        best = sorted(range(len(window)), key=lambda j: (-keys[j], j))
        picks = [j for j in best if keys[j] > twin.order_key(twin.MINUS_INF)][:k]
    return picks + [-1] * (k - len(picks))


def tail(extend_lens: Sequence[int], length: int) -> list[int]:
    """Numbers of the last rows of each request."""
    rows: list[int] = []
    first = 0
    for extend in extend_lens:
        rows += range(first + max(0, extend - length), first + extend)
        first += extend
    return rows
