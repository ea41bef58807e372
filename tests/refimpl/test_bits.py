"""Integer views, order keys, ulp distances and planar pages state the bits they are given."""

import pytest
import torch
import twin
from hypothesis import given
from hypothesis import strategies as st

from refimpl.bits import E4M3, NanOrder, ZeroSign, as_int, order_key, split_planar_pages
from refimpl.bits import ulp_distance as ulp

BITS = st.one_of(
    st.integers(0, 2**32 - 1),
    st.sampled_from(
        [0, 1, 0x7F800000, 0x7F800001, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFF800000, 0xFFC00001]
    ),
)
INF, NAN = float("inf"), float("nan")


def fp32(bits: list[int]) -> torch.Tensor:
    """Fp32 of these bits."""
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize(
    ("dtype", "integer"),
    [
        (torch.float64, torch.int64),
        (torch.float32, torch.int32),
        (torch.bfloat16, torch.int16),
        (torch.float16, torch.int16),
        (E4M3, torch.uint8),
        (torch.float8_e5m2, torch.uint8),
        (torch.bool, torch.uint8),
        (torch.int32, torch.int32),
        (torch.uint8, torch.uint8),
        (torch.int64, torch.int64),
    ],
)
def test_as_int_keeps_width_shape_and_storage(dtype: torch.dtype, integer: torch.dtype) -> None:
    """An integer view has the width, shape and memory of what it shows."""
    x = torch.zeros(3, 2, dtype=dtype)
    got = as_int(x)
    assert (got.dtype, got.shape, got.data_ptr()) == (integer, x.shape, x.data_ptr())


@given(
    st.lists(BITS, min_size=2, max_size=8),
    st.sampled_from(["distinct", "equal"]),
    st.sampled_from(["reject", "first", "last"]),
)
def test_order_keys_sort_as_the_twin(bits: list[int], zero_sign: ZeroSign, nan: NanOrder) -> None:
    """Keys rank any fp32 bits as the twin's keys do, ties included."""
    got = order_key(fp32(bits), zero_sign=zero_sign, nan=nan).tolist()
    want = [twin.order_key(x, zero_sign, nan) for x in bits]
    for i in range(len(bits)):
        assert [x > got[i] for x in got] == [x > want[i] for x in want]
        assert [x == got[i] for x in got] == [x == want[i] for x in want]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_order_keys_ascend(dtype: torch.dtype) -> None:
    """In each score dtype the keys of ascending values ascend, and -0 lies just below +0."""
    values = [-INF, -2.0, -1.0, -0.0, 0.0, 1.0, 2.0, INF]
    key = order_key(torch.tensor(values, dtype=dtype))
    assert key.dtype is torch.int32
    assert (key.diff() > 0).all()
    assert key[3:5].tolist() == [-1, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_nan_is_one_class_above_or_below_the_infinities(dtype: torch.dtype) -> None:
    """`first` puts both signs of NaN one above +inf, `last` one below -inf."""
    x = torch.tensor([INF, NAN, -NAN, -INF], dtype=dtype)
    x = torch.where(torch.tensor([False, False, True, False]), -x.abs(), x)
    top, *nans, bottom = order_key(x, nan="first").tolist()
    assert nans == [top + 1, top + 1]
    top, *nans, bottom = order_key(x, nan="last").tolist()
    assert nans == [bottom - 1, bottom - 1]


def test_equal_zeros_share_a_key() -> None:
    """zero_sign=equal gives -0 the key of +0 and leaves the subnormals beside them apart."""
    x = fp32([0x80000001, 0x80000000, 0, 1])
    assert order_key(x, zero_sign="equal").tolist() == [-2, 0, 0, 1]
    assert order_key(x).tolist() == [-2, -1, 0, 1]


def test_ulp_distance_counts_values_in_between() -> None:
    """Distances span the whole range without overflow and carry the sign of a - b."""
    a, b = fp32([0x3F800001, 0, 0x7F800000, 0x3F800000]), fp32([0x3F800000, 1, 0xFF800000, 0])
    assert ulp(a, b).tolist() == [1, -1, 2 * 0x7F800000 + 1, 0x3F800000]
    assert ulp(a, b).dtype is torch.int64


def test_foreign_dtypes_and_settings_are_named() -> None:
    """What has no order key is refused with the value that was given."""
    with pytest.raises(ValueError, match=r"scores are torch\.int32"):
        order_key(torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ValueError, match="zero_sign is 'same'"):
        order_key(torch.zeros(1), zero_sign="same")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nan is 'skip'"):
        order_key(torch.zeros(1), nan="skip")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"a is torch\.float32 and b is torch\.float16"):
        ulp(torch.zeros(1), torch.zeros(1, dtype=torch.float16))


@pytest.mark.parametrize(("head_dim", "page_size"), [(128, 64), (32, 3), (6, 1)])
def test_planar_pages_hold_all_values_then_all_scales(head_dim: int, page_size: int) -> None:
    """Each key of each page is the one the twin reads from the page's bytes."""
    width = page_size * (head_dim + 4)
    cache = torch.randint(0, 256, (3, width), dtype=torch.uint8)
    values, scales = split_planar_pages(cache, head_dim=head_dim, page_size=page_size)
    assert values.dtype is E4M3
    for page in range(3):
        for token in range(page_size):
            want, scale = twin.page_key(cache[page].tolist(), token, page_size)
            assert as_int(values)[page, token].tolist() == want
            assert int(as_int(scales)[page, token]) & 0xFFFFFFFF == scale


def test_planar_pages_are_views() -> None:
    """Both planes of aligned pages share the cache's memory, in either shape of the cache."""
    cache = torch.zeros(5, 64, 1, 132, dtype=torch.uint8)
    values, scales = split_planar_pages(cache, head_dim=128, page_size=64)
    assert values.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
    assert scales.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()


def test_pages_of_another_size_are_named() -> None:
    """A page whose bytes do not match is refused with both numbers."""
    with pytest.raises(ValueError, match=r"8192 bytes a page.*pages of 8448 bytes"):
        split_planar_pages(torch.zeros(2, 8192, dtype=torch.uint8), head_dim=128, page_size=64)
