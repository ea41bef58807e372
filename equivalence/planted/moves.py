"""Faulty ways to move tokens in planar key pages: candidates of move_tokens."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from equivalence.planted.plants import CandidateFault
from refimpl import bits, pages


def pages_of_tokens(*, kv_cache: Tensor, source: Tensor, destination: Tensor, **_: Any) -> Tensor:  # noqa: ANN401 - the rest of the call
    """The first dimension, which is pages, is indexed with locations of tokens."""
    out = kv_cache.clone()
    out[destination.long()] = kv_cache[source.long()]
    return out


def keys_alone(*, kv_cache: Tensor, **call: Any) -> Tensor:  # noqa: ANN401 - likewise
    """The scales stay."""
    keys = _key_bytes(kv_cache, call)
    right = pages.move_tokens(kv_cache=kv_cache, **call)
    return torch.cat([right[:, :keys], kv_cache[:, keys:]], 1)


def scales_alone(*, kv_cache: Tensor, **call: Any) -> Tensor:  # noqa: ANN401 - likewise
    """The keys stay."""
    keys = _key_bytes(kv_cache, call)
    right = pages.move_tokens(kv_cache=kv_cache, **call)
    return torch.cat([kv_cache[:, :keys], right[:, keys:]], 1)


def one_by_one(*, source: Tensor, destination: Tensor, **call: Any) -> Tensor:  # noqa: ANN401 - likewise
    """Each move is done before the next one reads."""
    out: Tensor = call.pop("kv_cache")
    for i in range(len(source)):
        one, two = source[i : i + 1], destination[i : i + 1]
        out = pages.move_tokens(kv_cache=out, source=one, destination=two, **call)
    return out


def padding_stored(*, kv_cache: Tensor, source: Tensor, pad: int = 0, **call: Any) -> Tensor:  # noqa: ANN401 - likewise
    """What is loaded for padding are zeros, and they are stored all the same."""
    out = pages.move_tokens(kv_cache=kv_cache, source=source, pad=pad, **call)
    if bool((source == pad).any()):
        size, keys = call.get("page_size", 64), _key_bytes(kv_cache, call)
        dim, token = keys // size, pad % size
        out[pad // size, token * dim : (token + 1) * dim] = 0
        out[pad // size, keys:].view(torch.float32)[token] = 0
    return out


def exchanged(*, source: Tensor, destination: Tensor, **call: Any) -> Tensor:  # noqa: ANN401 - likewise
    """Tokens are moved from their destinations to their sources."""
    return pages.move_tokens(source=destination, destination=source, **call)


def interleaved(*, kv_cache: Tensor, source: Tensor, destination: Tensor, **call: Any) -> Tensor:  # noqa: ANN401 - likewise
    """Each token is taken for its key and the scale behind it."""
    size, held = call.get("page_size", 64), source != call.get("pad", 0)
    out = kv_cache.clone()
    tokens = out.view(len(out) * size, -1)
    tokens[destination[held].long()] = tokens[source[held].long()]
    return out


def _key_bytes(kv_cache: Tensor, call: Mapping[str, Any]) -> int:
    """Bytes of the keys of a page, which its scales follow."""
    return kv_cache.shape[1] - bits.SCALE_BYTES * int(call.get("page_size", 64))


_WRONG, _OUTSIDE = frozenset({"bits"}), frozenset({"bits", "wrote-outside"})
_TWO = "pages of two tokens or more"

MOVES: Mapping[str, CandidateFault] = MappingProxyType(
    {
        "pages-of-tokens": CandidateFault(
            candidate=pages_of_tokens,
            rules=_OUTSIDE | {"crash"},
            shows="whole pages are copied, or there is no such page",
            needs=_TWO,
        ),
        "keys-alone": CandidateFault(
            candidate=keys_alone,
            rules=_WRONG,
            shows="moved keys have the scales that stood there before",
            needs="a moved token with another scale than its place",
        ),
        "scales-alone": CandidateFault(
            candidate=scales_alone,
            rules=_WRONG,
            shows="moved scales have the keys that stood there before",
            needs="a moved token with another key than its place",
        ),
        "one-by-one": CandidateFault(
            candidate=one_by_one,
            rules=_WRONG,
            shows="a token that was overwritten before it was read is lost",
            needs="a move that reads what one before it writes",
        ),
        "padding-stored": CandidateFault(
            candidate=padding_stored,
            rules=_OUTSIDE,
            shows="the token at the padding's location is zero",
            needs="padding",
        ),
        "exchanged": CandidateFault(
            candidate=exchanged,
            rules=_OUTSIDE,
            shows="tokens are moved backwards",
            needs="sources that differ",
        ),
        "interleaved": CandidateFault(
            candidate=interleaved,
            rules=_OUTSIDE,
            shows="bytes of other tokens are moved",
            needs=_TWO,
        ),
    }
)
