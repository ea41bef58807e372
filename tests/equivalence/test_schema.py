"""Shapes and dtypes of every op: what fits together, and the sentence where it does not."""

from dataclasses import dataclass
from math import prod

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import ints
from torch import Tensor

from equivalence import judge, ops, schema, specs
from equivalence.case import Case, Space
from equivalence.errors import InvalidCase
from equivalence.schema import TensorSpec
from equivalence.verdict import Status


@dataclass
class Shape:
    """A tensor without memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.int32


SPECS = {
    "a": TensorSpec(("I32",), ("B", "n")),
    "b": TensorSpec(("I32", "F32"), ("B*n", 3)),
    "c": TensorSpec(("I32",), ("B+1",), optional=True),
    "d": TensorSpec(("I32",), ("R", "D"), optional=True),
}


def test_symbols_are_bound_by_the_tensors() -> None:
    """Sizes come from the tensors; a size that was known before binds too."""
    tensors = {"a": Shape((2, 3)), "b": Shape((6, 3)), "d": Shape((0, 5))}
    assert schema.bind(SPECS, tensors) == {"B": 2, "n": 3, "R": 0, "D": 5}
    assert schema.bind(SPECS, {**tensors, "c": Shape((3,))}, {"x": 1})["x"] == 1


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({"a": Shape((2, 3))}, "inputs.b is missing"),
        (
            {"a": Shape((2, 3)), "b": Shape((6, 3)), "e": Shape((1,))},
            "inputs.e is not one of the op's tensors: a, b, c, d",
        ),
        (
            {"a": Shape((2, 3)), "b": Shape((6, 3), torch.bool)},
            "inputs.b is bool; the op wants int32 or float32",
        ),
        (
            {"a": Shape((2, 3, 1)), "b": Shape((6, 3))},
            "inputs.a has shape [2, 3, 1]; the op wants [B, n]",
        ),
        (
            {"a": Shape((2, 3)), "b": Shape((5, 3))},
            "inputs.b has shape [5, 3]; the op wants [B*n, 3] with B*n = 6, not 5, in dimension 0",
        ),
        (
            {"a": Shape((2, 3)), "b": Shape((6, 4))},
            "inputs.b has shape [6, 4]; the op wants [B*n, 3] with 3 = 3, not 4, in dimension 1",
        ),
        (
            {"a": Shape((2, 3)), "b": Shape((6, 3)), "c": Shape((4,))},
            "inputs.c has shape [4]; the op wants [B+1] with B+1 = 3, not 4, in dimension 0",
        ),
        (
            {"a": Shape((2, 0)), "b": Shape((0, 3))},
            "inputs.a has shape [2, 0]; n in [B, n] cannot be 0",
        ),
    ],
)
def test_what_does_not_fit_is_named(tensors: dict[str, Shape], sentence: str) -> None:
    """The sentence names the tensor, what it is, and what would fit."""
    with pytest.raises(InvalidCase) as caught:
        schema.bind(SPECS, tensors)
    assert str(caught.value) == sentence


def test_a_product_of_unknown_sizes_binds_nothing() -> None:
    """Before its factors are known, a product or a sum fits anything."""
    specs = {"b": SPECS["b"], "c": SPECS["c"]}
    assert schema.bind(specs, {"b": Shape((5, 3)), "c": Shape((9,))}) == {}


def test_whole_requests_keep_all_their_rows() -> None:
    """A draft row brings the other rows of its request."""
    rows = torch.tensor([1, 4, 5])
    assert schema.whole_requests(rows, next_n=1).tolist() == [1, 4, 5]
    assert schema.whole_requests(rows, next_n=2).tolist() == [0, 1, 4, 5]


@pytest.mark.parametrize("name", sorted(specs.OPS))
def test_every_op_has_its_row_dimension_among_its_inputs(name: str) -> None:
    """Rows are counted by a dimension that inputs bind, or by a parameter of that name."""
    spec = specs.OPS[name]
    dims = {dim for tensor in spec.inputs.values() for dim in tensor.dims}
    assert spec.rows in dims | set(spec.params)
    published = {name for name, output in spec.outputs.items() if output.dims[0] == "P"}
    assert published <= {"mask", "block_ids"}
    assert all(spec.outputs[n].dims[0] == spec.rows for n in spec.outputs.keys() - published)


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        (tiny.topk(op="topk"), "no op named 'topk': one of "),
        (tiny.topk(params={"k": 8, "x": 1}), "params.x is not one of ragged_topk's: k"),
        (tiny.topk(recorded=({},)), "recorded.0.raw_indices is missing"),
        (
            tiny.topk(recorded=({"page_indices": ints([1] * 8)},)),
            "recorded.0.page_indices is not one of the op's tensors: raw_indices",
        ),
        (
            tiny.topk(recorded=({"raw_indices": ints([1] * 8)},)),
            "recorded.0.raw_indices has shape [1, 8]; the op wants [T, slots] with T = 4",
        ),
        (
            tiny.pages(recorded=({"ragged_indices": ints(*[[1] * 8] * 4)},)),
            "recorded.0.ragged_indices need inputs.topk_indices_offset",
        ),
        (
            tiny.swap(tiny.pages(), page_table=None),
            "recorded.0.page_indices need a page table or a slot map among the inputs",
        ),
        (
            tiny.pages(spaces={"page_indices": Space(kind="absolute")}),
            "spaces.page_indices cannot be 'absolute'",
        ),
        (
            tiny.topk(spaces={"raw_indices": Space(kind="absolute", pad=1 << 31)}),
            "spaces.raw_indices has the pad 2147483648; it is an int32",
        ),
        (
            tiny.topk(provenance={"poison.raw_indices": "1.5"}),
            "provenance.poison.raw_indices is '1.5'; it is an int32",
        ),
        (
            tiny.topk(provenance={"poison.logits": "grey"}),
            "provenance.poison.logits is 'grey'; it is a number",
        ),
    ],
)
def test_a_case_that_contradicts_itself_is_refused(case: Case, sentence: str) -> None:
    """What can be known without reading a tensor is known before any is read."""
    with pytest.raises(InvalidCase) as caught:
        ops.validate(case)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize("value", ["inf", "-7", "1e3"])
def test_the_poison_of_logits_may_be_any_number(value: str) -> None:
    """A score buffer can hold what an index buffer cannot."""
    ops.validate(tiny.topk(provenance={"poison.logits": value, "note": "x"}))


SIZES = st.sampled_from([0, 1, 2, 3, 4, 5, 8, 32, 33])


def drawn(spec: TensorSpec, sizes: dict[str, int], data: st.DataObject) -> Tensor:
    """A tensor that fits its spec, by sizes drawn as they are met."""
    shape = []
    for dim in spec.dims:
        symbols = str(dim).removesuffix("+1").split("*")
        known = [int(s) if s.isdigit() else sizes.setdefault(s, data.draw(SIZES)) for s in symbols]
        shape.append(prod(known) + str(dim).endswith("+1"))
    dtype = schema.DTYPES[data.draw(st.sampled_from(spec.dtypes))]
    return torch.arange(prod(shape)).reshape(shape).remainder(5).to(dtype)


@given(data=st.data())
def test_no_shape_is_too_odd_for_a_verdict(data: st.DataObject) -> None:
    """Whatever sizes the tensors of a call have, the answer is a verdict never our own failure."""
    name = data.draw(st.sampled_from(sorted(specs.OPS)))
    spec = specs.OPS[name]
    size = data.draw(st.sampled_from([1, 4]))
    sizes = {"D": 32, "H": data.draw(st.sampled_from([4, 16])), "page_size": size}
    sizes["page_bytes"] = size * 36
    params = dict.fromkeys(spec.params, 3)
    if "page_size" in {**spec.params, **spec.defaults}:
        params["page_size"] = size
    case = Case(
        op=name,
        inputs={n: drawn(each, sizes, data) for n, each in spec.inputs.items()},
        params={**params},
        arithmetic=data.draw(st.sampled_from([None, "exact", "deep_gemm.sm90"])),
        recorded=({n: drawn(each, sizes, data) for n, each in spec.outputs.items()},),
    )
    outputs = {n: drawn(each, sizes, data) for n, each in spec.outputs.items()}
    assert judge.check(case).status in Status
    assert judge.check(case, lambda **_: outputs).status in Status
