"""Layers in sequence that share one published mask, from their inputs to their picks.

A *source* scores all that a row sees and publishes a mask, *consumers* after it pick inside that
mask, a *reuse* layer has the picks of an earlier one, and a *full* layer takes no part.
Late layers have the tail rows of each request and no others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor

from refimpl import forms, geometry, layer, masks

Role = Literal["full", "source", "consumer", "reuse"]
PICKS = ("raw_indices", "ragged_indices", "page_indices")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer of a sequence.

    Attributes:
        role: as above.
        ratio: tokens a key column stands for.
        topk: picks a row.
        topk_blocks: blocks a row publishes, of a source.
        of: number of the layer whose picks a reuse layer has.
        late: whether it has tail rows alone; so have all layers after it.
    """

    role: Role
    topk: int
    ratio: int = 1
    topk_blocks: int | None = None
    of: int | None = None
    late: bool = False


def run(
    *,
    layers: Sequence[Layer],
    inputs: Sequence[Mapping[str, Any]],
    extend_lens: Tensor,
    seq_lens: Tensor,
    form: forms.Form = "bool",
    publish: Literal["all", "tail"] = "all",
    tail: int = masks.TAIL,
    **rule: Any,  # noqa: ANN401 - freedoms of selection.select, passed on by name
) -> list[dict[str, Tensor]]:
    """A prefill batch through every layer.

    Args:
        layers: in order.
        inputs: of each layer what `layer.prefill_indexer` takes beside windows, row_to_request,
            topk and masks; q and weights of a late layer have the tail rows. Those of a reuse
            layer are not read.
        extend_lens: new rows of each request, int [B].
        seq_lens: tokens of each request with the new ones, int [B].
        form: of the published mask.
        publish: `tail` publishes the tail rows alone, where only late layers use the mask.
        tail: rows of a request that go on to late layers.
        rule: what else `layer.prefill_indexer` takes, of every layer.

    Returns:
        Of each layer logits, raw_indices and what else its inputs lead to, of a source mask or
        block_ids too; of a reuse layer the picks alone.

    Raises:
        ValueError: the layers do not follow from one another, or what a layer raises.
    """
    check(layers=layers, inputs=inputs, publish=publish)
    wanted = masks.tail_rows(extend_lens=extend_lens, tail=tail)

    def step(number: int, given: dict[str, Any]) -> dict[str, Tensor]:
        one = layers[number]
        windows = geometry.ragged_windows(
            extend_lens=extend_lens, seq_lens=seq_lens, ratio=one.ratio
        )
        start, end, owner = (x[wanted] for x in windows) if one.late else windows
        return layer.prefill_indexer(
            **inputs[number],
            row_start=start,
            row_end=end,
            row_to_request=owner,
            topk=one.topk,
            **given,
            **rule,
        )

    return _run(layers, step, form, wanted, tail_alone=publish == "tail")


def run_decode(
    *,
    layers: Sequence[Layer],
    inputs: Sequence[Mapping[str, Any]],
    positions: Tensor,
    form: forms.Form = "bool",
    **rule: Any,  # noqa: ANN401 - freedoms of selection.select, passed on by name
) -> list[dict[str, Tensor]]:
    """A decode batch through every layer: `run` with paged keys; late layers have all rows too.

    Args:
        layers: as in `run`.
        inputs: of each layer what `layer.decode_indexer` takes beside context_lens, topk and masks.
        positions: of each query token in its request, int [B, next_n].
        form: as in `run`.
        rule: what else `layer.decode_indexer` takes, of every layer.
    """
    check(layers=layers, inputs=inputs)

    def step(number: int, given: dict[str, Any]) -> dict[str, Tensor]:
        one = layers[number]
        lengths = geometry.compressed_lengths(positions=positions, ratio=one.ratio)
        return layer.decode_indexer(
            **inputs[number], context_lens=lengths, topk=one.topk, **given, **rule
        )

    return _run(layers, step, form, None, tail_alone=False)


def check(
    *, layers: Sequence[Layer], inputs: Sequence[Mapping[str, Any]], publish: str = "all"
) -> None:
    """Refuse layers that do not follow from one another.

    Raises:
        ValueError: in one sentence that names the layer.
    """
    if len(layers) != len(inputs):
        raise ValueError(f"there are {len(layers)} layers and inputs of {len(inputs)}")
    if publish not in {"all", "tail"}:
        raise ValueError(f"publish is {publish!r}: it is 'all' or 'tail'")
    source: int | None = None
    for number, one in enumerate(layers):
        name = f"layer {number}"
        if one.role not in get_args(Role):
            raise ValueError(f"{name} is {one.role!r}: a layer is {', '.join(get_args(Role))}")
        if (one.topk_blocks is None) is (one.role == "source"):
            raise ValueError(f"{name} is {one.role} with topk_blocks {one.topk_blocks}")
        if number and layers[number - 1].late and not one.late:
            raise ValueError(f"{name} has all rows: layer {number - 1} has tail rows alone")
        if one.role == "source":
            source = number
        elif one.role == "consumer":
            _expect_source(layers, number, source, publish)
        elif one.role == "reuse":
            _expect_earlier(layers, number)


def _expect_source(layers: Sequence[Layer], number: int, source: int | None, publish: str) -> None:
    one, name = layers[number], f"layer {number}"
    if source is None:
        raise ValueError(f"{name} is a consumer: no layer before it publishes a mask")
    if layers[source].ratio != one.ratio:
        raise ValueError(
            f"{name} has ratio {one.ratio}: layer {source} publishes columns of ratio "
            f"{layers[source].ratio}"
        )
    if publish == "tail" and not one.late:
        raise ValueError(f"{name} has all rows: layer {source} publishes tail rows alone")


def _expect_earlier(layers: Sequence[Layer], number: int) -> None:
    one, of = layers[number], layers[number].of
    if of is None or not 0 <= of < number:
        raise ValueError(f"layer {number} reuses layer {of}: it reuses one before it")
    if (layers[of].ratio, layers[of].topk) != (one.ratio, one.topk):
        raise ValueError(
            f"layer {number} has ratio {one.ratio} and topk {one.topk}: layer {of}, which it "
            f"reuses, has {layers[of].ratio} and {layers[of].topk}"
        )


def _run(
    layers: Sequence[Layer],
    step: Callable[[int, dict[str, Any]], dict[str, Tensor]],
    form: forms.Form,
    tail: Tensor | None,
    *,
    tail_alone: bool,
) -> list[dict[str, Tensor]]:
    told: list[dict[str, Tensor]] = []
    mask: dict[str, Tensor] = {}
    cut = False  # whether the mask has tail rows alone
    for number, one in enumerate(layers):
        late = one.late and tail is not None
        if one.of is not None and one.role == "reuse":
            picks = {name: told[one.of][name] for name in PICKS if name in told[one.of]}
            told.append(_rows(picks, tail if late and not layers[one.of].late else None))
            continue
        given: dict[str, Any] = {}
        if one.role == "source":
            given = {"topk_blocks": one.topk_blocks, "form": form}
            if tail_alone and not late:
                given["rows"] = tail
        elif one.role == "consumer":
            given = dict(_rows(mask, tail if late and not cut else None))
        told.append(step(number, given))
        if one.role == "source":
            mask = {name: told[-1][name] for name in ("mask", "block_ids") if name in told[-1]}
            cut = late or tail_alone
    return told


def _rows(tensors: Mapping[str, Tensor], rows: Tensor | None) -> dict[str, Tensor]:
    return dict(tensors) if rows is None else {n: t[rows] for n, t in tensors.items()}
