"""The reference of compositions against a second one, and inputs that nobody should send."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import twin_compose
from hypothesis import given, settings
from hypothesis import strategies as st

from equivalence import generate
from equivalence.case import Case
from equivalence.checks.composed import weighing
from equivalence.compose import judging
from equivalence.drawn.compose import SHAPES
from equivalence.judge import check
from equivalence.planted import compose as planted
from equivalence.verdict import Status

TABLES = ("slot_pages", "owner", "local_page", "writer", "prefix_lens", "extend_lens")


def of_twin(case: Case) -> dict[str, Any]:
    """The twin's result as outputs of all ranks."""
    made: dict[str, Any] = {}
    cp = int(case.params["cp"])  # type: ignore[arg-type]  # JSON
    for name, held in twin_compose.composed(case).items():
        if name == "row_locations":
            made[name] = torch.tensor([held] * cp, dtype=torch.int32).view(cp, -1)
        else:
            layers = [torch.frombuffer(bytearray(b"".join(one)), dtype=torch.uint8) for one in held]
            dense = torch.stack(layers).view(len(held), len(held[0]), -1)
            made[name] = dense.expand(cp, *dense.shape)
    return made


@given(
    seed=st.integers(0, 1 << 16),
    shape=st.sampled_from(SHAPES),
    cp=st.integers(1, 8),
    layers=st.integers(1, 3),
    page_size=st.integers(1, 9),
    kinds=st.sampled_from([("token",), ("index",), ("token", "index")]),
    padding=st.integers(0, 3),
    fp8=st.booleans(),
)
def test_the_twin_agrees(seed: int, **how: Any) -> None:  # noqa: ANN401 - of `compose_pages`
    """Byte for byte, over shapes, ranks, page sizes and kinds."""
    case = generate.compose_pages(seed, **how)
    verdict = judging.judge(case, of_twin(case))
    assert verdict.status is Status.EQUAL, verdict.findings


def test_the_twin_agrees_on_steps_in_a_row() -> None:
    """What a step wrote is prefix of the next."""
    for case in generate.compose_sequence(5, fp8=True):
        assert judging.judge(case, of_twin(case)).status is Status.EQUAL


@given(data=st.data(), seed=st.integers(0, 64))
@settings(max_examples=60)
def test_garbage_tables_never_end_in_a_traceback(data: st.DataObject, seed: int) -> None:
    """Whatever stands in a table, the answer is a verdict, and no candidate is called in vain."""
    case = generate.compose_pages(seed, layers=1)
    name = data.draw(st.sampled_from(TABLES))
    table = case.inputs[name].clone()
    wild = st.one_of(st.integers(-3, 40), st.sampled_from([2**31 - 1, -(2**31), 1 << 20]))
    for _ in range(data.draw(st.integers(1, 3))):
        table[data.draw(st.integers(0, len(table) - 1))] = data.draw(wild)
    spoilt = replace(case, inputs={**case.inputs, name: table})
    params = dict(spoilt.params, staging_pages=data.draw(st.sampled_from([None, 0, 1, 100])))
    called: list[int] = []

    def candidate(**_: Any) -> dict[str, Any]:  # noqa: ANN401 - inputs and params of the op
        called.append(1)
        return planted.right(case)

    verdict = check(replace(spoilt, params=params), candidate)
    assert verdict.status in Status
    refused = [found for found in verdict.findings if found.stage == "inputs"]
    assert bool(refused) != bool(called)
    assert all(found.reading for found in refused)


@pytest.mark.parametrize("cut", [97, 500])
def test_pieces_of_a_layer_come_to_the_whole(cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that is too large is composed a few slots at a time, carried page and all."""
    monkeypatch.setattr("equivalence.checks.composed.wanted._PIECE_BYTES", cut)
    for seed in range(6):
        case = generate.compose_pages(seed)
        verdict = judging.judge(case, weighing.reference(case))
        assert verdict.status is Status.EQUAL
        wrong = planted.right(case)
        wrong["token_pages"][0, 0, 0, 5] += 1
        assert judging.judge(case, wrong).failing == [0]
