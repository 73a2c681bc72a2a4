"""What a model's forward changes besides tensors in place, which a compiled program does not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from shardc.errors import CaptureError, ShardcWarning


def side_effects(messages: Iterable[str], model: nn.Module, run: Callable[[], Any]) -> list[ShardcWarning]:
    """From Dynamo's warnings, and where they leave it open from running the model.

    Args:
        messages: the warnings.
        model: the model, with parameters and buffers that may be lost.
        run: runs it once on fake tensors.

    Returns:
        A warning for each module that changes its attributes.

    Raises:
        CaptureError: it puts another tensor in the place of a buffer.
    """
    changed = [ref for text in messages if "side effects" in text for ref in re.findall(r'"([^"]+)"', text)]
    if any("_buffers" in ref for ref in changed):  # in place, too: ``self.count += 1`` also sets the attribute
        for name in _replaced(model, run):
            raise CaptureError(
                f"the model puts another tensor in the place of the buffer {name!r}",
                fix=f"change it in place, as by self.{name.rpartition('.')[2]}.copy_(new)",
            )
    own = [ref for ref in changed if ref.startswith("L[")]  # others are globals, as of a library that keeps a context
    attributes = [ref for ref in own if "_buffers" not in ref and "_parameters" not in ref]
    text = "changes its attributes in forward; the compiled program leaves them as they are"
    return [ShardcWarning(f"{name} {text}") for name in dict.fromkeys(map(_module, attributes))]


def _replaced(model: nn.Module, run: Callable[[], Any]) -> Iterator[str]:
    """Names of the buffers in whose place ``run`` puts other tensors; attributes are put back."""
    before = {path: (module, dict(module.__dict__), dict(module._buffers)) for path, module in model.named_modules()}
    try:
        with torch.no_grad():
            run()
        for path, (module, _, buffers) in before.items():
            for name, buffer in module._buffers.items():
                if buffer is not buffers.get(name):
                    yield f"{path}.{name}".lstrip(".")
    finally:
        for module, attributes, buffers in before.values():
            module.__dict__.clear()
            module.__dict__.update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)


def _module(ref: str) -> str:
    """The module of an expression such as ``L['self']._modules['model']._modules['sub'].count``."""
    path = ".".join(re.findall(r"_modules\['([^']+)'\]", ref)[1:])
    return f"module {path!r}" if path else "the model"
