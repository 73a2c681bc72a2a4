"""Checks of values that raise: a program looks at no values, and goes on as if what was checked were right."""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import TensorVariable

_JUMPS = ("POP_JUMP_IF_TRUE", "POP_JUMP_IF_FALSE", "POP_JUMP_FORWARD_IF_TRUE", "POP_JUMP_FORWARD_IF_FALSE")


@contextmanager
def without_raising() -> Iterator[None]:
    """Dynamo takes ``if <a tensor>: raise ...`` as it takes ``assert``: what follows is traced."""
    kinds = list(_below(InstructionTranslatorBase))
    before = [(kind, kind.dispatch_table) for kind in kinds]
    try:
        for kind, table in before:
            made = list(table)
            for code in (dis.opmap[name] for name in _JUMPS if name in dis.opmap):
                made[code] = _past_raises(table[code])
            kind.dispatch_table = made
        yield
    finally:
        for kind, table in before:
            kind.dispatch_table = table


def _below(kind: Any) -> Iterator[Any]:
    yield kind
    for derived in kind.__subclasses__():
        yield from _below(derived)


def _past_raises(jump: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def handler(tx: Any, instruction: Any) -> None:
        if isinstance(tx.stack[-1].realize(), TensorVariable):
            next_raises, target_raises = (
                _raises(tx.instructions, at) for at in (tx.instruction_pointer, tx.indexof[instruction.target])
            )
            if next_raises != target_raises:
                tx.pop()
                if next_raises:
                    tx.jump(instruction)
                return
        jump(tx, instruction)

    return handler


def _raises(instructions: list[Any], at: int) -> bool:
    """Whether what stands at ``at`` raises, with no jump before."""
    for instruction in instructions[at:]:
        if instruction.opname == "RAISE_VARARGS":
            return True
        if instruction.target is not None or instruction.opname.startswith("RETURN"):
            return False
    return False
