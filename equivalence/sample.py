"""A seeded sample of rows: the rows where paths go wrong first, then random ones."""

import torch
from torch import Tensor

from equivalence.case import BY_DESIGN, Case
from equivalence.windows import Windows

LEAST = 256
"""Rows of a layer-forward that a reference scores at least, where there are so many."""


def rows_of(
    case: Case,
    windows: Windows,
    *,
    count: int = LEAST,
    seed: int = 0,
    edges: tuple[int, ...] = (),
    first: Tensor | None = None,
) -> Tensor:
    """At most `count` rows, ascending; rows that no kernel writes by design only where all fit.

    The first and last row of each request, the rows at both sides of each edge, the longest and
    the shortest come first, as far as they take half the sample; then rows of `first`, as far as
    they take half of what is left; then random ones.

    Args:
        case: with row_to_request where the op has it.
        windows: of every row.
        count: rows in the sample; all of them where the case has no more.
        seed: of the random ones.
        edges: row numbers at which a path begins another chunk.
        first: int64 rows to prefer, as those where two arms differ.

    Returns:
        int64 [n] on the windows' device.
    """
    total, device = len(windows.start), windows.start.device
    if total <= count:
        return torch.arange(total, device=device)
    random = torch.Generator().manual_seed(seed)
    written = _written(case, total)
    corners = _corners(case, windows, edges).cpu()
    chosen = _some(corners[written[corners]], count // 2, random)
    if first is not None:
        preferred = first.cpu()[written[first.cpu()]]
        fresh = preferred[~torch.isin(preferred, chosen)]
        chosen = torch.cat([chosen, _some(fresh, (count - len(chosen)) // 2, random)])
    shuffled = torch.randperm(total, generator=random, device="cpu")
    shuffled = shuffled[written[shuffled]]
    rest = shuffled[~torch.isin(shuffled, chosen)][: count - len(chosen)]
    return torch.cat([chosen, rest]).sort().values.to(device)


def _written(case: Case, total: int) -> Tensor:
    """Rows that a kernel writes, bool [T] in the host's memory."""
    kinds = torch.zeros(total, device="cpu") if case.row_class is None else case.row_class.cpu()
    return ~torch.isin(kinds, torch.tensor(BY_DESIGN, device="cpu"))


def _corners(case: Case, windows: Windows, edges: tuple[int, ...]) -> Tensor:
    """Rows at the ends of requests, chunks and lengths."""
    total, device = len(windows.start), windows.start.device
    request = case.inputs.get("row_to_request", windows.start)
    turns = (request[1:] != request[:-1]).nonzero()[:, 0]
    cuts = torch.tensor([e for e in edges if 0 < e < total], dtype=torch.int64, device=device)
    ends = torch.tensor([0, total - 1], device=device)
    extreme = torch.stack([windows.visible.argmax(), windows.visible.argmin()])
    corners: Tensor = torch.unique(torch.cat([ends, extreme, turns, turns + 1, cuts - 1, cuts]))
    return corners


def _some(rows: Tensor, most: int, random: torch.Generator) -> Tensor:
    """At most so many of them."""
    if len(rows) <= most:
        return rows
    return rows[torch.randperm(len(rows), generator=random, device="cpu")[:most]]
