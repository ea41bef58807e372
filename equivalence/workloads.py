"""Workloads: the batches that a serving engine prefills, as lengths in tokens.

Real are the prompts of 8K, 60K and 200K tokens, the batch of four, the prefix hit and the chunk of
16,384 on which SGLang compared the bounded dense prefill indexer of DeepSeek-V4.1 with the one
before it, a K being 1,024, and of two-level the 2,048 blocks that a row publishes there.
Invented are the lengths of prefix-hit, repeated-text, tool-calls, mixed-decode and two-level.

Assumed is how a batch is cut: a forward takes requests in order until the chunk is full.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from equivalence import texts
from equivalence.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request of a batch, in tokens.

    Attributes:
        prompt: tokens that this batch computes; 1 is a decode row.
        prefix: tokens before them whose keys are there already.
        text: "cold", "repeated" (1,024 tokens again and again) or "tools" (turns of 2,048 tokens,
            of which the first 1,536 are the same in each).
        stream: requests of one stream and text are the same text, in the same slots.
        shared: its first tokens are those of stream 0.
    """

    prompt: int
    prefix: int = 0
    text: str = "cold"
    stream: int = 0
    shared: int = 0

    @property
    def end(self) -> int:
        """Tokens of the request once this batch is done."""
        return self.prefix + self.prompt

    def __post_init__(self) -> None:
        """Refuse what no text could be."""
        if self.text not in texts.TEXTS:
            raise UsageError(f"no text is named {self.text!r}: one of {', '.join(texts.TEXTS)}")
        if self.prompt < 1 or self.stream < 0 or not 0 <= self.shared <= self.prefix:
            raise UsageError(
                f"a request has prompt {self.prompt}, prefix {self.prefix}, shared {self.shared},"
                f" stream {self.stream}: prompt >= 1, stream >= 0, 0 <= shared <= prefix"
            )


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Batches that an engine prefills one after another.

    Attributes:
        name: how cases call it.
        steps: one tuple of requests a batch.
        chunk: tokens that one forward computes at most.
        page: columns of a stream that stand together in the cache.
        topk_blocks: blocks of 8 columns a row that the first layer of each ratio publishes for its
            others; 0 where layers know nothing of each other.
    """

    name: str
    steps: tuple[tuple[Request, ...], ...]
    chunk: int = 16_384
    page: int = 64
    topk_blocks: int = 0

    def __post_init__(self) -> None:
        """Refuse fewer blocks than none."""
        if self.topk_blocks < 0:
            raise UsageError(f"topk_blocks is {self.topk_blocks}: it is 0 or more")


SCENARIOS: Mapping[str, Scenario] = {
    name: Scenario(name=name, steps=steps)
    for name, steps in {
        "cold-8k": ((Request(prompt=8_192),),),
        "cold-60k": ((Request(prompt=61_440),),),
        "cold-200k": ((Request(prompt=204_800),),),
        "batch-4x7k": (tuple(Request(prompt=7_168, stream=i) for i in range(4)),),
        "prefix-hit": (
            (Request(prompt=28_672),),
            (
                Request(prefix=28_672, prompt=1_024),
                Request(prefix=28_672, prompt=2_048, stream=1, shared=28_672),
            ),
        ),
        "repeated-text": ((Request(prompt=32_768, text="repeated"),),),
        "tool-calls": (
            (Request(prompt=8_192, text="tools"),),
            *((Request(prefix=2_048 * i, prompt=2_048, text="tools"),) for i in range(4, 10)),
        ),
        "mixed-decode": (
            (
                Request(prefix=8_192, prompt=4_096),
                *(Request(prefix=4_096 * i, prompt=1, stream=i) for i in range(1, 9)),
            ),
        ),
    }.items()
} | {
    "two-level": Scenario(
        name="two-level",
        steps=(
            (Request(prompt=65_536, text="tools"),),
            (
                Request(prefix=65_536, prompt=2_048, text="tools"),
                Request(prefix=49_152, prompt=1_024, text="repeated", stream=1),
            ),
        ),
        topk_blocks=2_048,
    )
}


def scaled(scenario: str | Scenario, scale: int) -> Scenario:
    """The scenario with every length divided by `scale`, prompts never below one token."""
    found = scenario if isinstance(scenario, Scenario) else SCENARIOS.get(scenario)
    if found is None:
        raise UsageError(f"no scenario is named {scenario!r}: one of {', '.join(SCENARIOS)}")
    if not 1 <= scale <= found.chunk:
        raise UsageError(f"scale is {scale}; it is 1 to the chunk, {found.chunk:,}")
    steps = tuple(
        tuple(
            replace(
                request,
                prompt=max(1, request.prompt // scale),
                prefix=request.prefix // scale,
                shared=request.shared // scale,
            )
            for request in step
        )
        for step in found.steps
    )
    return replace(
        found,
        steps=steps,
        chunk=found.chunk // scale,
        page=max(1, found.page // scale),
        topk_blocks=max(min(1, found.topk_blocks), found.topk_blocks // scale),
    )


def chunks(scenario: Scenario) -> list[list[Request]]:
    """What each forward computes, in order: requests, or parts of them."""
    plan: list[list[Request]] = []
    for step in scenario.steps:
        room = 0
        for request in step:
            start = request.prefix
            while start < request.end:
                if not room:
                    plan.append([])
                    room = scenario.chunk
                part = min(room, request.end - start)
                plan[-1].append(replace(request, prefix=start, prompt=part))
                start, room = start + part, room - part
    return plan
