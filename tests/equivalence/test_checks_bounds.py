"""What a bound lets pass is what some scores inside it lead to, and nothing else."""

from collections.abc import Sequence
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from equivalence.checks import bounds, within
from equivalence.checks.bounds import Chosen, Ranges, census, classify, decide, name_choices
from equivalence.checks.rows import OPEN, REORDERED, code, tally
from equivalence.checks.within import Bounded
from equivalence.verdict import Evidence, Finding
from refimpl import bound, mx
from refimpl.published import published_logits

INF = float("inf")
INTERVAL = st.tuples(st.integers(0, 3), st.integers(0, 3)).map(lambda x: (min(x), max(x)))
COLUMNS, K = 3000, 512
ROW = st.lists(st.tuples(INTERVAL, st.booleans()), min_size=1, max_size=5)


def ranges_of(*rows: Sequence[tuple[tuple[float, float], bool]]) -> Ranges:
    """Ranges of (low, high) and whether a column is eligible."""
    return Ranges(
        low=torch.tensor([[float(x[0]) for x, _ in row] for row in rows], dtype=torch.float64),
        high=torch.tensor([[float(x[1]) for x, _ in row] for row in rows], dtype=torch.float64),
        eligible=torch.tensor([[ok for _, ok in row] for row in rows]),
    )


def selections(row: list[tuple[tuple[int, int], bool]], need: int) -> set[tuple[int, ...]]:
    """Every selection that some whole scores inside the intervals lead to, whoever wins a tie."""
    columns = [j for j, (_, ok) in enumerate(row) if ok]
    found = set()
    for scores in product(*(range(row[j][0][0], row[j][0][1] + 1) for j in columns)):
        held = dict(zip(columns, scores, strict=True))
        for chosen in combinations(columns, need):
            least = min((held[j] for j in chosen), default=9)
            if all(held[j] <= least for j in columns if j not in chosen):
                found.add(chosen)
    return found


@given(ROW, st.integers(0, 5))
def test_classes_are_those_of_all_selections(
    row: list[tuple[tuple[int, int], bool]], need: int
) -> None:
    """A forced column is in every selection that can be, an excluded one in none."""
    need = min(need, sum(ok for _, ok in row))
    every = selections(row, need)
    got = classify(ranges_of(row), torch.tensor([need]))
    forced = [ok and all(j in s for s in every) for j, (_, ok) in enumerate(row)]
    never = [ok and not any(j in s for s in every) for j, (_, ok) in enumerate(row)]
    open_ = [ok and not f and not n for (_, ok), f, n in zip(row, forced, never, strict=True)]
    assert [x[0].tolist() for x in got] == [forced, never, open_]


@given(ROW, st.integers(1, 5))
def test_legal_is_what_some_scores_lead_to(
    row: list[tuple[tuple[int, int], bool]], need: int
) -> None:
    """Of all sets of the right size, those pass that scores inside the intervals lead to."""
    need = min(need, sum(ok for _, ok in row))
    every = selections(row, need)
    columns = [j for j, (_, ok) in enumerate(row) if ok]
    for chosen in combinations(columns, need):
        picks = torch.tensor([[*chosen, -1]])
        codes = name_choices(ranges_of(row), picks, picks >= 0, torch.tensor([False]), order="any")
        assert codes.tolist() == [OPEN if chosen in every else code("lost-winner")]


def test_rows_are_classified_each_by_their_need() -> None:
    """Rows of different needs in one block have the classes that they have alone."""
    row = [((5.0, 6.0), True), ((3.0, 4.0), True), ((3.5, 3.6), True), ((0.0, 1.0), False)]
    needs = [0, 1, 2, 3]
    block = classify(ranges_of(*[row] * 4), torch.tensor(needs))
    for i, need in enumerate(needs):
        alone = classify(ranges_of(row), torch.tensor([need]))
        assert all(torch.equal(x[i], y[0]) for x, y in zip(block, alone, strict=True))
    assert block[0].tolist() == [
        [False] * 4,
        [True, False, False, False],
        [True, False, False, False],
        [True, True, True, False],
    ]


@given(
    st.floats(-1e30, 1e30),
    st.one_of(st.just(0.0), st.floats(1e-300, 1e30)),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_intervals_are_rounded_outward(score: float, limit: float, dtype: torch.dtype) -> None:
    """The ends hold the whole interval, and are its own where the bound is 0 and fits."""
    s, b = (torch.tensor([x], dtype=torch.float64) for x in (score, limit))
    low, high = (x.double() for x in bounds.intervals(s, b, dtype))
    assert low.item() <= (s - b).item() <= (s + b).item() <= high.item()
    if limit == 0 and s.to(dtype).double().equal(s):
        assert low.item() == high.item() == score
    elif dtype is torch.float64 and limit > 0:
        assert low.item() < (s - b).item()
        assert high.item() > (s + b).item()


def test_nothing_known_is_everything() -> None:
    """A NaN score and a bound of inf or NaN reach from -inf to inf; an exact inf stays itself."""
    s = torch.tensor([float("nan"), 1.0, 1.0, INF, -INF], dtype=torch.float64)
    b = torch.tensor([0.0, INF, float("nan"), 0.0, 0.0], dtype=torch.float64)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        low, high = bounds.intervals(s, b, dtype)
        assert low.tolist() == [-INF, -INF, -INF, INF, -INF]
        assert high.tolist() == [INF, INF, INF, INF, -INF]


def test_windows_masks_and_minus_inf_make_columns_eligible() -> None:
    """A column may be picked inside its window and mask, at -inf only where the contract says."""
    scores = torch.tensor([[1.0, -INF, 3.0, 4.0]], dtype=torch.float64)
    admitted = torch.tensor([[True, True, True, False]])
    one, three = torch.tensor([1]), torch.tensor([3])
    got = [
        bounds.in_windows(
            scores, scores * 0, column=one, visible=three, admitted=mask, minus_inf=rule
        )
        .eligible[0]
        .int()
        .tolist()
        for mask, rule in ((None, "pick"), (None, "pad"), (admitted, "pad"))
    ]
    assert got == [[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 1, 0]]


@cache
def indexer() -> tuple[Tensor, Tensor, Tensor]:
    """bf16 logits of the published SM100 kernel, scores and bound of the same MXFP4 inputs."""
    g = torch.Generator().manual_seed(3)
    q, k = torch.randn(4, 32, 128, generator=g), torch.randn(COLUMNS, 128, generator=g)
    (a, a_scale), (b, b_scale) = mx.quantize(q), mx.quantize(k)
    case: dict[str, Any] = {
        "q": a,
        "q_scale": a_scale,
        "k": b,
        "k_scale": b_scale,
        "weights": torch.randn(4, 32, generator=g).to(torch.bfloat16),
        "arithmetic": "deep_gemm.sm100.bf16_sums",
    }
    return published_logits(**case), *bound.scores_and_bound(**case)


def chosen(scores: Tensor, limit: Tensor, picks: Tensor) -> Chosen:
    """Picks of rows that see every column, beside the reference's own."""
    low, high = bounds.intervals(scores, limit)
    best = scores.topk(picks.shape[1], dim=1).indices
    return Chosen(
        ranges=Ranges(low=low, high=high, eligible=torch.ones_like(scores, dtype=torch.bool)),
        want=torch.zeros_like(scores, dtype=torch.bool).scatter(1, best, value=True),
        columns=picks,
        usable=torch.ones_like(picks, dtype=torch.bool),
        ids=torch.arange(len(picks)) + 40,
        stage="raw_indices",
    )


def test_picks_by_a_kernels_own_bf16_ties_are_open() -> None:
    """bf16 scores tie often; whichever tied column a kernel picks, its rows are open."""
    got, scores, limit = indexer()
    codes = set()
    for flipped in (False, True):
        tied = got.flip(1) if flipped else got
        picks = tied.topk(K, dim=1).indices
        picks = COLUMNS - 1 - picks if flipped else picks
        cutoff = got.gather(1, picks).amin(1, keepdim=True)
        assert ((got == cutoff).sum(1) > 1).any()
        decided = decide(chosen(scores, limit, picks))
        codes |= set(tally(decided.codes))
        assert decided.power
    assert codes == {"open"}


def test_the_reference_s_own_set_is_reordered() -> None:
    """The reference's picks in any order are its own set, whatever the bound."""
    _, scores, limit = indexer()
    picks = scores.topk(K, dim=1).indices.flip(1)
    decided = decide(chosen(scores, limit, picks))
    assert tally(decided.codes) == {"reordered": 4}
    assert decided.counts["forced"] > 3 * K


def test_the_reference_s_own_set_needs_no_interval() -> None:
    """Rows that hold the reference's set are reordered even where its scores say otherwise."""
    ranges = ranges_of([((0.0, 1.0), True), ((5.0, 6.0), True)])
    picks = torch.tensor([[0]])
    for same, want in ((True, REORDERED), (False, code("lost-winner"))):
        codes = name_choices(ranges, picks, picks >= 0, torch.tensor([same]))
        assert codes.tolist() == [want]


def test_one_winner_lost_outside_the_bound_is_named() -> None:
    """The best column left out for the worst is a lost winner, with both intervals."""
    got, scores, limit = indexer()
    picks = got.topk(K, dim=1).indices
    best, worst = scores[2].argmax(), scores[2].argmin()
    picks[2, picks[2] == best] = worst
    decided = decide(chosen(scores, limit, picks))
    assert decided.codes.tolist() == [OPEN, OPEN, code("lost-winner"), OPEN]
    finding = decided.explain(2)
    assert (finding.stage, finding.rule, finding.row) == ("raw_indices", "lost-winner", 42)
    assert {(line.label, line.place) for line in finding.evidence if "column" in line.place} >= {
        ("missing", f"column {best}"),
        ("extra", f"column {worst}"),
    }


def test_a_finding_names_both_intervals() -> None:
    """The finding holds what was lost, what was kept, and by how much the one beats the other."""
    row = [((5.0, 6.0), True), ((3.0, 5.5), True), ((1.0, 2.0), True)]
    case = Chosen(
        ranges=ranges_of(row),
        want=torch.tensor([[True, True, False]]),
        columns=torch.tensor([[2, 1]]),
        usable=torch.tensor([[True, True]]),
        ids=torch.tensor([17]),
        stage="raw_indices",
    )
    assert decide(case).explain(0) == Finding(
        stage="raw_indices",
        rule="lost-winner",
        row=17,
        evidence=(
            Evidence(
                label="missing",
                place="column 0",
                value="5 to 6",
                note="3 above the most that a pick can be",
            ),
            Evidence(
                label="extra",
                place="column 2",
                value="1 to 2",
                note="3 below the least of a column left out",
            ),
        ),
        reading="1 column left out for less, 1 pick is surely beaten",
    )


@pytest.mark.parametrize(
    ("order", "picks", "broken"),
    [
        ("any", [1, 0, 2], False),
        ("ascending", [0, 1, 2], False),
        ("ascending", [0, 2, 1], True),
        ("score", [2, 1, 0], False),
        ("score", [1, 2, 0], False),
        ("score", [2, 0, 1], True),
        ("score", [0, 3], False),
        ("score", [0, 1], True),
    ],
)
def test_order_counts_where_intervals_decide_it(
    order: str, picks: list[int], *, broken: bool
) -> None:
    """Columns whose intervals overlap may stand either way, others as the contract says."""
    row = [((1.0, 2.0), True), ((3.0, 5.0), True), ((4.0, 6.0), True), ((2.0, 3.0), True)]
    at = torch.tensor([picks])
    codes = name_choices(
        ranges_of(row), at, torch.ones_like(at).bool(), torch.tensor([True]), order=order
    )
    assert codes.tolist() == [code("order") if broken else REORDERED]


@pytest.mark.parametrize(("open_picks", "power"), [(0, True), (1, True), (2, False), (4, False)])
def test_a_row_with_many_open_picks_has_no_power(open_picks: int, *, power: bool) -> None:
    """Up to a quarter of a row's picks may be open; a row that does not select never has power."""
    sure = [((9.0, 9.0), True)] * (4 - open_picks)
    maybe = [((1.0, 2.0), True)] * (open_picks + 1 if open_picks else 0)
    row = [*sure, *maybe, ((0.0, 0.0), True)]
    ranges = ranges_of(row)
    counts, got = census(ranges, torch.tensor([4]))
    assert got is power
    assert counts == {
        "forced": len(sure),
        "excluded": 1,
        "open": len(maybe),
        "too-open": int(not power),
    }
    assert census(ranges, torch.tensor([len(row)]))[1] is False


def bounded(*, poison: float | None = None) -> Bounded:
    """bf16 scores of a kernel, rows 7 to 10, of which columns 5 to 2995 are compared."""
    got, scores, limit = indexer()
    return Bounded(
        want=scores,
        bound=limit.clone(),
        got=got.clone(),
        first=torch.full((4,), 5),
        count=torch.full((4,), 2990),
        ids=torch.arange(4) + 7,
        stage="logits",
        poison=poison,
    )


def test_scores_inside_their_bounds_are_identical() -> None:
    """A kernel of other bits agrees; cells outside the window may hold anything."""
    case = bounded()
    case.got[:, :5], case.got[:, 2995:] = float("nan"), 1e9
    assert (case.got.double() != case.want).any()
    decided = within.decide(case)
    assert tally(decided.codes) == {"identical": 4}
    assert decided.counts == {
        "compared": 11960,
        "within": 11960,
        "different": 0,
        "unbounded": 0,
    }
    assert decided.power


@pytest.mark.parametrize(
    ("value", "rule"),
    [(INF, "bits"), (-INF, "bits"), (float("nan"), "nan"), (1e9, "bits"), (-77.0, "unwritten")],
)
def test_one_cell_out_of_bounds_is_named(value: float, rule: str) -> None:
    """One cell of a row that is far off, not finite or never written fails its row alone."""
    case = bounded(poison=-77.0)
    case.got[2, 5] = value
    decided = within.decide(case)
    assert tally(decided.codes) == {"identical": 3, rule: 1}
    assert decided.counts["different"] == 1
    assert decided.explain(2).rule == rule


def test_a_score_just_past_its_bound_says_by_how_much() -> None:
    """One unit past the bound fails, one inside passes, and the finding holds both values."""
    want = torch.tensor([[1.0, 2.0, 0.0]], dtype=torch.float64)
    limit = torch.tensor([[0.25, 0.5, 0.0]], dtype=torch.float64)

    def judge(*got: float) -> Any:  # noqa: ANN401 - a verdict of a row
        return within.decide(
            Bounded(
                want=want,
                bound=limit,
                got=torch.tensor([got]),
                first=torch.tensor([0]),
                count=torch.tensor([3]),
                ids=torch.tensor([3]),
                stage="logits",
            )
        )

    assert tally(judge(1.25, 1.5, -0.0).codes) == {"identical": 1}
    assert judge(1.25, 1.4999999, 0.0).explain(0) == Finding(
        stage="logits",
        rule="bits",
        row=3,
        place="columns 0-3   1 of 3 cells",
        evidence=(
            Evidence(
                label="want",
                place="column 1",
                value="2",
                bits="4000000000000000",
                note="give or take 0.5",
            ),
            Evidence(
                label="got",
                place="column 1",
                value="1.49999988",
                bits="3FBFFFFF",
                note="off by 0.5",
            ),
        ),
    )
    assert tally(judge(1.0, 2.0, 1e-45).codes) == {"bits": 1}


def test_without_a_bound_nothing_is_compared() -> None:
    """Cells whose bound is inf are counted, and a block of them has no power."""
    case = bounded()
    case.bound.fill_(INF)
    case.got.fill_(float("nan"))
    decided = within.decide(case)
    assert tally(decided.codes) == {"identical": 4}
    assert (decided.power, decided.counts["unbounded"]) == (False, 11960)


def test_a_row_of_no_columns_is_reordered() -> None:
    """Blocks without a column or without a row break nothing."""
    none = Ranges(low=torch.zeros(2, 0), high=torch.zeros(2, 0), eligible=torch.zeros(2, 0).bool())
    picks = torch.full((2, 3), -1)
    codes = name_choices(none, picks, picks >= 0, torch.tensor([True, True]), order="score")
    assert codes.tolist() == [REORDERED, REORDERED]
    assert census(none, torch.tensor([0, 0]))[1] is False
    assert census(none.take(torch.tensor([], dtype=torch.long)), torch.tensor([]).long())[0] == {
        "forced": 0,
        "excluded": 0,
        "open": 0,
        "too-open": 0,
    }
