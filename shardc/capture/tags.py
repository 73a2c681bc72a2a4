"""Marks activations that a plan names, by identity ops in the trace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardc.capture.annotate import PREFIX


@dataclass(frozen=True)
class Tag:
    """The place of an `ops.tag` in the trace: tensor (or keyword) ``index`` of a module's input or output."""

    module: str
    where: str
    index: int | str

    @property
    def name(self) -> str:
        return f"{self.module}.{self.where}.{self.index}"


@torch.library.custom_op("shardc::tag", mutates_args=())
def mark(x: Tensor, name: str) -> Tensor:
    return x.clone()


mark.register_fake(lambda x, name: torch.empty_like(x))
mark.register_autograd(
    lambda ctx, grad: (mark(grad, ctx.name), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "name", inputs[1]),
)


@contextlib.contextmanager
def tagged(root: nn.Module, tags: Sequence[Tag]) -> Iterator[None]:
    """Passes the tagged inputs and outputs through ``shardc::tag`` by hooks; removes the hooks on exit."""
    modules = dict(root.named_modules())
    with contextlib.ExitStack() as stack:
        for tag in tags:
            module = modules[(PREFIX + tag.module).rstrip(".")]
            if tag.where == "input":
                hook = partial(_replace_inputs, tag)
                stack.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
            else:
                after = partial(_replace_output, tag)
                stack.enter_context(module.register_forward_hook(after))
        yield


def _replace_inputs(tag: Tag, _module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return (args, _replace(kwargs, tag)) if isinstance(tag.index, str) else (_replace(args, tag), kwargs)


def _replace_output(tag: Tag, _module: nn.Module, _args: Any, output: Any) -> Any:
    return _replace(output, tag)


def _replace(values: Any, tag: Tag) -> Any:
    """Return ``values`` with its ``tag.index``-th tensor (or that key) passed through the marker op ``shardc::tag``.

    A dict subclass (an output of ``transformers``) is changed in place.
    """
    if isinstance(values, Tensor):
        return mark(values, tag.name) if tag.index == 0 else values
    if not isinstance(values, (tuple, list, dict)):
        return values
    places = list(values) if isinstance(values, dict) else range(len(values))
    tensors = [at for at in places if isinstance(values[at], Tensor)]
    if isinstance(tag.index, int):
        tensors = tensors[tag.index : tag.index + 1]
    else:
        tensors = [at for at in tensors if at == tag.index]
    items = dict(values) if type(values) is dict else values if isinstance(values, dict) else list(values)
    for at in tensors:
        items[at] = mark(values[at], tag.name)
    return tuple(items) if isinstance(values, tuple) else items
