"""The twin of packed QSA rows: scalar and slow, from the contract, in plain lists."""

from collections.abc import Sequence


def packed_row(
    blocks: Sequence[int], position: int, visible: int, block_size: int = 4
) -> list[int]:
    """One packed row: token by token, appended in reading order."""
    row: list[int] = []
    for block in blocks[: max(0, visible)]:
        row += [-1 if block < 0 else block * block_size + i for i in range(block_size)]
    open_group = [t for t in range(position + 1) if t // block_size == (position + 1) // block_size]
    row += open_group
    count = len(row)
    return row + [-1] * ((len(blocks) + 1) * block_size - 1 - count) + [count]


def picked_blocks(scores: Sequence[float], visible: int, k: int) -> list[int]:
    """Best first, the lowest block of tied ones; a short row is 0 .. visible - 1."""
    seen = range(max(0, visible))
    best = list(seen) if visible <= k else sorted(seen, key=lambda b: (-scores[b], b))[:k]
    return best + [-1] * (k - len(best))


def attended(row: Sequence[int]) -> list[int]:
    """The tokens that attention reads: of the counted prefix, holes left out."""
    return [token for token in row[: row[-1]] if token >= 0]
