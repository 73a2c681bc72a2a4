"""Reads the tensor- and expert-parallel plan of a Hugging Face model into entries.

Of a style only the layout of the weights, and whether the output is gathered, are read. Its hooks, local tensors and
gradient reductions have no counterpart here: values are global, and the compiler inserts the communication.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from shardc._compat import StridedShard
from shardc.errors import PlanError
from shardc.plan.entries import Activation, Entry, Ep, Param, Tp
from shardc.plan.entries.entry import in_order
from shardc.plan.layout_spec import OnAxes
from shardc.plan.match import by_part, matching

# Part of a weight (output features, input features) -> the styles that split it; "" for styles that split nothing.
_BY_SPLIT = {
    "output": "colwise colwise_rep colwise_gather_output local_colwise embedding_colwise",
    "packed output": "packed_colwise local_packed_colwise",
    "input": "rowwise rowwise_rep rowwise_split_input embedding_rowwise local_rowwise",
    "packed input": "packed_rowwise local_packed_rowwise",
    "experts": "grouped_gemm ep_dispatch_experts",
    "": "sequence_parallel replicated_with_grad_allreduce replicate local gather all_reduce local_params mla_kv_a_proj "
    "moe_identity_expert moe_tp_experts",
}
HF_STYLES = {style: part for part, styles in _BY_SPLIT.items() for style in styles.split()}
GATHERED = ("colwise_rep", "colwise_gather_output")
WHERE = "Plan.from_hf(model)"


def hf_entries(model: nn.Module, axis: str) -> list[Entry]:
    """Return the plan entries for the tensor-parallel plan that a Hugging Face model defines, over ``axis``.

    Keys that match nothing are ignored: they are for other configurations of the model's class.

    Raises:
        PlanError: the model has no plan, no key of it matches, or a style is unknown.
    """
    carried, fix = hf_plan(model), "write one with shardc.tp(axis, colwise=[...], rowwise=[...])"
    if not carried:
        raise PlanError(f"{type(model).__name__} has no tensor-parallel plan", plan_entry=WHERE, fix=fix)
    # Models with experts have both plans: split the experts, not the features of each expert.
    carried |= {key: style for key, style in hf_plan(model, "ep").items() if key in carried and _of_experts(style)}
    modules = dict(model.named_modules(remove_duplicate=False))
    params = dict(model.named_parameters(remove_duplicate=False))
    entries: list[Entry] = []
    absent: list[str] = []
    for key, style in carried.items():
        if style not in HF_STYLES:
            raise PlanError(
                f"unknown style {style!r} of {key!r} in the plan of {type(model).__name__}",
                plan_entry=WHERE,
                fix=f"known styles are {', '.join(HF_STYLES)}",
            )
        glob = by_part(key)
        if named := matching(glob, params):
            entries += _of_parameter(glob, HF_STYLES[style], params[named[0]].ndim, axis)
        elif matches := [modules[name] for name in matching(glob, modules)]:
            entries += _of_modules(glob, style, matches, axis)
        else:
            absent.append(key)
    if len(absent) == len(carried):
        raise PlanError(
            f"the plan that {type(model).__name__} carries matches nothing of it: {', '.join(absent)}",
            plan_entry=WHERE,
            fix=fix,
        )
    return in_order(entries)


def ep_entries(model: nn.Module, axis: str) -> list[Entry]:
    """Return the plan entries that split the model's experts over ``axis``, as its own expert-parallel plan
    (``_ep_plan``) does.

    Raises:
        PlanError: the model has no such plan.
    """
    carried = hf_plan(model, "ep")
    modules = dict(model.named_modules(remove_duplicate=False))
    globs = [by_part(key) for key, style in carried.items() if _of_experts(style)]
    candidates = dict.fromkeys(glob if matching(glob, modules) else glob.rpartition(".")[0] for glob in globs)
    entries: list[Entry] = [Ep(axis, glob) for glob in candidates if matching(glob, modules)]
    if not entries:
        raise PlanError(
            f"{type(model).__name__} has no expert-parallel plan",
            plan_entry=WHERE,
            fix=f'write shardc.ep({axis!r}, "*.experts"), with a glob of the modules that hold the experts',
        )
    return entries


def _of_experts(style: str) -> bool:
    """Return whether the Hugging Face style ``style`` splits the experts of a module."""
    return HF_STYLES.get(style) == "experts"


def hf_plan(model: nn.Module, kind: str = "tp") -> dict[str, str]:
    """Return the model's own plan of this ``kind`` ("tp" or "ep"): key (module or parameter pattern) -> style. The plan
    in its config, for the base model, is included unless the model's plan already has such keys.
    """
    model_plan = dict(getattr(model, f"_{kind}_plan", None) or {})
    prefix = getattr(model, "base_model_prefix", "")
    prefix = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    if any(key.startswith(prefix) for key in model_plan):
        return model_plan
    base = getattr(getattr(model, "config", None), f"base_model_{kind}_plan", None) or {}
    return {f"{prefix}{key}": style for key, style in base.items()} | model_plan


def _of_modules(glob: str, style: str, modules: Sequence[nn.Module], axis: str) -> list[Entry]:
    """Return the plan entries that shard ``modules`` by one Hugging Face style, such as "colwise". ``glob`` matches
    these modules.
    """
    if style == "sequence_parallel":
        return [pin(f"{glob}:{where}", axis, Shard(1)) for where in ("input", "output")]
    gathered: list[Entry] = [pin(f"{glob}:output", axis, Replicate())] if style in GATHERED else []
    splits = HF_STYLES[style]
    if splits in ("output", "input") and any(_parameter(module, "weight") is not None for module in modules):
        embedding = all(isinstance(module, nn.Embedding) for module in modules)
        return [*split_module(glob, splits, embedding, axis), *gathered]
    entries: list[Entry] = []
    for name in ("weight", "bias"):
        params = [param for module in modules if (param := _parameter(module, name)) is not None]
        if params:
            entries += _of_parameter(f"{glob}.{name}", splits, params[0].ndim, axis)
    return entries + gathered


def _parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    """Return the parameter ``name`` of ``module``; None if it has none."""
    param = getattr(module, name, None)
    return param if isinstance(param, nn.Parameter) else None


def split_module(glob: str, splits: str, embedding: bool, axis: str) -> list[Entry]:
    """Return the entries that split the "output" or "input" features (``splits``) of linear modules or embeddings.

    An embedding's weight is (vocabulary, features): the vocabulary counts as input, the features as output.
    """
    if not embedding:
        return [Tp(axis, "colwise" if splits == "output" else "rowwise", glob)]
    if splits == "input":
        return [Tp(axis, "vocab", glob)]
    return [Param(f"{glob}.weight", OnAxes(((axis, Shard(1)),)))]


def _of_parameter(glob: str, splits: str, ndim: int, axis: str) -> list[Entry]:
    """Return a list with the entry that splits the parameters of ``glob`` over ``axis``; [] if they are not split.

    Args:
        splits: the dim, as in `HF_STYLES`.
        ndim: number of dims of the parameters: ([experts,] output, input), or (output,) for a bias.
    """
    placements: dict[str, Placement] = {"experts": Shard(0)}
    output = ndim - 2 if ndim > 1 else 0
    placements |= {"output": Shard(output), "packed output": StridedShard(output, split_factor=2)}
    if ndim > 1:
        placements |= {"input": Shard(ndim - 1), "packed input": StridedShard(ndim - 1, split_factor=2)}
    return [Param(glob, OnAxes(((axis, placements[splits]),)))] if splits in placements else []


def pin(target: str, axis: str, placement: Placement) -> Activation:
    """Return the entry that gives the activation ``target`` the DTensor ``placement`` on ``axis``."""
    return Activation(target, OnAxes(((axis, placement),)))
