"""Is the candidate apart from the original more often than the original from itself? No torch."""

from dataclasses import dataclass

ABSENT = "scipy is not installed, so there is no p-value: pip install 'indexer-equivalence[stats]'"


@dataclass(frozen=True, kw_only=True)
class McNemar:
    """The exact one-sided McNemar test of one output over pairs, one pair a layer-forward.

    A pair is discordant where one of two comparisons with the original found a difference and the
    other did not. Were the candidate another run of the original, either would be as likely.
    The test says nothing of right or wrong: no status depends on it.
    Outputs of one forward depend on each other, so each has its own test and none are pooled.

    Attributes:
        view: "slots" or "sets".
        stage: the output, or "all".
        pairs: layer-forwards in which both comparisons were made.
        only_new: pairs in which the candidate differs and the original run again does not.
        only_control: pairs in which it is the other way round.
        p: chance of so many `only_new` or more; 1 where no pair is discordant, None where it
            cannot be computed.
        note: why not.
    """

    view: str
    stage: str
    pairs: int
    only_new: int
    only_control: int
    p: float | None
    note: str = ""


def mcnemar(*, view: str, stage: str, pairs: int, only_new: int, only_control: int) -> McNemar:
    """Test one output; `scipy.stats.binomtest` of the discordant pairs against one half.

    Source: McNemar 1947, with the exact binomial tail in place of its normal approximation.
    """
    p, note = _p(only_new, only_control)
    return McNemar(
        view=view,
        stage=stage,
        pairs=pairs,
        only_new=only_new,
        only_control=only_control,
        p=p if pairs else None,
        note=note if pairs else "no pair: the original was never run again",
    )


def _p(only_new: int, only_control: int) -> tuple[float | None, str]:
    """The one-sided tail, or why there is none."""
    if not only_new + only_control:
        return 1.0, ""
    try:
        from scipy.stats import binomtest  # noqa: PLC0415 - an extra that only this needs
    except ImportError:
        return None, ABSENT
    test = binomtest(only_new, only_new + only_control, 0.5, alternative="greater")
    return float(test.pvalue), ""
