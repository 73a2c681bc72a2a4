"""Warns of side effects of forward, other than in-place changes of tensors, that a program does not have."""

from __future__ import annotations

import builtins
import contextlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from sysconfig import get_paths
from typing import Any

import torch
from torch import nn

from shardc.capture.attributes import MODEL, Change
from shardc.capture.capture_errors import line_with
from shardc.errors import CaptureError, ShardcWarning
from shardc.ir.told import calling_line


def side_effects(
    messages: Iterable[str], model: nn.Module, run: Callable[[], Any], sets: Iterable[Change] = ()
) -> list[ShardcWarning]:
    """Return a warning for each side effect that Dynamo reports; runs the model to find replaced buffers.

    Args:
        messages: the warnings.
        model: a copy of the model, whose parameters and buffers may be overwritten.
        run: calls the model once on fake tensors.
        sets: the attributes that forward sets on its modules.

    Returns:
        A warning for each module that changes its attributes or fills an empty buffer that it does not save, and for
        globals and variables around hooks.

    Raises:
        CaptureError: forward replaces a buffer by another tensor.
    """
    changed = [ref for text in messages if "side effects" in text for ref in re.findall(r'"([^"]+)"', text)]
    texts: list[str | None] = []
    if any("_buffers" in ref for ref in changed):  # in place, too: ``self.count += 1`` also sets the attribute
        for path, name, is_cache in _replaced(model, run):
            if not is_cache:
                raise CaptureError(
                    f"the model replaces the buffer {f'{path}.{name}'.lstrip('.')!r} by another tensor",
                    source=line_with(f"self.{name} = ", model) or calling_line(),
                    fix=f"change it in place, as by self.{name}.copy_(new)",
                )
            texts.append(f"{_module(path)} fills its empty buffer {name!r}")
    # Numbers and other non-tensors that a module sets on itself need no warning.
    model_changes = [change for change in sets if change.owner.startswith("model")]
    silent = {change.owner for change in model_changes} - {change.owner for change in model_changes if change.tensors}
    changed = [ref for ref in changed if ref.replace(MODEL, "model") not in silent]
    texts += [_change_text(ref) for ref in changed if "_buffers" not in ref and "_parameters" not in ref]
    text = "in forward; the compiled program does not"
    return [ShardcWarning(f"{change} {text}") for change in dict.fromkeys(texts) if change is not None]


def changed_arguments(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> list[ShardcWarning]:
    """Return a warning for each list or dict argument that the model changes; runs it once more, on fake tensors."""
    bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    containers = [(name, x, _contents(x)) for root, arg in bound.items() for name, x in _containers(arg, root)]
    if not containers:
        return []
    # The capture succeeded: an error here is of this run only.
    with _restored(model), torch.no_grad(), contextlib.suppress(Exception):
        model(*args, **kwargs)
    changed = [name for name, x, before in containers if _contents(x) != before]
    text = "in forward; the compiled program does not: return the new value instead"
    return [ShardcWarning(f"the model changes its argument {name} {text}") for name in changed]


def _containers(value: Any, name: str) -> Iterator[tuple[str, list[Any] | dict[Any, Any]]]:
    """Yields (expression, container) for ``value`` and the lists and dicts in it."""
    if isinstance(value, list | dict):
        yield name, value
    if isinstance(value, list | tuple | dict):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _containers(inner, f"{name}[{key!r}]")


def _contents(value: list[Any] | dict[Any, Any]) -> list[tuple[Any, int]]:
    """Return the keys, in order, and the ids of the values."""
    return [(key, id(x)) for key, x in (value.items() if isinstance(value, dict) else enumerate(value))]


def _replaced(model: nn.Module, run: Callable[[], Any]) -> Iterator[tuple[str, str, bool]]:
    """Yields (module path, name, is a cache) of the buffers that ``run`` replaces; restores attributes.

    A cache is a buffer that was None and is not saved.
    """
    with _restored(model) as before:
        with torch.no_grad():
            run()
        for path, (module, _, buffers) in before.items():
            for name, buffer in module._buffers.items():
                if buffer is not (had := buffers.get(name)):
                    yield path, name, had is None and name in module._non_persistent_buffers_set


@contextlib.contextmanager
def _restored(model: nn.Module) -> Iterator[dict[str, tuple[nn.Module, dict[str, Any], dict[str, Any]]]]:
    """Restores the attributes and buffers of ``model`` on exit; yields those on entry by module path."""
    before = {path: (module, dict(module.__dict__), dict(module._buffers)) for path, module in model.named_modules()}
    try:
        yield before
    finally:
        for module, attributes, buffers in before.values():
            module.__dict__.clear()
            module.__dict__.update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)


def _change_text(ref: str) -> str | None:
    """Return a warning text for a changed object, ``ref`` in Dynamo's notation (``L['self']._modules['model'].count``).

    None for globals of an installed library, which may keep a context there during a call.
    """
    if ref.startswith("G["):
        scope, _, name = ref.removeprefix("G['").partition("']")
        module = next((m for m in sys.modules if f"__import_{m.replace('.', '_dot_')}" == scope), "")
        file = getattr(sys.modules.get(module), "__file__", None) or ""
        installed = any(file.startswith(folder) for key, folder in get_paths().items() if key in ("purelib", "platlib"))
        return None if installed else f"the model changes globals of {module or scope}{name and f' ({name[1:]})'}"
    parts = re.split(r"\._(?:forward|backward)(?:_pre)?_hooks", ref)
    path = ".".join(re.findall(r"_modules\['([^']+)'\]", parts[0])[1:])
    module = _module(path)
    return f"{module} changes its attributes" if len(parts) == 1 else f"a hook of {module} changes variables around it"


def _module(path: str) -> str:
    return f"module {path!r}" if path else "the model"


def print_nothing(*values: Any, **how: Any) -> None:
    """Replaces ``print``: does nothing in a trace, prints otherwise."""
    if not torch.compiler.is_compiling():
        _print(*values, **how)


_print = print
OTHER_FORMS = ((builtins, "print", print_nothing),)


def prints(codes: Iterable[Any]) -> list[ShardcWarning]:
    """Return a warning for each traced function of the user's that prints."""
    lines = [f"{code.co_filename}:{code.co_firstlineno}" for code in codes if "print" in code.co_names]
    return [
        ShardcWarning(f"{line} prints in forward; the compiled program does not")
        for line in dict.fromkeys(lines)
        if not line.startswith(__file__)
    ]
