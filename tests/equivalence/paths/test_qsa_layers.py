"""The two QSA recordings as layers that select, through the shipped paths and through faults."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import call_of
from torch import Tensor

from equivalence.case import Case
from equivalence.judge import check
from equivalence.paths import qsa as paths
from equivalence.store import load_cases
from equivalence.verdict import Status
from refimpl import qsa

LAYERS = {case.name: case for case in load_cases(Path(__file__).parents[3] / "fixtures" / "layers")}


@pytest.fixture(params=sorted(LAYERS))
def layer(request: pytest.FixtureRequest) -> Case:
    """One recorded layer."""
    return LAYERS[request.param]


@pytest.mark.parametrize("way", [paths.fresh, paths.reused])
@pytest.mark.parametrize("budget", [1, 80_000, None])
def test_both_ways_pick_what_the_reference_picks(layer: Case, way: Any, budget: int | None) -> None:  # noqa: ANN401 - a path
    """In chunks of one row, of some and of all: every row of ids and packed rows is identical."""
    verdict = check(layer, lambda **call: way(**call, budget_bytes=budget))
    told = {n: (s.counts["identical"], s.counts["selecting"]) for n, s in verdict.stages.items()}
    assert told == {"block_ids": (80, 46), "packed": (80, 46)}


def test_another_choice_of_ties_is_tied(layer: Case) -> None:
    """Repeated keys and the zero plateau leave a choice, which a strict contract refuses."""

    def highest(**call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - inputs and params of the op
        return qsa.qsa_indexer(**call, ties="highest")

    strict, free = (check(layer, highest, contract=text) for text in ("strict", "ties=any"))
    assert (strict.status, {f.rule for f in strict.findings}) == (Status.DIFFERENT, {"wrong-tie"})
    assert (free.status, free.stages["packed"].counts["tied"] > 0) == (Status.EQUAL, True)


def test_a_stale_workspace_shows_in_packed_rows(layer: Case) -> None:
    """A selector that ranks to the width of its view picks what an earlier chunk left there."""
    right = qsa.qsa_indexer(**call_of(layer))
    visible = layer.inputs["visible_blocks"]
    dirty = torch.where(right["logits"].isneginf(), 12345.0, right["logits"])
    wide = torch.full_like(visible, right["logits"].shape[1])
    picks = qsa.qsa_picks(
        logits=dirty,
        positions=layer.inputs["positions"],
        visible_blocks=torch.where(visible > 512, wide, visible),
        k=512,
    )
    verdict = check(layer, lambda **_: {"packed": picks["packed"]})
    assert verdict.status is Status.DIFFERENT
    assert {f.rule for f in verdict.findings} == {"out-of-window"}
