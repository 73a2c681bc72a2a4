"""Traces the experts of libraries as functions of one expert, between markers (`shardc.custom_ops.expert_markers`)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from shardc.custom_ops import expert_markers


def transformers_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Computes the experts of a ``transformers`` model, for every ``experts_implementation`` of its config."""
    gate, bias, turned = self.has_gate, self.has_bias, self.is_transposed
    params = [self.gate_up_proj if gate else self.up_proj, self.down_proj]
    if bias:
        params += [self.gate_up_proj_bias if gate else self.up_proj_bias, self.down_proj_bias]

    norm = dict(self.post_expert_norm.named_parameters()) if self.has_post_expert_norm else {}
    params += [weight.expand(params[0].shape[0], *weight.shape) for weight in norm.values()]  # shared by all experts

    def expert(rows: Tensor, scale: Tensor, up: Tensor, down: Tensor, *biases: Tensor) -> Tensor:
        first = F.linear(rows, up.t() if turned else up, biases[0] if bias else None)
        inner = self._apply_gate(first) if gate else self.act_fn(first)
        if self.has_post_expert_norm:
            product = F.linear(inner, down.t() if turned else down, biases[1] if bias else None)
            norm_params = dict(zip(norm, biases[2:] if bias else biases, strict=True))
            return functional_call(self.post_expert_norm, norm_params, (product,)) * scale
        # Scales the narrower `inner`, so that the result need not be saved for the gradient of the weights.
        product = F.linear((inner * scale).to(inner.dtype), down.t() if turned else down)
        return product + scale * biases[1] if bias else product

    return expert_markers.apply(expert, hidden_states, top_k_index, top_k_weights, params, scaled=True)


def _interface(self: Any, experts_implementation: str, default: Any) -> Any:
    return transformers_experts


def other_forms() -> tuple[tuple[Any, str, Any], ...]:
    """Return the patches for the experts of imported libraries: (owner, attribute name, replacement)."""
    library = sys.modules.get("transformers.integrations.moe")
    interfaces = () if library is None else ((library.ExpertsInterface, "get_interface", _interface),)
    return ((expert_markers, "apply", expert_markers.marked), *interfaces)


@contextmanager
def patched(forms: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Applies the patches ``forms``, (owner, attribute name, replacement); undoes them on exit."""
    replacements = tuple(forms)
    before = [(owner, name, vars(owner).get(name)) for owner, name, _ in replacements]
    try:
        for owner, name, function in replacements:
            setattr(owner, name, function)
        yield
    finally:
        for owner, name, original in before:
            delattr(owner, name) if original is None else setattr(owner, name, original)  # inherited methods reappear
