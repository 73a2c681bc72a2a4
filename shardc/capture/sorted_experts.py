"""Experts in the manner of torchtitan, whose rows come sorted by expert, with how many each expert gets.

Modules are known by what they hold and by all that their code reads; torchtitan itself is not imported.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardc.ir import marks

_WEIGHTS = (("w1", "w2", "w3"), ("w1_EFD", "w2_EDF", "w3_EFD"))
_COUNTS = (["num_tokens_per_expert"], ["num_tokens_per_expert_E"])
_PRODUCTS = tuple(("silu", first, other, last) for first, last, other in _WEIGHTS)
# Code that reads anything besides these may do something else, and is left as it is.
_LAYER = {
    "router", "expert_bias", "tokens_per_expert", "reorderer", "experts", "score_before_experts", "shared_experts",
}  # fmt: skip
_TENSORS = {
    "torch", "float32", "no_grad", "shape", "dtype", "add_", "view", "reshape", "expand", "gather", "to", "zeros_like",
    "scatter_add", "top_k", "zeros", "device", "bmm", "float", "squeeze", "sum", "isinstance", "DTensor", "device_mesh",
    "ndim", "mesh_dim_names", "to_local", "Partial",
}  # fmt: skip
_EXPERTS = {
    *_WEIGHTS[0], *_WEIGHTS[1], "F", "silu", "use_grouped_mm", "_run_experts_for_loop", "_run_experts_grouped_mm",
    "indices_padding_wrapper", "isinstance", "DTensor", "to_local", "device_mesh", "mesh_dim_names", "torch", "split",
    "shape", "sum", "tolist", "enumerate", "int", "matmul", "transpose", "append", "cat", "vstack", "new_zeros",
    "cumsum", "int32", "_grouped_mm", "bfloat16", "type_as",
}  # fmt: skip


def other_forms(model: nn.Module) -> tuple[tuple[Any, str, Any], ...]:
    """Where such modules of ``model`` have their code, by which name, and what stands there meanwhile."""
    found: dict[tuple[type, str], Any] = {}
    for module in model.modules():
        experts = getattr(module, "experts", None)
        if isinstance(experts, nn.Module) and _name(experts) is not None:
            if _LAYER <= _reads(type(module).forward) <= _LAYER | _TENSORS:
                found[type(module), "forward"] = _layer
        elif (name := _name(module)) is not None:
            found[type(module), name] = _of_sorted
    return tuple((*place, function) for place, function in found.items())


def _name(module: nn.Module) -> str | None:
    """The method by which ``module`` computes experts of sorted rows, if it does."""
    for name in ("forward", "_experts_forward") if _weights(module) else ():
        method = getattr(type(module), name, None)
        if inspect.isfunction(method) and list(inspect.signature(method).parameters)[2:] in _COUNTS:
            products = [products for each in _functions(method) if (products := _products(each))]
            known = bool(products) and all(names in _PRODUCTS for names in products)
            return name if known and _reads(method) <= _EXPERTS else None
    return None


def _weights(module: nn.Module) -> list[Tensor]:
    """The weights of all experts, none if ``module`` holds no such."""
    for names in _WEIGHTS:
        held = [x for name in names if isinstance(x := getattr(module, name, None), Tensor) and x.dim() == 3]
        if len(held) == len(names):
            return held
    return []


def _functions(function: Any) -> list[Any]:
    """``function``, and those of weights that it names."""
    if not inspect.isfunction(function):
        return []
    others = (function.__globals__.get(name) for name in function.__code__.co_names)
    return [function, *(x for x in others if inspect.isfunction(x) and x.__code__.co_varnames[:3] in _WEIGHTS)]


def _reads(function: Any) -> set[str]:
    """The names that are read by ``function`` and by those of weights that it names."""
    codes: list[CodeType] = [each.__code__ for each in _functions(function)]
    names: set[str] = set()
    while codes:
        code = codes.pop()
        names.update(code.co_names, code.co_freevars)
        codes += [x for x in code.co_consts if isinstance(x, CodeType)]
    return names


def _products(function: Any) -> tuple[str, ...]:
    """The order in which ``function`` applies the activation and weights, if it does."""
    used: list[str] = []
    for each in dis.get_instructions(function):
        if each.opname.startswith("LOAD_FAST"):
            loaded = each.argval if isinstance(each.argval, tuple) else (each.argval,)
            used += [name for name in loaded if name in (*_WEIGHTS[0], *_WEIGHTS[1])]
        elif each.opname.startswith("LOAD") and each.argval == "silu":
            used.append("silu")
    return tuple(used) if "silu" in used else ()


def _expert(module: Any, scaled_before: bool) -> Callable[..., Tensor]:
    """What one expert of ``module`` does with its rows: in bf16 where it computes a grouped product."""
    low = getattr(module, "use_grouped_mm", True)

    def one(rows: Tensor, scale: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        x = (rows * scale).to(rows.dtype) if scaled_before else rows
        if low:
            x, w1, w2, w3 = x.bfloat16(), w1.bfloat16(), w2.bfloat16(), w3.bfloat16()
        inner = F.silu(F.linear(x, w1)) * F.linear(x, w3)
        return F.linear(inner if scaled_before else (inner * scale).to(inner.dtype), w2).to(rows.dtype)

    return one


def _layer(self: Any, x: Tensor) -> Tensor:
    """The layer: a router, experts, and an expert that all tokens go to."""
    tokens = x.reshape(-1, x.shape[-1])
    scores, chosen, counts = self.router(tokens, self.expert_bias)
    with torch.no_grad():
        self.tokens_per_expert.add_(counts)
    one, weights = _expert(self.experts, self.score_before_experts), _weights(self.experts)
    out = marks.apply(one, tokens, chosen, scores, weights, scaled=True)
    return (out if self.shared_experts is None else self.shared_experts(tokens) + out).reshape(x.shape)


def _of_sorted(self: Any, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
    """Experts of rows sorted by expert: each row is a token that goes to one expert."""
    ends = num_tokens_per_expert.to(torch.int64).cumsum(0)
    chosen = torch.searchsorted(ends, torch.arange(x.shape[0], device=x.device), right=True).unsqueeze(1)
    weight = torch.ones(x.shape[0], 1, dtype=x.dtype, device=x.device)
    return marks.apply(_expert(self, True), x, chosen, weight, _weights(self), scaled=True)
