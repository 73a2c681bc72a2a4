"""Marks values in a trace: the activations that a plan names, and the calls of experts.

Experts of libraries are traced as the function of one expert, between markers (`shardc.custom_ops.expert_markers`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from shardc._compat import PyTree
from shardc.capture.annotate import PREFIX
from shardc.custom_ops import expert_markers


@dataclass(frozen=True)
class Tag:
    """An activation that the trace marks by the op `ops.tag`: one input or output of a module.

    Args:
        module: the module's qualified name.
        where: "input" or "output" of the module.
        index: position of the tensor among these, or its keyword.
    """

    module: str
    where: str
    index: int | str

    @property
    def name(self) -> str:
        """Return the name that the op `ops.tag` gives the activation: ``module.where.index``."""
        return f"{self.module}.{self.where}.{self.index}"


@torch.library.custom_op("shardc::tag", mutates_args=())
def mark(x: Tensor, name: str) -> Tensor:
    """Returns a copy of ``x``. In a trace, a call of this op marks ``x`` as the activation ``name``."""
    return x.clone()


mark.register_fake(lambda x, name: torch.empty_like(x))
mark.register_autograd(
    lambda ctx, grad: (mark(grad, ctx.name), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "name", inputs[1]),
)


@contextlib.contextmanager
def tagged(root: nn.Module, tags: Sequence[Tag]) -> Iterator[None]:
    """Context manager in which hooks pass the module inputs and outputs in ``tags`` through the op ``shardc::tag``,
    which marks them.
    """
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


def _replace_inputs(
    tag: Tag, _module: nn.Module, args: PyTree, kwargs: dict[str, PyTree]
) -> tuple[PyTree, dict[str, PyTree]]:
    """Forward pre-hook that returns (args, kwargs) with the tagged input marked."""
    return (args, _replace(kwargs, tag)) if isinstance(tag.index, str) else (_replace(args, tag), kwargs)


def _replace_output(tag: Tag, _module: nn.Module, _args: PyTree, output: PyTree) -> PyTree:
    """Forward hook that returns the module's output with the tagged tensor marked."""
    return _replace(output, tag)


def _replace(values: PyTree, tag: Tag) -> PyTree:
    """Return ``values`` (the inputs or outputs of a module) with one tensor passed through the op ``shardc::tag``:
    number ``tag.index`` of the tensors or, if ``tag.index`` is a string, the one with this keyword.

    A dict subclass (an output of ``transformers``) is changed in place.
    """
    if isinstance(values, Tensor):
        return mark(values, tag.name) if tag.index == 0 else values
    if not isinstance(values, (tuple, list, dict)):
        return values
    places = list(values) if isinstance(values, dict) else range(len(values))
    tensors = [at for at in places if isinstance(values[at], Tensor)]
    if isinstance(tag.index, int):  # the number counts tensors only, not other arguments
        tensors = tensors[tag.index : tag.index + 1]
    else:
        tensors = [at for at in tensors if at == tag.index]
    # A copy to change, except of a dict subclass, which cannot be made again.
    items = dict(values) if type(values) is dict else values if isinstance(values, dict) else list(values)
    for at in tensors:
        items[at] = mark(values[at], tag.name)
    return tuple(items) if isinstance(values, tuple) else items


def transformers_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Computes the experts of a ``transformers`` module in a form that can be traced as the function of one expert. In
    a trace it replaces every implementation of the library.
    """
    # Transposed: weights are [in, out]. Parameters are stacked along dim 0, one slice for each expert.
    has_gate, has_bias, is_transposed = self.has_gate, self.has_bias, self.is_transposed
    params = [self.gate_up_proj if has_gate else self.up_proj, self.down_proj]
    if has_bias:
        params += [self.gate_up_proj_bias if has_gate else self.up_proj_bias, self.down_proj_bias]

    norm = dict(self.post_expert_norm.named_parameters()) if self.has_post_expert_norm else {}
    params += [weight.expand(params[0].shape[0], *weight.shape) for weight in norm.values()]  # shared by all experts

    # One expert on its ``rows`` (tokens), with ``scale``, its router weight for each row.
    def expert(rows: Tensor, scale: Tensor, up: Tensor, down: Tensor, *biases: Tensor) -> Tensor:
        first = F.linear(rows, up.t() if is_transposed else up, biases[0] if has_bias else None)
        inner = self._apply_gate(first) if has_gate else self.act_fn(first)
        if self.has_post_expert_norm:
            # The norm would undo a scale of its input: it is scaled afterwards.
            product = F.linear(inner, down.t() if is_transposed else down, biases[1] if has_bias else None)
            norm_params = dict(zip(norm, biases[2:] if has_bias else biases, strict=True))
            return functional_call(self.post_expert_norm, norm_params, (product,)) * scale
        # Scales the narrower `inner`, so that the result need not be saved for the gradient of the weights.
        product = F.linear((inner * scale).to(inner.dtype), down.t() if is_transposed else down)
        return product + scale * biases[1] if has_bias else product

    return expert_markers.apply(expert, hidden_states, top_k_index, top_k_weights, params, scaled=True)


def _interface(self: object, experts_implementation: str, default: object) -> Callable[..., Tensor]:
    """Replaces the lookup of an expert implementation in ``transformers``: return `transformers_experts` for every
    name.
    """
    return transformers_experts


def expert_patches() -> tuple[tuple[object, str, object], ...]:
    """Return the patches for the experts of imported libraries: (owner, attribute name, replacement)."""
    library = sys.modules.get("transformers.integrations.moe")
    interfaces = () if library is None else ((library.ExpertsInterface, "get_interface", _interface),)
    return ((expert_markers, "apply", expert_markers.marked), *interfaces)


@contextmanager
def patched(forms: Iterable[tuple[object, str, object]]) -> Iterator[None]:
    """Context manager in which the patches ``forms`` are applied, each as (owner, attribute name, replacement)."""
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in forms:
            stack.enter_context(patch.object(owner, name, replacement, create=True))  # not every torch has it
        yield
