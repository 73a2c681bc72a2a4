"""Refuses hooks that a trace would leave out, or run twice."""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch import nn

from shardc.errors import CaptureError
from shardc.ir.reads import BACKWARD_HOOKS, global_hooks

_BACKWARD_FIX = (
    "register a forward hook that registers one on the output instead, which is traced: module.register_forward_hook("
    "lambda module, args, output: output.register_hook(...)); or one on a parameter of the compiled module"
)


def refuse_hooks(model: nn.Module) -> None:
    """Raises CaptureError for backward hooks of modules and for global hooks; forward hooks are traced."""
    for path, module in model.named_modules():
        for kind in BACKWARD_HOOKS:
            for hook in getattr(module, kind).values():
                what = f"module {path!r}" if path else type(model).__name__
                message = f"{what} has the backward hook {_named(hook)}, which a compiled program cannot run"
                raise CaptureError(message, source=_line(hook), fix=_BACKWARD_FIX)
    for hook in chain.from_iterable(hooks.values() for hooks in global_hooks()):
        raise CaptureError(
            f"the hook {_named(hook)} is registered for all modules, which a compiled program cannot run",
            source=_line(hook),
            fix="register it on the modules that it is for (module.register_forward_hook), or remove it",
        )


def _named(hook: Any) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__)


def _line(hook: Any) -> str | None:
    code = getattr(hook, "__code__", None)
    return code and f"{code.co_filename}:{code.co_firstlineno}"
