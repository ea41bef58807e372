"""Watch: whatever an original hands out, its caller keeps, though the control writes it again."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import tied
import torch
from torch import Tensor

from equivalence import ab
from equivalence.live import clones
from equivalence.verdict import Status
from equivalence.versus import turns
from equivalence.versus.forwards import AGAIN, CANDIDATE, ORIGINAL

ARMS = (ORIGINAL, AGAIN, CANDIDATE)


@dataclass
class Handed:
    """Picks, and a tensor that says how often the original was called."""

    picks: Tensor
    count: Tensor


Original = Callable[..., Handed]


def in_inference_mode() -> Original:
    """An engine's own buffer, that only inference mode may write."""
    with torch.inference_mode():
        count = torch.zeros(3)

    def original(**call: Any) -> Handed:  # noqa: ANN401 - keywords of a selector
        with torch.inference_mode():
            return Handed(tied.fixed(**call), count.add_(1))

    return original


def expanded() -> Original:
    """A buffer of one cell that stands for many."""
    count = torch.zeros(1)

    def original(**call: Any) -> Handed:  # noqa: ANN401 - keywords of a selector
        count.add_(1)
        return Handed(tied.fixed(**call), count.expand(3))

    return original


def picks_of(result: Handed, _arguments: object) -> dict[str, Tensor]:
    """What is compared: the count is not."""
    return {"raw_indices": result.picks}


@pytest.mark.parametrize("make", [in_inference_mode, expanded])
def test_a_buffer_beside_the_outputs_keeps_its_values(make: Callable[[], Original]) -> None:
    """The caller sees the count that its own call left, in whatever order arms run."""
    for seed in range(6):
        original = make()
        watched = ab.shadow(
            original,
            original,
            op="ragged_topk",
            contract=tied.FREE,
            seed=seed,
            give=picks_of,
        )
        got = watched(**tied.arguments(0))
        runs = turns.order(ARMS, seed, 0)
        assert got.count.tolist() == [runs.index(ORIGINAL) + 1] * 3
        assert (watched.result().status, watched.result().failed) == (Status.EQUAL, {})


@dataclass(frozen=True)
class Metadata:
    """What an engine hands to a kernel: where it writes, and what else it may."""

    out: Tensor
    notes: dict[str, Tensor]


def test_a_dataclass_among_the_arguments_is_each_arms_own() -> None:
    """What the candidate writes into its fields never reaches the caller, whichever runs first."""

    def original(metadata: Metadata, **call: Any) -> None:  # noqa: ANN401 - keywords of a selector
        metadata.out[:-1] = tied.fixed(**call)[:-1]
        metadata.notes["who"].fill_(1)

    def candidate(metadata: Metadata, **call: Any) -> None:  # noqa: ANN401 - keywords of a selector
        metadata.out.copy_(tied.loses(**call))
        metadata.notes["who"].fill_(2)
        metadata.notes["more"] = metadata.out

    call = tied.arguments(0)
    for seed in range(6):
        metadata = Metadata(torch.full((tied.ROWS, tied.K), -9).int(), {"who": torch.zeros(1)})
        watched = ab.shadow(
            original,
            candidate,
            op="ragged_topk",
            contract=tied.FREE,
            seed=seed,
            give=lambda _, given: {"raw_indices": given["metadata"].out},
        )
        watched(metadata, **call)
        assert torch.equal(metadata.out[:-1], tied.fixed(**call)[:-1])
        assert metadata.out[-1].tolist() == [-9] * tied.K
        assert {name: each.tolist() for name, each in metadata.notes.items()} == {"who": [1.0]}
        assert watched.result().arms[CANDIDATE] is Status.DIFFERENT


def into(**call: Any) -> None:  # noqa: ANN401 - keywords of a selector
    """Picks for an argument of the caller, all of it."""
    call.pop("out").copy_(tied.fixed(**call))


def nothing(**_call: Any) -> None:  # noqa: ANN401 - keywords of a selector
    """Nothing is written at all."""


def only_picks(out: Tensor, **call: Any) -> None:  # noqa: ANN401 - keywords of a selector
    """Picks for an argument that its caller has filled with pads, which stay."""
    picks = tied.fixed(**call)
    out[picks >= 0] = picks[picks >= 0]


def told_in_place(
    original: Callable[..., None], candidate: Callable[..., None], out: Tensor
) -> Any:  # noqa: ANN401 - statuses
    """Statuses of two calls with one argument for the picks."""
    watched = ab.shadow(
        original,
        candidate,
        op="ragged_topk",
        contract=tied.FREE,
        params={"k": tied.K},
        inplace={"raw_indices": "out"},
        read=lambda **call: {n: call[n] for n in ("scores", "row_start", "row_end")},
    )
    call = tied.arguments(1)
    call["row_end"][7] = 3
    for _ in range(2):
        watched(out=out, **call)
    assert torch.equal(out, tied.fixed(**call))
    return watched.result().arms


def test_picks_from_before_are_nobodys() -> None:
    """The right picks of an earlier call are in the caller's buffer, and not the candidate's."""
    call = tied.arguments(1)
    call["row_end"][7] = 3
    arms = told_in_place(into, nothing, tied.fixed(**call))
    assert arms == {ORIGINAL: Status.EQUAL, AGAIN: Status.EQUAL, CANDIDATE: Status.DIFFERENT}


def test_pads_that_the_caller_has_filled_in_stay() -> None:
    """A kernel may leave them as they are."""
    arms = told_in_place(only_picks, only_picks, torch.full((tied.ROWS, tied.K), -1).int())
    assert arms == dict.fromkeys(ARMS, Status.EQUAL)


def test_a_result_beyond_the_bound_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the original gave beside its outputs counts before it is copied."""
    copied: list[int] = []
    real = clones.cloned

    def heard(args: Any, kwargs: Any) -> Any:  # noqa: ANN401 - those of cloned
        copied.append(clones.bytes_of(args, kwargs))
        return real(args, kwargs)

    def original(**call: Any) -> Handed:  # noqa: ANN401 - keywords of a selector
        return Handed(tied.fixed(**call), torch.zeros(1 << 20))

    monkeypatch.setattr("equivalence.live.call.cloned", heard)
    for seed in range(6):
        watched = ab.shadow(
            original,
            tied.fixed,
            op="ragged_topk",
            contract=tied.FREE,
            seed=seed,
            give=picks_of,
            max_bytes=1 << 20,
        )
        assert watched(**tied.arguments(0)).count.numel() == 1 << 20
        last = turns.order(ARMS, seed, 0)[-1] == ORIGINAL
        assert watched.result().left_out == ({} if last else {"max_bytes": 1})
    assert max(copied) < 1 << 20


def test_an_attribute_of_the_original_hides_nothing() -> None:
    """A callable that has a result of its own is watched like any other."""

    def original(**call: Any) -> Tensor:  # noqa: ANN401 - keywords of a selector
        return tied.fixed(**call)

    vars(original).update(result=7, tag="mine")
    watched = ab.shadow(original, tied.fixed, op="ragged_topk", contract=tied.FREE)
    watched(**tied.arguments(0))
    assert (watched.result().status, vars(watched)["tag"]) == (Status.EQUAL, "mine")


class _Stubborn(Tensor):
    """A tensor that nobody may fill."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's hook
        if func is Tensor.fill_:
            raise KeyError(func)
        base = super().__torch_function__
        return base(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]  # torch's hook


def stubborn(**call: Any) -> Tensor:  # noqa: ANN401 - keywords of a selector
    """Right picks that raise when they are poisoned."""
    return tied.fixed(**call).as_subclass(_Stubborn)


def endless(**_call: Any) -> list[Any]:  # noqa: ANN401 - keywords of a selector
    """A list that holds itself."""
    told: list[Any] = []
    told.append(told)
    return told


@pytest.mark.parametrize(
    ("candidate", "status"), [(stubborn, Status.EQUAL), (endless, Status.UNDECIDED)]
)
def test_no_result_makes_a_comparison_raise(candidate: Callable[..., Any], status: Status) -> None:
    """Whatever object a candidate gives, the comparison says what it came to."""
    forwards = tied.forwards(2)
    got = ab.compare(tied.fixed, candidate, forwards, contract=tied.FREE)
    assert got.status is status
