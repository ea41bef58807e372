"""Two outcomes row by row: identical, other bits or order, another set."""

import pytest
import torch
from torch import Tensor

from equivalence import arms, generate, ops
from equivalence.case import Case
from refimpl.topk import ragged_topk


def outcome(case: Case) -> dict[str, Tensor]:
    """The reference's picks."""
    return {"raw_indices": ragged_topk(**case.inputs, k=int(case.params["k"]))}  # type: ignore[arg-type]


def told(apart: arms.Apart, stage: str) -> tuple[list[int], list[int]]:
    """Changed rows, and those with another set."""
    return (
        apart.changed[stage].nonzero()[:, 0].tolist(),
        apart.other_set[stage].nonzero()[:, 0].tolist(),
    )


def test_the_same_outcome_changes_nothing() -> None:
    """No row is apart from itself."""
    case = generate.ragged_topk(0)
    windows = ops.find(case.op).windows(case)
    apart = arms.apart(case, windows, outcome(case), outcome(case))
    assert told(apart, "raw_indices") == ([], [])
    assert not apart.any_changed


def test_another_order_is_changed_and_the_same_set() -> None:
    """Row 0 turned round keeps its set; row 1 with another pick does not."""
    case = generate.ragged_topk(0)
    windows = ops.find(case.op).windows(case)
    one, two = outcome(case), outcome(case)
    two["raw_indices"][0] = two["raw_indices"][0].flip(0)
    two["raw_indices"][1, 3] = 1000
    assert told(arms.apart(case, windows, one, two), "raw_indices") == ([0, 1], [1])


def test_logits_are_compared_by_bits_inside_the_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """-0 for +0 in the window counts, NaN outside does not; pieces of one row give the same."""
    case = generate.mqa_logits(0)
    windows = ops.find(case.op).windows(case)
    one = torch.zeros(9, 80)
    two = one.clone()
    two[0, int(windows.column[0])] = -0.0
    two[5, 79] = torch.nan  # row 5 sees half a k of request 0
    for piece in (32 << 20, 1):
        monkeypatch.setattr(arms, "_PIECE_BYTES", piece)
        apart = arms.apart(case, windows, {"logits": one}, {"logits": two})
        assert told(apart, "logits") == ([0], [0])


def test_outputs_of_other_shapes_are_apart_everywhere() -> None:
    """Nothing broadcasts."""
    case = generate.ragged_topk(0)
    windows = ops.find(case.op).windows(case)
    one = outcome(case)
    two = {"raw_indices": one["raw_indices"][:, :1]}
    every = list(range(9))
    assert told(arms.apart(case, windows, one, two), "raw_indices") == (every, every)


def test_an_output_that_only_one_has_is_missing() -> None:
    """It is named, since it cannot be compared."""
    case = generate.topk_pages(0)
    windows = ops.find(case.op).windows(case)
    picks = torch.zeros(9, 16, dtype=torch.int32)
    one, two = {"raw_indices": picks, "page_indices": picks}, {"raw_indices": picks}
    apart = arms.apart(case, windows, one, two)
    assert (apart.missing, apart.any_changed) == (("page_indices",), True)


def test_values_that_are_no_columns_have_no_order() -> None:
    """Scales of a row in another order are another row; -0 for +0 is too."""
    case = generate.quantize_q(0)
    windows = ops.find(case.op).windows(case)
    one = {"scale": torch.arange(4 * len(windows.start)).float().view(-1, 4)}
    two = {"scale": one["scale"].clone()}
    two["scale"][1] = two["scale"][1].flip(0)
    two["scale"][0, 0] = -0.0
    assert told(arms.apart(case, windows, one, two), "scale") == ([0, 1], [0, 1])


def test_masks_are_compared_in_the_rows_that_are_published() -> None:
    """Whether a mask holds all rows or those alone; columns that nobody sees may differ."""
    case = generate.publish_mask(0, tail=1)
    windows, rows = ops.find(case.op).windows(case), case.inputs["rows"].long()
    assert torch.equal(arms.published(case, windows), rows)
    every = torch.zeros(9, 400, dtype=torch.bool)
    some = every[rows].clone()
    some[:, 390:] = True
    assert told(arms.apart(case, windows, {"mask": every}, {"mask": some}), "mask") == ([], [])
    some[0, 0] = True
    last = [int(rows[0])]
    assert told(arms.apart(case, windows, {"mask": every}, {"mask": some}), "mask") == (last, last)
    packed = {"mask": torch.zeros(9, 50, dtype=torch.uint8)}
    both = rows.tolist()
    assert told(arms.apart(case, windows, {"mask": every}, packed), "mask") == (both, both)


def test_an_output_of_one_value_a_row_is_compared() -> None:
    """As a scale of a token is."""
    case = generate.quantize_k(0)
    windows = ops.find(case.op).windows(case)
    one = torch.ones(len(windows.start))
    two = one.clone()
    two[1] = 2
    assert told(arms.apart(case, windows, {"scale": one}, {"scale": two}), "scale") == ([1], [1])
