"""The twin of layers in sequence: one source, its consumers, row by row in plain lists.

Written from the description of published masks alone: it shares nothing with refimpl, and of the
other twins it takes the logit and the order of scores.
A text is a list of token numbers a request. What a layer makes of a token, or of the tokens
behind one key column, stands in tables, so that repeated text repeats its scores exactly.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import twin

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

BLOCK = 8
Bytes = tuple[int, ...]


class Tables(NamedTuple):
    """What one layer computes of tokens: e4m3 bytes and fp32 bits."""

    queries: tuple[tuple[Bytes, ...], ...]
    weights: tuple[Bytes, ...]
    keys: tuple[Bytes, ...]
    scales: Bytes

    def key_of(self, tokens: Sequence[int]) -> int:
        """Which key the tokens behind one column make."""
        return sum((at + 1) * token for at, token in enumerate(tokens)) % len(self.keys)


class Row(NamedTuple):
    """What a layer makes of one query row; columns count from the request's first."""

    scores: list[int]
    blocks: frozenset[int] | None
    picks: list[int]


@cache
def _logit(tables: Tables, token: int, key: int) -> int:
    return twin.mqa_logit(
        tables.queries[token], tables.keys[key], tables.scales[key], tables.weights[token]
    )


def scores_of(tables: Tables, text: Sequence[int], position: int, ratio: int) -> list[int]:
    """fp32 bits of every column that has ended when the token at `position` asks."""
    columns = (position + 1) // ratio
    return [
        _logit(tables, text[position], tables.key_of(text[j * ratio : (j + 1) * ratio]))
        for j in range(columns)
    ]


def rank(bits: int) -> int:
    """A better score has a higher one."""
    return twin.order_key(bits)


def best_of(scores: Sequence[int], block: int) -> int:
    """The rank of a block's best column."""
    return max(rank(bits) for bits in scores[block * BLOCK : (block + 1) * BLOCK])


def blocks_in(scores: Sequence[int]) -> int:
    """Blocks that a row begins, the last one perhaps in part."""
    return (len(scores) + BLOCK - 1) // BLOCK


def publish(scores: Sequence[int], most: int) -> frozenset[int]:
    """The newest block, and of the others the best above -inf; the lower of two alike."""
    count = blocks_in(scores)
    if count <= most:
        return frozenset(range(count))
    newest = count - 1
    others = [block for block in range(newest) if best_of(scores, block) > rank(twin.MINUS_INF)]
    others.sort(key=lambda block: best_of(scores, block), reverse=True)
    return frozenset([newest, *others[: most - 1]])


def may_publish(scores: Sequence[int], most: int, blocks: Iterable[int]) -> bool:
    """Whether a row may publish these: no more, no fewer, and none left out is better."""
    held, count = set(blocks), blocks_in(scores)
    if count <= most:
        return held == set(range(count))
    if count - 1 not in held or not held <= set(range(count)):
        return False
    able = {b for b in range(count - 1) if best_of(scores, b) > rank(twin.MINUS_INF)}
    chosen = held - {count - 1}
    return (
        chosen <= able
        and len(chosen) == min(most - 1, len(able))
        and all(best_of(scores, a) >= best_of(scores, b) for a in chosen for b in able - chosen)
    )


def pick(scores: Sequence[int], blocks: frozenset[int] | None, k: int) -> list[int]:
    """A row's columns, best first and the lower of two alike; all in order where k suffices."""
    if len(scores) <= k:
        return [*range(len(scores))] + [-1] * (k - len(scores))
    able = _able(scores, blocks)
    able.sort(key=lambda column: rank(scores[column]), reverse=True)
    return able[:k] + [-1] * (k - len(able[:k]))


def may_pick(
    scores: Sequence[int], blocks: frozenset[int] | None, k: int, row: Sequence[int]
) -> bool:
    """Whether a row may hold these picks, in any order: none left out beats one of them."""
    if len(scores) <= k:
        return list(row) == pick(scores, blocks, k)
    able, held = set(_able(scores, blocks)), [column for column in row if column >= 0]
    return (
        len(row) == k
        and len(held) == len(set(held)) == min(k, len(able))
        and set(held) <= able
        and all(rank(scores[a]) >= rank(scores[b]) for a in held for b in able - set(held))
    )


def _able(scores: Sequence[int], blocks: frozenset[int] | None) -> list[int]:
    """Columns that may be picked at all: those at -inf never are, inside a mask."""
    if blocks is None:
        return list(range(len(scores)))
    return [
        column
        for column, bits in enumerate(scores)
        if column // BLOCK in blocks and rank(bits) > rank(twin.MINUS_INF)
    ]


def source_then_consumers(
    *,
    layers: Sequence[Tables],
    texts: Sequence[Sequence[int]],
    extends: Sequence[int],
    ratio: int,
    topk: int,
    topk_blocks: int,
) -> list[list[Row]]:
    """Of every layer its rows: layer 0 publishes, every later one picks inside that."""
    told: list[list[Row]] = []
    for number, tables in enumerate(layers):
        rows: list[Row] = []
        for text, extend in zip(texts, extends, strict=True):
            for position in range(len(text) - extend, len(text)):
                scores = scores_of(tables, text, position, ratio)
                inside = told[0][len(rows)].blocks if number else None
                blocks = inside if number else publish(scores, topk_blocks)
                rows.append(Row(scores, blocks, pick(scores, inside, topk)))
        told.append(rows)
    return told
