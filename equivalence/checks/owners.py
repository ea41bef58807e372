"""Owners: every row that ranks hand together has exactly one, before any byte is compared."""

from collections.abc import Iterator

import torch
from torch import Tensor

from equivalence.verdict import Evidence, Finding

_TOLD = 8


def findings(row_ids: Tensor, *, rows: int, pad: int = -1) -> Iterator[Finding]:
    """One finding for each row that no rank or several hold, and for each id that is no row.

    Args:
        row_ids: int32 [ranks, n], the row of each place of a shard, pads `pad`.
        rows: how many rows there are.
        pad: the id of a place that holds no row.
    """
    ids = row_ids.long()
    held = ids != pad
    strange = (held & ((ids < 0) | (ids >= rows))).nonzero()
    for rank, place in strange[:_TOLD].tolist():
        yield Finding(
            stage="inputs",
            rule="out-of-window",
            place=f"rank {rank} place {place}",
            reading=f"row {int(ids[rank, place])} is none of {rows:,} rows",
        )
    if len(strange):
        return
    owners = torch.zeros(rows + 1, dtype=torch.int64, device=ids.device)
    owners.scatter_add_(0, torch.where(held, ids, rows).flatten(), held.long().flatten())
    for row in (owners[:rows] == 0).nonzero()[:_TOLD, 0].tolist():
        yield Finding(stage="inputs", rule="no-writer", row=row, reading="no rank holds this row")
    for row in (owners[:rows] > 1).nonzero()[:_TOLD, 0].tolist():
        yield Finding(
            stage="inputs",
            rule="two-writers",
            row=row,
            evidence=tuple(
                Evidence(label="rank", place=str(rank), value=f"place {place}")
                for rank, place in (ids == row).nonzero()[:4].tolist()
            ),
            reading="equal bytes by luck do not make two owners one",
        )
