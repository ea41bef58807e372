"""Receipts: what is left inside a collecting block, merged by way."""

import pytest

from equivalence import receipt
from equivalence.receipt import Receipt


def test_calls_of_one_way_add_up_and_keep_their_different_row_counts() -> None:
    """Three calls of one kernel with two row counts are one receipt."""
    with receipt.collected() as left:
        for rows in (128, 128, 7):
            receipt.leave("deep_gemm.f", rows=rows, version="1", arch="sm90", clean=False)
        receipt.leave("deep_gemm.f", rows=1, version="1", arch="sm90", clean=True)
    assert left == [
        Receipt(
            kernel="deep_gemm.f",
            version="1",
            arch="sm90",
            arguments={"clean": False},
            rows=(128, 7),
            calls=3,
        ),
        Receipt(
            kernel="deep_gemm.f",
            version="1",
            arch="sm90",
            arguments={"clean": True},
            rows=(1,),
            calls=1,
        ),
    ]


def test_what_nobody_collects_is_lost() -> None:
    """A receipt left outside a block does not reach the next one."""
    receipt.leave("torch.topk", rows=1)
    with receipt.collected() as left:
        pass
    assert left == []


def test_an_inner_block_keeps_its_receipts_to_itself() -> None:
    """The outer block goes on collecting after the inner one."""
    with receipt.collected() as outer:
        with receipt.collected() as inner:
            receipt.leave("inner", rows=1)
        receipt.leave("outer", rows=2)
    assert [r.kernel for r in inner] == ["inner"]
    assert [r.kernel for r in outer] == ["outer"]


def test_receipts_survive_the_kernel_that_raises() -> None:
    """A block that ends by an exception has told what ran."""
    told: list[list[Receipt]] = []

    def launch() -> None:
        with receipt.collected() as left:
            told.append(left)
            receipt.leave("deep_gemm.f", rows=1)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        launch()
    (left,) = told
    assert [r.kernel for r in left] == ["deep_gemm.f"]


def test_at_most_sixteen_row_counts_are_told() -> None:
    """A thousand different chunks do not grow a receipt without end."""
    with receipt.collected() as left:
        for rows in range(1000):
            receipt.leave("k", rows=rows)
    assert (left[0].rows, left[0].calls) == (tuple(range(16)), 1000)


def test_a_kernel_is_of_its_module_and_not_of_a_longer_name() -> None:
    """`deep_gemm` names all its kernels, `deep` none of them."""
    left = Receipt(kernel="deep_gemm.fp8_mqa_logits")
    names = ("deep_gemm", "deep_gemm.fp8_mqa_logits", "deep", "deep_gemm.fp8", "torch")
    assert [left.of(name) for name in names] == [True, True, False, False, False]
