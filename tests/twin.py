"""The twin: a slow, scalar, second reference that tests the first one.

It shares no helper with refimpl and imports nothing of it or of equivalence:
plain Python, written by another hand from the description of the arithmetic,
so that an error must be made twice to pass unseen.
Every number is exact (an integer times a power of two, or a Fraction)
until the one rounding its formula names.

fp32 and bf16 values travel as their bits, e4m3fn values as bytes; columns are row-relative.
"""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from functools import cache
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

PLUS_ZERO, MINUS_ZERO, ONE = 0x00000000, 0x80000000, 0x3F800000
PLUS_INF, MINUS_INF, NAN = 0x7F800000, 0xFF800000, 0x7FFFFFFF
LARGEST = 0x7F7FFFFF
F32_MIN_EXPONENT = -126

# --- numbers -------------------------------------------------------------------------------------


class Number(NamedTuple):
    """The exact value significand * 2**scale; `special` holds NaN or an infinity instead."""

    significand: int
    scale: int
    special: float = 0.0

    @property
    def value(self) -> Fraction:
        """The finite value."""
        return self.significand * Fraction(2) ** self.scale

    @property
    def sign_like(self) -> float:
        """NaN or the infinity, else -1, 0 or 1: enough to tell what IEEE makes of infinities."""
        return self.special or float((self.significand > 0) - (self.significand < 0))


def _decode(bits: int, *, exponent_bits: int, fraction_bits: int, ieee: bool) -> Number:
    """Sign, exponent field, fraction; a zero field is the smallest exponent, no hidden bit."""
    sign = -1 if bits >> (exponent_bits + fraction_bits) else 1
    top = (1 << exponent_bits) - 1
    exponent = bits >> fraction_bits & top
    fraction = bits & ((1 << fraction_bits) - 1)
    if ieee and exponent == top:
        return Number(0, 0, math.nan if fraction else sign * math.inf)
    significand = fraction + (1 << fraction_bits if exponent else 0)
    return Number(sign * significand, max(exponent, 1) - (top >> 1) - fraction_bits)


@cache
def decode_e4m3(byte: int) -> Number:
    """e4m3fn: bias 7, no infinity, 0x7F and 0xFF are NaN, the largest is 448."""
    if byte & 0x7F == 0x7F:
        return Number(0, 0, math.nan)
    return _decode(byte, exponent_bits=4, fraction_bits=3, ieee=False)


@cache
def decode_bf16(bits: int) -> Number:
    """The upper half of an fp32."""
    return _decode(bits, exponent_bits=8, fraction_bits=7, ieee=True)


def decode_f32(bits: int) -> Number:
    """IEEE binary32."""
    return _decode(bits, exponent_bits=8, fraction_bits=23, ieee=True)


def is_nan(bits: int) -> bool:
    """Whether fp32 bits are a NaN, of whatever sign and payload."""
    return bits & 0x7FFFFFFF > PLUS_INF


def _floor_log2(value: Fraction) -> int:
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= value else exponent - 1


def _f32_magnitude(value: Fraction, to_integer: Callable[[Fraction], int]) -> int:
    """Bits of |value|, its significand made an integer by `to_integer`; may lie past infinity."""
    exponent = max(_floor_log2(value), F32_MIN_EXPONENT)
    significand = to_integer(value / Fraction(2) ** (exponent - 23))
    # The hidden bit, or a carry out of the rounding, adds itself to the exponent field.
    return ((exponent - F32_MIN_EXPONENT) << 23) + significand


def to_f32_bits(value: Fraction) -> int:
    """The nearest fp32, ties to even: IEEE's subnormals, overflow to inf; exact zero gives +0."""
    if not value:
        return PLUS_ZERO
    sign = MINUS_ZERO if value < 0 else 0
    return sign | min(_f32_magnitude(abs(value), round), PLUS_INF)


def truncate_to_f32_bits(value: Fraction) -> int:
    """fp32 rounded toward zero, overflow to the largest finite value; exact zero gives +0."""
    if not value:
        return PLUS_ZERO
    sign = MINUS_ZERO if value < 0 else 0
    return sign | min(_f32_magnitude(abs(value), math.floor), LARGEST)


def _special_bits(special: float) -> int:
    return NAN if math.isnan(special) else PLUS_INF if special > 0 else MINUS_INF


def fma_f32(a_bits: int, b_bits: int, c_bits: int) -> int:
    """a*b + c exactly, rounded once; every NaN is 0x7FFFFFFF (IEEE 754 fusedMultiplyAdd)."""
    a, b, c = decode_f32(a_bits), decode_f32(b_bits), decode_f32(c_bits)
    if a.special or b.special or c.special:
        return _special_bits(a.sign_like * b.sign_like + c.sign_like)
    exact = a.value * b.value + c.value
    if exact:
        return to_f32_bits(exact)
    # A zero sum is -0 only when both addends are negative, that is, both are -0.
    return (a_bits ^ b_bits) & c_bits & MINUS_ZERO


def add_f32(a_bits: int, b_bits: int) -> int:
    """Round a + b once, as a * 1 + b."""
    return fma_f32(a_bits, ONE, b_bits)


def mul_f32(a_bits: int, b_bits: int) -> int:
    """Round a * b once, as a * b + (-0): the addend that changes no sign."""
    return fma_f32(a_bits, b_bits, MINUS_ZERO)


# --- the tensor core -----------------------------------------------------------------------------


class Instruction(NamedTuple):
    """One fused dot-add: k products a step, F fraction bits kept, and how the sum is written."""

    k: int
    fraction_bits: int
    output: Literal["e8m13", "f32_rz"]
    min_exponent: int
    """Smallest normal exponent of the operands' format."""


SM90_E4M3 = Instruction(32, 13, "e8m13", -6)  # QGMMA 64xNx32, measured on an H200
SM90_BF16 = Instruction(16, 25, "f32_rz", -126)  # measured on an H200
SM89_E4M3 = Instruction(16, 13, "e8m13", -6)  # published: MMA-Sim, arXiv 2511.10909
SM100_E4M3 = Instruction(32, 25, "f32_rz", -6)  # published: tcgen05 f8f6f4, as above


def _exponent(x: Number, smallest: int) -> int:
    """e(x) = floor(log2|x|), but not below the format's smallest normal exponent."""
    return max(abs(x.significand).bit_length() - 1 + x.scale, smallest)


def _toward_zero(significand: int, shift: int) -> int:
    """Significand * 2**shift as an integer, truncated toward zero."""
    if shift >= 0:
        return significand << shift
    magnitude = abs(significand) >> -shift
    return magnitude if significand >= 0 else -magnitude


def dot_add(a: Sequence[Number], b: Sequence[Number], c_bits: int, instruction: Instruction) -> int:
    """One step, fp32 bits of c + sum(a[i] * b[i]) as the tensor core makes them.

    A product has the exponent e(a)+e(b), not renormalised;
    E is the largest exponent among the non-zero addends;
    each addend is truncated toward zero to F bits below 2**E;
    what is left is summed exactly and truncated to the output.
    NaN, inf*0 and inf-inf give 0x7FFFFFFF, an infinite addend its infinity, a zero sum +0.
    """
    c = decode_f32(c_bits)
    if any(x.special for x in (*a, *b, c)):
        special = c.sign_like + sum(x.sign_like * y.sign_like for x, y in zip(a, b, strict=True))
        if not math.isfinite(special):
            return _special_bits(special)
    smallest = instruction.min_exponent
    addends = [
        (
            _exponent(x, smallest) + _exponent(y, smallest),
            Number(x.significand * y.significand, x.scale + y.scale),
        )
        for x, y in zip(a, b, strict=True)
        if x.significand and y.significand
    ]
    if c.significand:
        addends.append((_exponent(c, F32_MIN_EXPONENT), c))
    if not addends:
        return PLUS_ZERO
    unit = max(exponent for exponent, _ in addends) - instruction.fraction_bits
    total = sum(_toward_zero(x.significand, x.scale - unit) for _, x in addends)
    bits = truncate_to_f32_bits(Number(total, unit).value)
    return bits & ~0x3FF if instruction.output == "e8m13" else bits


def accumulate(a: Sequence[Number], b: Sequence[Number], instruction: Instruction) -> int:
    """The chain over D in steps of k, from c = 0; fp32 bits."""
    c_bits = PLUS_ZERO
    for start in range(0, len(a), instruction.k):
        step = slice(start, start + instruction.k)
        c_bits = dot_add(a[step], b[step], c_bits, instruction)
    return c_bits


# --- scoring -------------------------------------------------------------------------------------


def relu(bits: int) -> int:
    """The value where it is above zero, else +0: NaN and -0 become +0."""
    return bits if PLUS_ZERO < bits <= PLUS_INF else PLUS_ZERO


def mqa_logit(
    q_heads: Sequence[Sequence[int]],
    k_row: Sequence[int],
    k_scale_bits: int,
    weight_bits: Sequence[int],
) -> int:
    """One logit of DeepGEMM sm90_fp8_mqa_logits: q is H x D e4m3 bytes, k D bytes, weights H fp32.

    The head sum is split over four lanes of two chains;
    a chain is the rounded product of group 1, then fused with groups 0, 2, 3, ...;
    the scale comes before the lanes are added. H is a multiple of 8, at least 16.
    """
    heads = len(q_heads)
    if heads % 8 or heads < 16 or len(weight_bits) != heads:
        raise ValueError(f"{heads} heads and {len(weight_bits)} weights; want 16, 24, 32, ...")
    key = [decode_e4m3(byte) for byte in k_row]
    r = [relu(accumulate(key, [decode_e4m3(x) for x in q], SM90_E4M3)) for q in q_heads]

    def chain(first: int) -> int:
        """Heads first, first+8, first+16, ..."""
        s = mul_f32(weight_bits[first + 8], r[first + 8])
        for h in (first, *range(first + 16, heads, 8)):
            s = fma_f32(weight_bits[h], r[h], s)
        return s

    v = [mul_f32(add_f32(chain(2 * c), chain(2 * c + 1)), k_scale_bits) for c in range(4)]
    return add_f32(add_f32(v[0], v[1]), add_f32(v[2], v[3]))


def qsa_logit(
    q_heads: Sequence[Sequence[int]], k_row: Sequence[int], dtype: Literal["bf16", "e4m3"]
) -> int:
    """One logit of the vLLM QSA prefill kernel: 4 heads, bf16 bits or e4m3 bytes, no weights."""
    decode, instruction = {
        "bf16": (decode_bf16, SM90_BF16),
        "e4m3": (decode_e4m3, SM90_E4M3),
    }[dtype]
    key = [decode(x) for x in k_row]
    r0, r1, r2, r3 = (relu(accumulate(key, [decode(x) for x in q], instruction)) for q in q_heads)
    return add_f32(add_f32(r0, r1), add_f32(r2, r3))


# --- legal rows ----------------------------------------------------------------------------------

CONTRACT_VALUES = {  # the first of each is the default
    "order": ("score", "ascending", "any"),
    "ties": ("lowest", "highest", "any"),
    "short_rows": ("identity", "any"),
    "holes": ("reject", "allow"),
    "empty_rows": ("pad", "first"),
    "minus_inf": ("pick", "pad"),
    "nan": ("reject", "first", "last"),
    "zero_sign": ("distinct", "equal"),
}


def row_rules(contract: Mapping[str, str]) -> dict[str, str]:
    """The contract with its defaults; raises ValueError on a key or value it does not know."""
    for name, value in contract.items():
        if value not in CONTRACT_VALUES.get(name, ()):
            raise ValueError(f"{name}={value} is not in the contract's keys and values")
    return {name: values[0] for name, values in CONTRACT_VALUES.items()} | dict(contract)


def order_key(bits: int, zero_sign: str = "distinct", nan: str = "reject") -> int:
    """A larger key wins: IEEE total order of fp32 bits, with -0 and all NaN classed as asked."""
    if is_nan(bits) and nan != "reject":
        return 1 << 32 if nan == "first" else -1
    if bits == MINUS_ZERO and zero_sign == "equal":
        bits = PLUS_ZERO
    return bits ^ 0xFFFFFFFF if bits & MINUS_ZERO else bits | MINUS_ZERO


def _fixed_row(visible: int, k: int, rules: Mapping[str, str]) -> list[int] | None:
    """The one legal row where scores are not read: an empty row, or the identity of a short one."""
    if visible == 0:
        return [0] if rules["empty_rows"] == "first" else []
    if visible <= k and rules["short_rows"] == "identity":
        return list(range(visible))
    return None


def _eligible(
    scores: Sequence[int], visible: int, rules: Mapping[str, str], mask: Sequence[bool] | None
) -> dict[int, int] | None:
    """E as column -> key; None where a NaN in the window leaves the row undecided."""
    if rules["nan"] == "reject" and any(is_nan(scores[j]) for j in range(visible)):
        return None
    keys = {
        j: order_key(scores[j], rules["zero_sign"], rules["nan"])
        for j in range(visible)
        if mask is None or mask[j]
    }
    if rules["minus_inf"] == "pad":
        return {j: key for j, key in keys.items() if key > order_key(MINUS_INF)}
    return keys


class Cut(NamedTuple):
    """The legal sets of a row: all of `must` and `free` of `ties`."""

    must: list[int]
    ties: list[int]
    free: int
    slots: int
    """How many leading slots may hold picks; the others are pads."""
    keys: Mapping[int, int]
    fixed: bool


def cut(
    scores: Sequence[int],
    visible: int,
    k: int,
    contract: Mapping[str, str],
    mask: Sequence[bool] | None = None,
) -> Cut | None:
    """Split E at the need-th largest key; None where the row is undecided."""
    rules = row_rules(contract)
    fixed = _fixed_row(visible, k, rules)
    if fixed is not None:
        return Cut(fixed, [], 0, len(fixed), {}, fixed=True)
    keys = _eligible(scores, visible, rules, mask)
    if keys is None:
        return None
    need = min(k, len(keys))
    slots = min(k, visible) if rules["holes"] == "allow" else need
    if need == 0:
        return Cut([], [], 0, slots, keys, fixed=False)
    cutoff = sorted(keys.values(), reverse=True)[need - 1]
    must = [j for j, key in keys.items() if key > cutoff]
    ties = [j for j, key in keys.items() if key == cutoff]
    free = need - len(must)
    chosen = {"lowest": ties[:free], "highest": ties[-free:], "any": ties}[rules["ties"]]
    return Cut(must, chosen, free, slots, keys, fixed=False)


def _in_order(columns: Sequence[int], keys: Mapping[int, int], order: str) -> bool:
    if order == "score":
        return all(keys[i] >= keys[j] for i, j in pairwise(columns))
    return order == "any" or all(i < j for i, j in pairwise(columns))


def _prefix(row: Sequence[int], slots: int, k: int, pad: int) -> list[int] | None:
    """What stands in the first slots, pads left out; None where more than pads follows."""
    if len(row) < k:
        raise ValueError(f"a row of {len(row)} slots cannot hold k = {k}")
    if any(slot != pad for slot in row[slots:]):
        return None
    return [slot for slot in row[:slots] if slot != pad]


def is_legal(
    picks: Sequence[int],
    scores: Sequence[int],
    visible: int,
    k: int,
    *,
    mask: Sequence[bool] | None = None,
    contract: Mapping[str, str],
    pad: int = -1,
) -> bool | None:
    """Whether a whole output row (k slots or more) is legal; None where it is undecided.

    picks and mask are by row-relative column; scores are the window's fp32 bits.
    The picks are unique, stand in the leading slots,
    and are all of the columns above the cutoff and as many tied ones as are free.
    """
    legal = cut(scores, visible, k, contract, mask)
    if legal is None:
        return None
    got = _prefix(picks, legal.slots, k, pad)
    if legal.fixed:
        return got == legal.must
    return (
        got is not None
        and len(got) == len(set(got)) == len(legal.must) + legal.free
        and set(legal.must) <= set(got) <= {*legal.must, *legal.ties}
        and _in_order(got, legal.keys, row_rules(contract)["order"])
    )


def legal_sets(
    scores: Sequence[int],
    visible: int,
    k: int,
    contract: Mapping[str, str],
    mask: Sequence[bool] | None = None,
) -> set[frozenset[int]] | None:
    """Every legal set of a small row by trial: a set is legal when nothing left out beats a pick.

    This is another definition than the cutoff's; None where the row is undecided.
    """
    rules = row_rules(contract)
    fixed = _fixed_row(visible, k, rules)
    if fixed is not None:
        return {frozenset(fixed)}
    keys = _eligible(scores, visible, rules, mask)
    if keys is None:
        return None
    preference = {"lowest": -1, "highest": 1, "any": 0}[rules["ties"]]
    rank = {j: (key, preference * j) for j, key in keys.items()}
    return {
        frozenset(picks)
        for picks in combinations(keys, min(k, len(keys)))
        if all(rank[i] >= rank[j] for i in picks for j in keys if j not in picks)
    }


# --- pages ---------------------------------------------------------------------------------------


def page_of(raw: int, page_table_row: Sequence[int], page_size: int, pad: int = -1) -> int:
    """The physical slot of a request-local column: table[raw // size] * size + raw % size."""
    if raw == pad:
        return pad
    return page_table_row[raw // page_size] * page_size + raw % page_size


def translate(
    picks: Iterable[int], page_table_row: Sequence[int], page_size: int, pad: int = -1
) -> list[int]:
    """A row of picks as physical slots, slot by slot."""
    return [page_of(raw, page_table_row, page_size, pad) for raw in picks]


def is_legal_pages(
    slots: Sequence[int],
    scores: Sequence[int],
    visible: int,
    k: int,
    *,
    table_row: Sequence[int],
    page_size: int,
    contract: Mapping[str, str],
    mask: Sequence[bool] | None = None,
    pad: int = -1,
) -> bool | None:
    """Whether a row of physical slots is, as a multiset, the image of some legal set.

    Columns are mapped forward, for two may share a slot.
    Pads must stand where the contract lets them; the order of the slots is not judged.
    """
    legal = cut(scores, visible, k, contract, mask)
    if legal is None:
        return None
    got = _prefix(slots, legal.slots, k, pad)
    if got is None or len(got) != len(legal.must) + legal.free:
        return False
    ties = Counter(translate(legal.ties, table_row, page_size))
    rest = Counter(got)
    rest.subtract(translate(legal.must, table_row, page_size))
    return all(0 <= count <= ties[slot] for slot, count in rest.items())


def page_key(page: Sequence[int], token: int, page_size: int) -> tuple[list[int], int]:
    """Key bytes and fp32 scale bits of a token in a planar page: all values, then all scales."""
    dim = len(page) // page_size - 4
    if len(page) != page_size * (dim + 4) or not 0 <= token < page_size:
        raise ValueError(f"token {token} of {page_size} in a page of {len(page)} bytes")
    at = page_size * dim + 4 * token
    return list(page[token * dim : (token + 1) * dim]), int.from_bytes(page[at : at + 4], "little")


# --- geometry ------------------------------------------------------------------------------------


def windows(
    extend_lengths: Sequence[int], seq_lengths: Sequence[int]
) -> tuple[list[int], list[int]]:
    """row_start and row_end of a causal batch: the last tokens of each request are the queries."""
    start, end, first = [], [], 0
    for extend, seq in zip(extend_lengths, seq_lengths, strict=True):
        for position in range(seq - extend, seq):
            start.append(first)
            end.append(first + position + 1)
        first += seq
    return start, end


def compressed_visible(position: int, ratio: int) -> int:
    """Entries with no token after the query: entry j covers j*ratio .. (j+1)*ratio - 1."""
    return (position + 1) // ratio


def qsa_visible_blocks(position: int, seq_length: int) -> int:
    """Blocks of four tokens that are complete both before the query and in the sequence."""
    return max(0, min((position + 1) // 4, seq_length // 4))
