"""Faulty ways to bring ranks together: candidates of gather_rows and of merge_topk."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from equivalence.planted.plants import CandidateFault
from refimpl import bits, ranks
from refimpl.topk import PAD


def row_twice(*, shards: Tensor, row_ids: Tensor, rows: int) -> Tensor:
    """The owner of row 0 owns the last row too, and writes row 0 there."""
    out = _scatter(shards, row_ids, rows)
    out[-1] = out[0]
    return out.view(shards.dtype)


def row_of_nobody(*, shards: Tensor, row_ids: Tensor, rows: int) -> Tensor:
    """Where rows do not come out even, the rest is nobody's: zeros."""
    out = _scatter(shards, row_ids, rows)
    out[rows // len(shards) * len(shards) :] = 0
    return out.view(shards.dtype)


def rows_shifted(*, shards: Tensor, row_ids: Tensor, rows: int) -> Tensor:
    """Each rank's rows stand where those of the next one belong."""
    return _scatter(shards.roll(1, 0), row_ids, rows).view(shards.dtype)


def token_twice(**call: Any) -> Tensor:  # noqa: ANN401 - as `ranks.merge_topk` takes it
    """The tokens of rank 0 come from the last rank too."""
    tokens = _tokens(call)
    held = {"scores": call["scores"], "tokens": tokens}
    return _merge(call, **{name: torch.cat([t, t[:1]]) for name, t in held.items()})


def token_of_nobody(**call: Any) -> Tensor:  # noqa: ANN401 - likewise
    """Tokens of the last round, which not every rank has in full, are nobody's."""
    each = len(call["picks"]) * call.get("interleave", 1)
    whole = call["context_lens"][None, :, None] // each * each
    tokens = _tokens(call)
    return _merge(call, scores=call["scores"], tokens=torch.where(tokens < whole, tokens, PAD))


def k_cut(**call: Any) -> Tensor:  # noqa: ANN401 - likewise
    """A rank gives k / R picks, as if winners were spread evenly."""
    few = max(1, call["k"] // len(call["picks"]))
    return _merge(call, scores=call["scores"][..., :few], tokens=_tokens(call)[..., :few])


def tokens_shifted(**call: Any) -> Tensor:  # noqa: ANN401 - likewise
    """Each rank's tokens are counted as those of the next one."""
    return _merge(call, scores=call["scores"], tokens=_tokens(call, shift=1))


def locals_kept(**call: Any) -> Tensor:  # noqa: ANN401 - likewise
    """Tokens stay as their rank counts them."""
    return _merge(call, scores=call["scores"], tokens=call["picks"])


_WRONG_PICKS = frozenset(
    {"lost-winner", "wrong-tie", "order", "out-of-window", "hole", "pad", "duplicate"}
)

GATHERS: Mapping[str, CandidateFault] = MappingProxyType(
    {
        "row-twice": CandidateFault(
            candidate=row_twice,
            rules=frozenset({"bits", "two-writers"}),
            shows="the last row holds row 0, which two ranks wrote",
            needs="a last row that differs from row 0",
        ),
        "row-of-nobody": CandidateFault(
            candidate=row_of_nobody,
            rules=frozenset({"bits", "unwritten", "no-writer"}),
            shows="the last rows hold zeros",
            needs="rows that do not come out even",
        ),
        "rows-shifted": CandidateFault(
            candidate=rows_shifted,
            rules=frozenset({"bits"}),
            shows="each rank's rows stand where those of the next one belong",
            needs="two ranks",
        ),
    }
)
MERGES: Mapping[str, CandidateFault] = MappingProxyType(
    {
        "token-twice": CandidateFault(
            candidate=token_twice,
            rules=_WRONG_PICKS,
            shows="the tokens of rank 0 are picked twice",
            needs="a row that selects and has a token of rank 0 among its picks",
        ),
        "token-of-nobody": CandidateFault(
            candidate=token_of_nobody,
            rules=_WRONG_PICKS,
            shows="tokens of the last round are never picked",
            needs="a row that selects and has such a token among its picks",
        ),
        "k-cut": CandidateFault(
            candidate=k_cut,
            rules=_WRONG_PICKS,
            shows="a rank gives no more than k / R picks",
            needs="a row that selects, with more of its picks on one rank",
        ),
        "tokens-shifted": CandidateFault(
            candidate=tokens_shifted,
            rules=_WRONG_PICKS | {"mask-extra"},
            shows="each rank's tokens are counted as those of the next one",
            needs="two ranks and a row that selects",
        ),
        "locals-kept": CandidateFault(
            candidate=locals_kept,
            rules=_WRONG_PICKS,
            shows="tokens stay as their rank counts them",
            needs="two ranks and a row that selects",
        ),
    }
)


def _scatter(shards: Tensor, row_ids: Tensor, rows: int) -> Tensor:
    """What `ranks.gather_rows` gives, as integers, without its questions."""
    ids, cells = row_ids.flatten().long(), bits.as_int(shards).flatten(0, 1)
    out = cells.new_zeros(rows, cells.shape[1])
    out[ids[ids != PAD]] = cells[ids != PAD]
    return out


def _tokens(call: Mapping[str, Any], *, shift: int = 0) -> Tensor:
    """The picks as tokens of their rows, of a rank that is off by `shift`."""
    picks, many = call["picks"], len(call["picks"])
    rank = (torch.arange(many, device=picks.device) + shift) % many
    interleave = call.get("interleave", 1)
    return ranks.global_ids(picks, rank=rank[:, None, None], ranks=many, interleave=interleave)


def _merge(call: Mapping[str, Any], *, scores: Tensor, tokens: Tensor) -> Tensor:
    rest = {name: x for name, x in call.items() if name not in ("scores", "picks", "interleave")}
    return ranks.merge_tokens(scores=scores, tokens=tokens, **rest)
