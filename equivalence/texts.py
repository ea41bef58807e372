"""Texts: tokens from a seed, and the tensors an indexer would be given for them.

A token is an int64 that stands for a word and all it meant where it stood.
Query and weights follow from the token, a key from the tokens its column covers, and no position
enters, as RoPE would: repeated text gives repeated keys, bit for bit.
Cold text has no token twice. About a quarter of the repeated tokens are dull: every head dislikes
their keys, which score exactly 0, and their queries weigh all heads by less than 0, so that the
zeros win.
Magnitudes of queries and keys are log-uniform in [0.25, 4), weights uniform in [-1, 1) and scales
in [0.5, 1.5): invented, none was taken from a model.

Only integers and exact fp32 are computed, so the bytes are the same on every device.
"""

from collections.abc import Mapping
from hashlib import blake2b

import torch
from torch import Tensor

from refimpl.bits import E4M3

Device = torch.device | str | None

TEXTS: Mapping[str, tuple[int, int]] = {
    "cold": (1, 0),
    "repeated": (1024, 1024),
    "tools": (2048, 1536),
}
"""Text -> a period in tokens, and how many of its first tokens are the same in every period."""

_ODD, _ODDER = 0x2545F4914F6CDD1D, 0x5851F42D4C957F2D
_UNIQUE, _STREAM = 1 << 32, 1 << 40
_MANTISSA = (1 << 24) - 1
# Of an e4m3 byte: its sign, 32 magnitudes from 0.25 to 3.75, and -3.75.
_SIGN, _MAGNITUDES, _LEAST, _DISLIKED = 0x80, 0x1F, 0x28, 0xC7


def salt(*parts: int | str) -> int:
    """An int64 of its own for every tuple of parts."""
    found = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(found, "little", signed=True)


def mix(x: Tensor) -> Tensor:
    """Hash int64 in place: every bit of a value moves every bit of the result."""
    for odd in (_ODD, _ODDER):
        x ^= (x >> 32).bitwise_and_(_UNIQUE - 1)
        x *= odd
    x ^= (x >> 32).bitwise_and_(_UNIQUE - 1)
    return x


def tokens(
    text: str,
    *,
    end: int,
    seed: int,
    stream: int = 0,
    shared: int = 0,
    scale: int = 1,
    device: Device = None,
) -> Tensor:
    """The first tokens of a text, int64 [end].

    Args:
        text: a name in TEXTS.
        end: how many.
        seed: of everything.
        stream: which of the texts of this kind.
        shared: so many of the first are those of stream 0.
        scale: divides the period.
        device: where they are.

    A token is a multiple of 4 where it is dull, and odd where it never comes again.
    """
    period, same = (length // scale for length in TEXTS[text])
    at = torch.arange(end, device=device)
    phase = at % max(1, period)
    again = phase < same
    number = torch.where(again, phase, at + _UNIQUE)
    number += torch.where(at < shared, 0, stream * _STREAM)
    drawn = mix(number ^ salt(seed, text))
    return torch.where(again, drawn, drawn | 1)


def keys(text: Tensor, *, ratio: int, salted: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Keys e4m3 [n, head_dim] and scales fp32 [n] of n = len(text) // ratio columns.

    Args:
        text: tokens, int64.
        ratio: tokens a column covers; what is left over has no column yet.
        salted: other keys for another number.
        head_dim: a multiple of 32.
    """
    columns = text[: len(text) // ratio * ratio].view(-1, ratio)
    content = torch.full_like(columns[:, 0], salt("k", salted))
    for each in columns.unbind(1):
        content = mix(content ^ each)
    drawn = _bytes(content, head_dim)
    dull = _dull(columns[:, -1])
    # Queries are positive in this half.
    drawn[:, : head_dim // 2].masked_fill_(dull[:, None], _DISLIKED)
    return drawn.view(E4M3), 0.5 + _fraction(content)


def queries(text: Tensor, *, salted: int, heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Queries e4m3 [n, heads, head_dim] and weights fp32 [n, heads] of n tokens.

    Args:
        text: tokens, int64 [n].
        salted: other queries for another number.
        heads: a multiple of 8.
        head_dim: a multiple of 32.
    """
    content = mix(text ^ salt("q", salted))
    drawn = _bytes(content, heads * head_dim).view(-1, heads, head_dim)
    drawn[..., : head_dim // 2].bitwise_and_(_SIGN - 1)
    weights = 2 * _fraction(_words(content + 1, heads)) - 1
    weights = torch.where(_dull(text)[:, None], -weights.abs(), weights)
    return drawn.view(E4M3), weights


def slots(*, pages: int, page_size: int, salted: int, device: Device) -> Tensor:
    """Slots of `pages` pages in a drawn order, int64 [pages * page_size]; page 0 is never one."""
    order = mix(torch.arange(pages, device=device) ^ salted).argsort()
    slot = torch.arange(page_size, device=device)
    return ((1 + order)[:, None] * page_size + slot).flatten()


def _dull(text: Tensor) -> Tensor:
    return text & 3 == 0


def _words(content: Tensor, count: int) -> Tensor:
    """int64 [n, count] that follow from [n]."""
    return mix(mix(content[:, None] + torch.arange(count, device=content.device) * _ODD))


def _fraction(words: Tensor) -> Tensor:
    """fp32 in [0, 1)."""
    return (words >> 40).bitwise_and_(_MANTISSA).float().mul_(1 / (_MANTISSA + 1))


def _bytes(content: Tensor, count: int) -> Tensor:
    """uint8 [n, count], e4m3 of either sign."""
    drawn = _words(content, count // 8).view(torch.uint8)
    magnitude = (drawn & _MAGNITUDES).add_(_LEAST)
    return drawn.bitwise_and_(_SIGN).bitwise_or_(magnitude)
