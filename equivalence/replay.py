"""Call a candidate on a case: cloned inputs, poisoned memory, and an Outcome whatever happens."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from equivalence import layout, memory, ops, plain, poisons, receipt
from equivalence.candidate import Candidate
from equivalence.case import Case
from equivalence.verdict import Memory


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a call gave.

    Attributes:
        outputs: tensors by output name; empty where the call failed.
        rule: why it failed, as a rule of a Finding, or "".
        message: the sentence for the user.
        mutated: inputs whose bytes the call changed.
        memory: what the call held; None where it failed.
        paths: the kernels that said they ran.
        rank: of ranks, the one that failed: this one, or the one for which it was ended; None
            where no single rank did.
    """

    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    rule: str = ""
    message: str = ""
    mutated: Mapping[str, Tensor] = field(default_factory=dict)
    memory: Memory | None = None
    paths: tuple[receipt.Receipt, ...] = ()
    rank: int | None = None


class _Poison(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch asks for a subclass
    """Fill what `torch.empty` and its kin hand out, so that an unwritten cell can be seen."""

    def __init__(self, which: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.which = which

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let Dynamo compile a candidate under this mode, as it would without it."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's hook
        types: Any,  # noqa: ANN401 - torch's hook
        args: Any = (),  # noqa: ANN401 - torch's hook
        kwargs: Any = None,  # noqa: ANN401 - torch's hook
    ) -> Any:  # noqa: ANN401 - torch's hook
        del types
        before = args[0].numel() if func.overloadpacket.__name__ == "resize_" else None
        out = func(*args, **(kwargs or {}))
        if before is not None and out.numel() > before and out.is_contiguous():
            poisons.fill(out.view(-1)[before:], self.which)
        if func.overloadpacket.__name__ in _EMPTY and isinstance(out, Tensor):
            poisons.fill(out, self.which)
        return out


_FAILED = ("crash", "timeout", "out-of-memory")
_EMPTY = frozenset(
    {
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
    }
)


def run(candidate: Candidate, case: Case, *, poison: int = 0) -> Outcome:
    """Call `candidate(**inputs, **params)` once; never raises.

    Args:
        candidate: returns a tensor (the op's primary output) or a mapping of outputs.
        case: held in memory; its tensors are cloned, strides kept.
        poison: which of the two poisons fills fresh memory.
    """
    inputs = {name: layout.clone(tensor) for name, tensor in case.inputs.items()}
    device = next((tensor.device for tensor in inputs.values()), None)
    with receipt.collected() as left:
        try:
            with memory.measured(device) as meter, _Poison(poison), torch.no_grad():
                result = candidate(**inputs, **case.params)
                # A kernel's own fault surfaces here and not in the judge.
                _synchronize(inputs)
        except KeyboardInterrupt:
            raise
        except (torch.cuda.OutOfMemoryError, MemoryError) as error:
            return Outcome(rule="out-of-memory", message=first_line(error))
        # Whatever a candidate raises is its outcome: sys.exit(0) too, or it would end the run well.
        except BaseException as error:  # noqa: BLE001 - for that reason
            message = f"{type(error).__name__}: {first_line(error)}{where(error)}"
            return Outcome(rule=_rule(error), message=message)
        finally:
            # The reference needs subnormals, whatever the candidate did to the processor.
            torch.set_flush_denormal(False)
    mutated = {
        name: tensor for name, tensor in inputs.items() if not _same(tensor, case.inputs[name])
    }
    try:
        named = _named(result, case, mutated)
        tensors = list(named.outputs.values())
        held = memory.bytes_of(tensors, given=inputs.values())
        taken = meter.of(held, meter.fresh(tensors))
        return replace(named, memory=taken, paths=tuple(left))
    except Exception as error:  # noqa: BLE001 - the result is the candidate's own object
        message = f"its result cannot be read: {type(error).__name__}: {first_line(error)}"
        return Outcome(rule="not-compared", message=message, mutated=mutated)


def _synchronize(inputs: Mapping[str, Tensor]) -> None:
    """Wait for the device the inputs are on."""
    for device in {tensor.device for tensor in inputs.values() if tensor.is_cuda}:
        torch.cuda.synchronize(device)


def _named(result: object, case: Case, mutated: Mapping[str, Tensor]) -> Outcome:
    """The result by output name, or the sentence why it is none."""
    op = ops.find(case.op)
    if isinstance(result, Tensor):
        result = {op.primary: result}
    known = ", ".join(op.spec.outputs)
    if not isinstance(result, Mapping):
        kind = type(result).__name__
        message = f"the candidate returned {kind}; it returns a tensor or a mapping of {known}"
        return Outcome(rule="not-compared", message=message, mutated=mutated)
    outputs: dict[str, Tensor] = {}
    for name, tensor in result.items():
        if name not in op.spec.outputs or not isinstance(tensor, Tensor):
            what = type(tensor).__name__
            message = f"the candidate returned {name!r} ({what}); {case.op} gives tensors {known}"
            return Outcome(rule="not-compared", message=plain.line(message), mutated=mutated)
        outputs[name] = plain_of(tensor)
    if not outputs:
        message = f"the candidate returned nothing; {case.op} gives {known}"
        return Outcome(rule="not-compared", message=message, mutated=mutated)
    return Outcome(outputs=outputs, mutated=mutated)


def plain_of(tensor: Tensor) -> Tensor:
    """The tensor without gradients, lazy signs or a subclass's behaviour.

    Raises:
        TypeError: it holds no values of its own, or not as strided memory.
    """
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise TypeError(f"a {tensor.layout} tensor on {tensor.device} holds no plain values")
    values = tensor.detach().as_subclass(Tensor)
    if values.is_meta or type(values) is not Tensor:
        raise TypeError(f"{type(tensor).__name__} holds no plain values")
    return values.resolve_conj().resolve_neg()


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one shape, dtype and device, so that their cells can be compared."""
    return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits."""
    if not alike(a, b):
        return False
    return all(torch.equal(x, y) for x, y in zip(layout.pieces(a), layout.pieces(b), strict=True))


def _rule(error: BaseException) -> str:
    """How a call failed: what the error itself says of that, as one of ranks does, or a crash."""
    said = vars(error).get("rule")
    return said if isinstance(said, str) and said in _FAILED else "crash"


def where(error: BaseException, *, within: Path = Path(__file__).parent) -> str:
    """The innermost line of the traceback that is not of torch or of a package, or "".

    Args:
        error: as it was raised.
        within: the folder of the package whose lines tell a user nothing.
    """
    own = (str(Path(torch.__file__).parent), str(within))
    frames = [f for f in extract_tb(error.__traceback__) if not f.filename.startswith(own)]
    return plain.line(f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})") if frames else ""


def first_line(error: BaseException) -> str:
    """The first line of what an error says, fit to print."""
    try:
        text = str(error).strip()
    except Exception:  # noqa: BLE001 - the candidate's own exception may do anything
        text = ""
    return plain.line((text.splitlines() or ["no message"])[0])
