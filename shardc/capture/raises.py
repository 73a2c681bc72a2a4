"""Leaves checks of tensors' values (``if <tensor>: raise``) out of a trace, with a warning, because a program reads no
values.
"""

from __future__ import annotations

import dis
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._dynamo.bytecode_transformation import Instruction
from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase
from torch._dynamo.variables import TensorVariable
from torch.distributions import constraints, kl

from shardc.capture.capture_errors import user_frame
from shardc.errors import ShardcWarning

_JUMPS = ("POP_JUMP_IF_TRUE", "POP_JUMP_IF_FALSE", "POP_JUMP_FORWARD_IF_TRUE", "POP_JUMP_FORWARD_IF_FALSE")

Jump = Callable[[Any, Any], None]  # handles (translator, instruction)


@contextmanager
def without_raising() -> Iterator[None]:
    """Context manager in which Dynamo leaves out ``if <tensor>: raise ...``, with a warning, where it would otherwise
    stop.
    """
    # Each class of Dynamo's translators has a table: opcode -> handler.
    tables = [(kind, list(kind.dispatch_table)) for kind in subclasses(InstructionTranslatorBase)]
    with ExitStack() as stack:
        for kind, handlers in tables:
            for code in (dis.opmap[name] for name in _JUMPS if name in dis.opmap):
                handlers[code] = _leaving_out_raises(handlers[code])
            stack.enter_context(patch.object(kind, "dispatch_table", handlers))
        yield


def subclasses(kind: Any) -> Iterator[Any]:
    """Yields the class ``kind`` and all its subclasses."""
    yield kind
    for derived in kind.__subclasses__():
        yield from subclasses(derived)


def _leaving_out_raises(jump: Jump) -> Jump:
    """Wrap ``jump``, Dynamo's handler of a conditional jump. The returned handler skips a branch on a tensor if one
    side of it does nothing but raise.
    """

    def handler(tx: Any, instruction: Any) -> None:
        if isinstance(tx.stack[-1].realize(), TensorVariable):
            # The two sides of the branch: the next instruction, and the target of the jump.
            next_raises, target_raises = (
                _raises(tx.instructions, at) for at in (tx.instruction_pointer, tx.indexof[instruction.target])
            )
            if next_raises != target_raises:
                # Drops the condition; the trace goes on at the side that does not raise.
                tx.pop()
                warnings.warn(ShardcWarning(_left_out(tx)), stacklevel=2)
                if next_raises:
                    tx.jump(instruction)
                return
        jump(tx, instruction)

    return handler


def _left_out(tx: InstructionTranslatorBase) -> str:
    """Return the warning text for the check that Dynamo is about to leave out, with the user's line."""
    callers = [f"{tx.f_code.co_filename}:{tx.lineno}"]
    while tx.parent is not None:
        tx = tx.parent
        callers.insert(0, f"{tx.f_code.co_filename}:{tx.lineno}")
    place = user_frame(callers) or callers[-1]
    return f"{place} raises where values are wrong; the compiled program looks at no values there and goes on"


def _raises(instructions: list[Instruction], at: int) -> bool:
    """Return whether the ``instructions`` from index ``at`` on reach a ``raise`` before any jump or return."""
    for instruction in instructions[at:]:
        if instruction.opname == "RAISE_VARARGS":
            return True
        if instruction.target is not None or instruction.opname.startswith("RETURN"):
            return False
    return False


_item = TensorVariable.method_item
# What code may do with a number between taking it out of a tensor and a check of it.
_COMPARES = ("LOAD_", "COMPARE_OP", "UNARY_", "BINARY_OP", "TO_BOOL", "PUSH_NULL", "PRECALL", "CALL", "CACHE", "NOP")


def _item_to_check(self: TensorVariable, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``Tensor.item`` in a trace: if the number is used for nothing but a check that raises, return the tensor
    itself, whose check is then left out.
    """
    tx: Any = InstructionTranslator.current_tx().output.current_tx
    at = tx.instruction_pointer  # of the instruction behind the call
    call = tx.instructions[max(0, at - 4) : at]  # from the load of ``item`` on; ``bool`` and ``float`` load none
    is_named = any(x.argval == "item" for x in call)
    for instruction in tx.instructions[at:] if is_named else ():
        if instruction.opname in _JUMPS:
            sides = (tx.indexof[instruction] + 1, tx.indexof[instruction.target])
            if _raises(tx.instructions, sides[0]) != _raises(tx.instructions, sides[1]):
                return self.call_method(tx, "detach", [], {})
        if not instruction.opname.startswith(_COMPARES):
            break
    return _item(self, *args, **kwargs)


# torch's checking functions, in a form that `without_raising` leaves out if they read values.


def _assert(condition: object, message: object = None) -> None:
    """Replaces `torch._assert` in a trace: raises an AssertionError unless ``condition`` holds."""
    if not condition:
        raise AssertionError(message)


def _check_tensor_all(cond: Tensor, message: object = None) -> None:
    """Replaces `torch._check_tensor_all` in a trace: raises a RuntimeError unless all elements of ``cond`` are true."""
    if not cond.all():
        raise RuntimeError(message)


def _check_tensor_all_with(error_type: type[Exception], cond: Tensor, message: object = None) -> None:
    """Replaces `torch._check_tensor_all_with` in a trace: raises an ``error_type`` unless all elements of ``cond`` are
    true.
    """
    if not cond.all():
        raise error_type(message)


def _is_dependent(constraint: object) -> bool:
    """Return whether a constraint on a parameter of a distribution depends on the distribution's other parameters."""
    return isinstance(constraint, constraints._Dependent)


def _is_symmetric(self: object, value: Tensor) -> Tensor:
    """Return, for each matrix in ``value``, whether it is symmetric. Replaces the check of torch's constraint of that
    name.
    """
    return torch.isclose(value, value.mT, atol=1e-6).all(-2).all(-1)


def _is_positive_definite(self: object, value: Tensor) -> Tensor:
    """Return, for each matrix in ``value``, whether it is positive definite. Replaces the check of torch's constraint
    of that name.
    """
    return _is_symmetric(self, value) & torch.linalg.cholesky_ex(value).info.eq(0)


def fill_kl_cache() -> None:
    """Fills torch's cache of KL divergence functions. torch itself fills it at first use, which cannot be traced."""
    pairs = {*kl._KL_REGISTRY, *((kind, kind) for kind in subclasses(torch.distributions.Distribution))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for pair in pairs - kl._KL_MEMOIZE.keys():
            kl._KL_MEMOIZE[pair] = kl._dispatch_kl(*pair)


OTHER_FORMS = (
    # torch's own forms branch on values.
    (constraints._Symmetric, "check", _is_symmetric),
    (constraints._PositiveDefinite, "check", _is_positive_definite),
    (constraints, "is_dependent", _is_dependent),  # on Dynamo's list of functions that it does not trace
    (TensorVariable, "method_item", _item_to_check),
    (torch, "_assert", _assert),
    (torch, "_assert_async", _assert),
    (torch, "_check_tensor_all", _check_tensor_all),
    (torch, "_check_tensor_all_with", _check_tensor_all_with),
)
