"""Tokens moved in planar key pages: what is told of every way to do it wrong, and what passes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import call_of

from equivalence import generate, lint, store
from equivalence.checks import mismoved
from equivalence.judge import check
from equivalence.planted.moves import MOVES
from equivalence.report import as_text
from equivalence.verdict import Status
from refimpl import pages

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from equivalence.case import Case
    from equivalence.verdict import Finding, Verdict

ENGINE = "sglang.srt.mem_cache.index_key_cache.IndexKeyCache.move"
TAKEN = "as when locations of tokens are taken for pages, and whole pages are copied"
CAUSES = {
    "keys-alone": "keys",
    "scales-alone": "scales",
    "one-by-one": "one-by-one",
    "padding-stored": "padding",
    "exchanged": "exchanged",
    "interleaved": "interleaved",
}
"""By the planted fault: the cause that its reading names."""


def numbered(*moves: tuple[int, int], page_size: int = 64, count: int = 4) -> Case:
    """Keys of 128 bytes; every byte of a token, key and scale, is its location, modulo 256."""
    token = torch.arange(count * page_size).view(count, page_size, 1)
    keys, scales = (token.expand(-1, -1, many).flatten(1) for many in (128, 4))
    source, destination = torch.tensor(moves, dtype=torch.int64).view(-1, 2).unbind(1)
    return replace(
        generate.move_tokens(0),
        inputs={
            "kv_cache": torch.cat([keys, scales], 1).byte(),
            "source": source,
            "destination": destination,
        },
        params={"page_size": page_size},
        name="",
    )


def in_place(kv_cache: Tensor, source: Tensor, destination: Tensor, **call: Any) -> Tensor:  # noqa: ANN401 - params of the op
    """The right move, in the buffer that is given."""
    moved = pages.move_tokens(kv_cache=kv_cache, source=source, destination=destination, **call)
    return kv_cache.copy_(moved)


def by_location(kv_cache: Tensor, source: Tensor, destination: Tensor, **_: object) -> Tensor:
    """Pages indexed with locations of tokens, in place."""
    kv_cache[destination] = kv_cache[source]
    return kv_cache


def told(verdict: Verdict) -> list[tuple[str, str, int | None, str]]:
    """Stage, rule, page and count of every finding."""
    return [(f.stage, f.rule, f.row, f.place) for f in verdict.findings]


def last(found: Finding) -> tuple[str, str]:
    """What a finding says was allowed."""
    return found.evidence[-1].label, found.evidence[-1].note


# --- pages indexed with locations ----------------------------------------------------------------


def test_a_token_is_a_key_and_a_scale() -> None:
    """Of 4 pages of 64, token 70 to 5: 128 + 4 bytes change, and no other."""
    case = numbered((70, 5))
    cache, moved = case.inputs["kv_cache"], pages.move_tokens(**call_of(case))
    changed = (cache != moved).nonzero().tolist()
    key, scale = range(5 * 128, 6 * 128), range(64 * 128 + 5 * 4, 64 * 128 + 6 * 4)
    assert changed == [[0, byte] for byte in (*key, *scale)]
    assert set(moved[0, [*key, *scale]].tolist()) == {70}
    assert check(case, pages.move_tokens).status is Status.EQUAL


def test_a_location_that_is_no_page_is_a_crash() -> None:
    """There is no page 70: nothing is concluded, and the error is told."""
    verdict = check(numbered((70, 5)), by_location, contract=ENGINE)
    (found,) = verdict.findings
    assert (verdict.status, found.rule) == (Status.UNDECIDED, "crash")
    assert found.reading.startswith("IndexError: index 70 is out of bounds for dimension 0")


@pytest.mark.parametrize(("one", "two", "count"), [(3, 1, 4), (70, 5, 72)])
def test_a_location_that_is_a_page_loses_a_whole_page(one: int, two: int, count: int) -> None:
    """All of the page is told with both values, and that none of it was allowed to change."""
    case = numbered((one, two), count=count)
    verdict = check(case, by_location, contract=ENGINE)
    changed = int((case.inputs["kv_cache"][two] != case.inputs["kv_cache"][one]).sum())
    assert told(verdict) == [
        ("moved", "bits", 0, "132 of 8,448 values"),
        ("moved", "wrote-outside", two, f"{changed:,} of 8,448 bytes of page {two}"),
    ]
    kept, outside = verdict.findings
    first, got = outside.evidence[:2]
    values = case.inputs["kv_cache"][[two, one], 0].tolist() if changed == 8448 else None
    assert (first.label, got.label, first.place) == ("want", "got", "at byte 0")
    assert values is None or [int(first.value), int(got.value)] == values
    assert last(outside) == ("allowed", "no byte of it")
    assert kept.reading == f"{TAKEN}, or nothing is moved"
    assert outside.reading == f"{TAKEN}: page {one} onto page {two}"


def test_pages_of_one_token_hide_it() -> None:
    """There a location is a page."""
    case = generate.move_tokens(0, page_size=1, cache_pages=32)
    assert check(case, by_location, contract=ENGINE).status is Status.EQUAL
    moves = numbered((70, 5), page_size=1, count=128)
    assert check(moves, by_location, contract=ENGINE).status is Status.EQUAL


def test_what_was_allowed_is_told_run_by_run() -> None:
    """Bytes of the tokens that are moved there, the first of many."""
    case = numbered((70, 5), (71, 9), (72, 20), (200, 130))

    def spoils(**call: Any) -> Tensor:  # noqa: ANN401 - inputs and params of the op
        out = pages.move_tokens(**call)
        out[0, 0] ^= 1
        out[2, -1] ^= 1
        out[2, 2 * 128] ^= 1
        return out

    verdict = check(case, spoils)
    assert told(verdict) == [
        ("moved", "wrote-outside", page, f"1 of 8,448 bytes of page {page}") for page in (0, 2)
    ]
    assert [last(found)[1] for found in verdict.findings] == [
        "bytes 640-767 1152-1279 2560-2687 8212-8215 and 2 runs more",
        "bytes 256-383 8200-8203",
    ]


@given(st.integers(0, 3), st.integers(0, 7), st.integers(0, 79), st.integers(1, 255))
def test_a_byte_is_wrong_inside_a_moved_token_or_written_outside(
    seed: int, page: int, byte: int, flip: int
) -> None:
    """Any byte of any page: 4 keys of 16 bytes, then 4 scales of 4."""
    case = generate.move_tokens(seed)
    token = byte // 16 if byte < 64 else (byte - 64) // 4
    moved = 4 * page + token in case.inputs["destination"].tolist()[:6]

    def spoils(**call: Any) -> Tensor:  # noqa: ANN401 - inputs and params of the op
        out = pages.move_tokens(**call)
        out[page, byte] ^= flip
        return out

    (found,) = check(case, spoils).findings
    assert (found.rule, found.row) == ("bits" if moved else "wrote-outside", page)
    assert found.place == ("1 of 80 values" if moved else f"1 of 80 bytes of page {page}")


# --- every other fault ---------------------------------------------------------------------------


@pytest.mark.parametrize("pad", [0, -1])
@pytest.mark.parametrize("name", CAUSES)
def test_a_planted_fault_is_told_with_its_cause(name: str, pad: int) -> None:
    """By its rules, and in every page that it changes."""
    case = generate.move_tokens(0, pad=pad)
    fault = MOVES[name]
    verdict = check(case, fault.candidate)
    right, got = pages.move_tokens(**call_of(case)), fault.candidate(**call_of(case))
    assert verdict.status is Status.DIFFERENT
    assert verdict.failing == (right != got).any(1).nonzero()[:, 0].tolist()
    assert {found.rule for found in verdict.findings} <= fault.rules
    cause = mismoved.FAULTS[CAUSES[name]].cause
    assert {found.reading for found in verdict.findings} == {f"as when {cause}"}


def test_the_tables_of_faults_are_the_same() -> None:
    """Every planted fault has its cause; that nothing is moved is one more."""
    assert {*CAUSES, "pages-of-tokens"} == set(MOVES)
    assert {*CAUSES.values(), "pages", "unmoved"} == set(mismoved.FAULTS)
    assert all(fault.shows and fault.needs for fault in MOVES.values())


def test_a_buffer_that_is_left_alone_is_not_moved() -> None:
    """Pages that nothing goes to are right."""
    verdict = check(generate.move_tokens(0), lambda kv_cache, **_: kv_cache)
    assert verdict.failing == [0, 5, 6, 7]
    assert {f.reading for f in verdict.findings} == {"as when nothing is moved"}


def test_a_chain_is_read_before_it_is_written() -> None:
    """5 to 6 and 6 to 7, one after the other, gives 5 twice; in the other order it is right."""
    moves = [(5, 6), (6, 7)]
    candidate = MOVES["one-by-one"].candidate
    verdict = check(numbered(*moves), candidate)
    assert told(verdict) == [("moved", "bits", 0, "132 of 8,448 values")]
    assert verdict.findings[0].evidence[0].place == "at 896"
    assert check(numbered(*moves[::-1]), candidate).status is Status.EQUAL


@pytest.mark.parametrize(("pad", "page"), [(0, 0), (-1, 3)])
def test_padding_that_is_moved_changes_a_token_of_nobody(pad: int, page: int) -> None:
    """Zeros at location 0, or at the last one: 128 + 4 bytes."""
    case = numbered((70, 71), (pad, pad), (pad, pad))
    case = replace(
        case,
        inputs={**case.inputs, "kv_cache": case.inputs["kv_cache"] | 1},
        params={**case.params, "pad": pad},
    )
    verdict = check(case, MOVES["padding-stored"].candidate)
    assert told(verdict) == [("moved", "wrote-outside", page, f"132 of 8,448 bytes of page {page}")]


def test_a_buffer_of_which_only_the_tokens_are_written_is_unwritten() -> None:
    """Fresh memory around them is no page."""

    def fresh(kv_cache: Tensor, **call: Any) -> Tensor:  # noqa: ANN401 - the rest of the call
        out, right = torch.empty_like(kv_cache), pages.move_tokens(kv_cache=kv_cache, **call)
        out[right != kv_cache] = right[right != kv_cache]
        return out

    verdict = check(generate.move_tokens(0), fresh)
    assert {found.rule for found in verdict.findings} == {"unwritten"}
    assert verdict.failing == list(range(8))


# --- in place ------------------------------------------------------------------------------------


def test_a_move_in_place_needs_leave() -> None:
    """It is right under the engine's contract, and writes into its input under a strict one."""
    case = generate.move_tokens(0)
    assert check(case, in_place, contract=ENGINE, repeats=2).status is Status.EQUAL
    verdict = check(case, in_place)
    assert [(f.stage, f.rule, f.reading) for f in verdict.findings] == [
        (
            "inputs",
            "wrote-outside",
            "the call wrote into its input; allowed: writes=none",
        )
    ]
    assert verdict.stages["moved"].status is Status.EQUAL


def test_a_cache_that_is_changed_is_the_one_handed_back() -> None:
    """A right answer beside a spoilt cache is not enough, nor leave to write into anything else."""
    case = generate.move_tokens(0)

    def beside(kv_cache: Tensor, **call: Any) -> Tensor:  # noqa: ANN401 - the rest of the call
        out = pages.move_tokens(kv_cache=kv_cache, **call)
        kv_cache[2, 7:10] ^= 1
        return out

    def elsewhere(**call: Any) -> Tensor:  # noqa: ANN401 - inputs and params of the op
        call["source"][0] += 1
        return in_place(**{**call_of(case), "kv_cache": call["kv_cache"]})

    told_of: list[tuple[Callable[..., Tensor], str]] = [
        (beside, "input kv_cache   3 of 640 values changed"),
        (elsewhere, "input source   1 of 8 values changed"),
    ]
    for candidate, place in told_of:
        (found,) = check(case, candidate, contract="writes=cache").findings
        assert (found.rule, found.place) == ("wrote-outside", place)
        assert found.reading == "the call wrote into its input; allowed: writes=cache"


def test_leave_to_change_a_cache_is_none_where_no_cache_is_handed_back() -> None:
    """A gather reads its pages."""

    def spoils(kv_cache: Tensor, rows: int, **call: Any) -> dict[str, Tensor]:  # noqa: ANN401 - the rest of the call
        del rows
        found = pages.gather_batch(kv_cache=kv_cache, **call)
        kv_cache[0] ^= 1
        return found

    verdict = check(generate.gather_keys(0), spoils, contract="writes=cache")
    assert [(f.stage, f.rule) for f in verdict.findings] == [("inputs", "wrote-outside")]


# --- calls that are not judged -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"destination": torch.tensor([5, 6, 5])}, "moves 0 and 2 both go to token 5"),
        (
            {"source": torch.tensor([70, 256, 72])},
            "move 1 reads token 256: 4 pages of 64 hold 256",
        ),
        (
            {"destination": torch.tensor([5, 6, -1])},
            "move 2 writes token -1: 4 pages of 64 hold 256",
        ),
        (
            {"destination": torch.tensor([5, 0, 7])},
            "move 1 goes from 71 to 0: padding (0) is on both sides or on none",
        ),
        ({"kv_cache": torch.zeros(0, 8448).byte()}, "move 0 reads token 70: 0 pages of 64 hold 0"),
    ],
)
def test_a_call_without_one_answer_is_an_invalid_record(
    change: dict[str, Tensor], sentence: str, tmp_path: Path
) -> None:
    """Nothing is called; lint says the same of a file."""
    case = numbered((70, 5), (71, 6), (72, 7))
    case = replace(case, inputs={**case.inputs, **change})
    called: list[int] = []
    verdict = check(case, lambda **_: called.append(1))
    assert [(f.rule, f.reading) for f in verdict.findings] == [("invalid-record", sentence)]
    assert called == []
    store.save(case, tmp_path / "case.safetensors")
    (problem,) = lint.problems([tmp_path])
    assert problem.endswith(sentence)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"destination": torch.tensor([5, 6])},
            "inputs.destination has shape [2]; the op wants [m] with m = 3, not 2, in dimension 0",
        ),
        ({"source": torch.ones(3)}, "inputs.source is float32; the op wants int32 or int64"),
        (
            {"kv_cache": torch.zeros(4, 6401).byte()},
            "inputs.kv_cache has pages of 6401 bytes; params.page_size 64 keys",
        ),
        (
            {"kv_cache": torch.zeros(4, 256).byte()},
            "inputs.kv_cache has pages of 256 bytes; params.page_size 64 keys",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_an_invalid_record(
    change: dict[str, Tensor], sentence: str
) -> None:
    """Before any of them is read."""
    case = numbered((70, 5), (71, 6), (72, 7))
    verdict = check(replace(case, inputs={**case.inputs, **change}), pages.move_tokens)
    (found,) = verdict.findings
    assert found.rule == "invalid-record"
    assert found.reading.startswith(sentence)


@pytest.mark.parametrize("pad", [-2, 1, None])
def test_padding_is_the_first_location_or_none(pad: Any) -> None:  # noqa: ANN401 - anything at all
    """0, as in SGLang's pools, or -1."""
    case = replace(numbered((70, 5)), params={"page_size": 64, "pad": pad})
    assert [found.reading for found in check(case, pages.move_tokens).findings] == [
        f"params.pad is {pad!r}; it is -1 to 0"
    ]


@pytest.mark.parametrize("count", [0, 4])
def test_no_moves_leave_every_page(count: int) -> None:
    """No page may change, and no page is nothing to judge."""
    case = numbered(count=count)
    verdict = check(case, pages.move_tokens)
    assert verdict.status is (Status.EQUAL if count else Status.UNDECIDED)


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "status"), [(pages.move_tokens, 0), (MOVES["keys-alone"].candidate, 1)]
)
def test_a_recorded_move_is_replayed(
    run: Callable[..., Tensor],
    status: int,
    tmp_path: Path,
    tell: Callable[..., tuple[int, str, str]],
) -> None:
    """Its bytes come back, and a candidate is judged on the same call."""
    case = generate.move_tokens(0)
    case = replace(case, recorded=({"moved": run(**call_of(case))},))
    store.save(case, tmp_path / "case.safetensors")
    assert list(lint.problems([tmp_path])) == []
    assert tell("replay", tmp_path)[0] == status
    code, out, _ = tell("replay", tmp_path, "--candidate", "refimpl.pages:move_tokens")
    assert (code, "8 rows" in out) == (0, True)


def test_a_poison_of_a_buffer_is_a_byte() -> None:
    """What it held before the call cannot be -7."""
    case = replace(generate.move_tokens(0), provenance={"poison.moved": "-7"})
    assert [found.reading for found in check(case).findings] == [
        "provenance.poison.moved is '-7'; it is a byte"
    ]


def test_the_message_names_page_byte_values_and_what_was_allowed() -> None:
    """As a user reads it."""
    case = numbered((70, 5), (3, 1))

    def spoils(**call: Any) -> Tensor:  # noqa: ANN401 - inputs and params of the op
        out = pages.move_tokens(**call)
        out[0, 900:902] = 200
        return out

    text = as_text.failure(check(case, spoils))
    assert text.splitlines()[2:8] == [
        "  row 0   moved   2 of 8,448 bytes of page 0   wrote-outside",
        "    want      at byte 900    7  07",
        "    got       at byte 900  200  C8",
        "    want      at byte 901    7  07",
        "    got       at byte 901  200  C8",
        "    allowed  bytes 128-255 640-767 8196-8199 8212-8215",
    ]
