"""Plans that models, ``torch.distributed.tensor.parallel`` and hyper-parallel carry, read into entries.

Keys there match name by name, so their stars become globs that start with ``./``. What these plans say of how a
style reaches its layouts (hooks, local tensors, gradient reductions) needs no word here: values are global, so only
where they lie is read.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from shardc.errors import PlanError, ShardcWarning
from shardc.plan.entries import Activation, Entry, Param, Setting, Tp
from shardc.plan.forms import OnAxes, quote
from shardc.plan.match import matching
from shardc.plan.targets import activation_entries, port_entries

# What a style of a Hugging Face plan splits: ``weight`` and ``bias`` of a linear module, ``weight`` of an embedding, a
# parameter that the key names itself. None: the style is about local tensors or gradients, which need no word here.
PACKED = _StridedShard(-2, split_factor=2)
HF_STYLES: dict[str, str | None] = {
    "colwise": "colwise",
    "colwise_rep": "colwise",
    "colwise_gather_output": "colwise",
    "local_colwise": "colwise",
    "rowwise": "rowwise",
    "rowwise_rep": "rowwise",
    "rowwise_split_input": "rowwise",
    "embedding_rowwise": "rowwise",
    "local_rowwise": "rowwise",
    "packed_colwise": "packed_colwise",
    "local_packed_colwise": "packed_colwise",
    "packed_rowwise": "packed_rowwise",
    "local_packed_rowwise": "packed_rowwise",
    "grouped_gemm": "experts",
    "sequence_parallel": "sequence",
    "replicated_with_grad_allreduce": None,
    "replicate": None,
    "local": None,
    "gather": None,
    "moe_tp_experts": None,
}
HF_GATHERED = ("colwise_rep", "colwise_gather_output")


def hf_entries(model: nn.Module, axis: str) -> list[Entry]:
    """The entries of the tensor-parallel plan that a Hugging Face model carries.

    Raises:
        PlanError: the model carries none, or a style of it is unknown; the message names key and style.

    Warns:
        ShardcWarning: a key that matches nothing in this model.
    """
    carried = hf_plan(model)
    if not carried:
        raise PlanError(
            f"{type(model).__name__} carries no tensor-parallel plan",
            plan_entry="Plan.from_hf",
            fix="write one with shardc.tp(axis, colwise=[...], rowwise=[...])",
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    params = dict(model.named_parameters(remove_duplicate=False))
    entries: list[Entry] = []
    for key, style in carried.items():
        if style not in HF_STYLES:
            raise PlanError(
                f"unknown style {style!r} of {key!r} in the plan of {type(model).__name__}",
                plan_entry="Plan.from_hf",
                fix=f"known styles are {', '.join(HF_STYLES)}",
            )
        glob = _glob(key)
        kind = HF_STYLES[style]
        if found := matching(glob, params):
            entries += _split_parameter(glob, kind, params[found[0]].ndim, axis)
        elif found := matching(glob, modules):
            entries += _split_modules(glob, kind, [modules[name] for name in found], axis)
            entries += [_pin(f"{glob}:output", axis, Replicate())] if style in HF_GATHERED else []
        else:
            text = f"{key!r} ({style}) of the plan of {type(model).__name__} matches nothing in it"
            warnings.warn(str(PlanError(text, plan_entry="Plan.from_hf")), ShardcWarning, stacklevel=3)
    return entries


def hf_plan(model: nn.Module) -> dict[str, str]:
    """Key -> style: the model's own plan, and its config's base plan where the own one leaves the base model out."""
    own = dict(getattr(model, "_tp_plan", None) or {})
    prefix = getattr(model, "base_model_prefix", "")
    prefix = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    base = dict(getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {})
    if any(key.startswith(prefix) for key in own):
        return own
    return {f"{prefix}{key}": style for key, style in base.items()} | own


def _glob(key: str) -> str:
    return f"./{key}" if any(char in key for char in "*?[") else key


def _split_modules(glob: str, kind: str | None, found: list[nn.Module], axis: str) -> list[Entry]:
    if kind is None:
        return []
    if kind == "sequence":
        return [_pin(f"{glob}:{where}", axis, Shard(1)) for where in ("input", "output")]
    if kind in ("colwise", "rowwise"):
        return _linear_or_embedding(glob, kind, all(isinstance(module, nn.Embedding) for module in found), axis)
    entries = []
    for name in ("weight", "bias"):
        held = [param for module in found if isinstance(param := getattr(module, name, None), nn.Parameter)]
        if held:
            entries += _split_parameter(f"{glob}.{name}", kind, held[0].ndim, axis)
    return entries


def _linear_or_embedding(glob: str, style: str, embedding: bool, axis: str) -> list[Entry]:
    """An embedding's weight is (vocabulary, features): column-wise splits its features, row-wise its vocabulary."""
    if not embedding:
        return [Tp(axis, style, glob)]
    return [Tp(axis, "vocab", glob)] if style == "rowwise" else [Tp(axis, "rowwise", glob)]


def _split_parameter(glob: str, kind: str | None, ndim: int, axis: str) -> list[Entry]:
    """A parameter whose last two dims are (output features, input features), of experts with a dim in front."""
    output, inner = (-2, -1) if ndim > 1 else (-1, -1)
    placements: dict[str | None, Placement] = {
        "colwise": Shard(output),
        "rowwise": Shard(inner) if ndim > 1 else Replicate(),
        "packed_colwise": _StridedShard(output, split_factor=2),
        "packed_rowwise": _StridedShard(inner, split_factor=2) if ndim > 1 else Replicate(),
        "experts": Shard(0),
    }
    placement = placements.get(kind)
    return [] if placement is None or placement.is_replicate() else [Param(glob, OnAxes(((axis, placement),)))]


def _pin(target: str, axis: str, placement: Placement) -> Activation:
    return Activation(target, OnAxes(((axis, placement),)))


def style_entries(
    styles: Mapping[str, ParallelStyle] | ParallelStyle, axis: str, model: nn.Module | None
) -> list[Entry]:
    """The entries of styles that ``parallelize_module`` takes: one for the root, or path -> style.

    Raises:
        PlanError: a style of a class that is not torch's own.
    """
    entries: list[Entry] = []
    for key, style in (styles.items() if isinstance(styles, Mapping) else [("", styles)]):
        glob = _glob(key)
        found = matching(glob, dict(model.named_modules())) if model is not None else []
        embedding = bool(found) and model is not None and isinstance(model.get_submodule(found[0]), nn.Embedding)
        entries += _read_style(key, glob, style, axis, embedding if model is not None else None)
    return entries


def _read_style(key: str, glob: str, style: ParallelStyle, axis: str, embedding: bool | None) -> list[Entry]:
    kind = type(style)
    if isinstance(style, ColwiseParallel) and kind is ColwiseParallel:
        split = _linear_or_embedding(glob, "colwise", bool(embedding), axis)
        return split + _unless(style.output_layouts, (Shard(-1),), f"{glob}:output", axis)
    if isinstance(style, RowwiseParallel) and kind is RowwiseParallel:
        # A row-wise linear module takes an input that is split; one that takes it whole is an embedding.
        if embedding is None:
            embedding = style.input_layouts == (Replicate(),)
        split = _linear_or_embedding(glob, "rowwise", embedding, axis)
        return split + _unless(style.output_layouts, (Replicate(),), f"{glob}:output", axis)
    if isinstance(style, SequenceParallel) and kind is SequenceParallel:
        return [_pin(f"{glob}:{where}", axis, style.sequence_sharding[0]) for where in ("input", "output")]
    if isinstance(style, PrepareModuleInput) and kind is PrepareModuleInput:
        return _prepared_input(glob, style, axis)
    if isinstance(style, PrepareModuleOutput) and kind is PrepareModuleOutput:
        return _prepared(f"{glob}:output", axis, enumerate(zip(style.output_layouts, style.desired_output_layouts)))
    if isinstance(style, PrepareModuleInputOutput) and kind is PrepareModuleInputOutput:
        return [
            *_read_style(key, glob, style.prepare_module_input, axis, embedding),
            *_read_style(key, glob, style.prepare_module_output, axis, embedding),
        ]
    raise PlanError(
        f"unknown style {kind.__name__} of {key!r}",
        plan_entry=f"Plan.from_styles({{{quote(key)}: ...}})",
        fix="use the styles of torch.distributed.tensor.parallel, or write the layouts with Plan(activations=...)",
    )


def _unless(layouts: tuple[Placement, ...], usual: tuple[Placement, ...], target: str, axis: str) -> list[Entry]:
    """A pin where the style asks for other than its usual output, which propagation finds by itself."""
    return [] if layouts == usual else [_pin(target, axis, layouts[0])]


def _prepared_input(glob: str, style: PrepareModuleInput, axis: str) -> list[Entry]:
    at: dict[int | str, tuple[Placement | None, Placement | None]] = {}
    if style.input_layouts is not None:
        at.update(enumerate(zip(style.input_layouts, style.desired_input_layouts or (), strict=True)))
    for name, given in style.input_kwarg_layouts.items():
        at[name] = given, style.desired_input_kwarg_layouts.get(name)
    return _prepared(f"{glob}:input", axis, at.items())


def _prepared(
    target: str, axis: str, pairs: Iterable[tuple[int | str, tuple[Placement | None, Placement | None]]]
) -> list[Entry]:
    return [
        _pin(f"{target}[{index}]", axis, desired)
        for index, (given, desired) in pairs
        if given is not None and desired is not None
    ]


def sharding_plan_entries(
    plan: Mapping[str, Any] | None,
    input_plan: Mapping[str, Any] | None,
    output_plan: Mapping[str, Any] | None,
    return_local_tensor: Iterable[str] | None,
) -> list[Entry]:
    """The entries of a plan of hyper-parallel's ``shard_module``.

    Raises:
        PlanError: a key of ``input_plan`` or ``output_plan`` that does not end in ``input`` or ``output``.
    """
    entries: list[Entry] = []
    for name, value in (plan or {}).items():
        entries.append(Param(name, _freeze(value, f"plan[{quote(name)}] = {value!r}")))
    for key, value in [*(input_plan or {}).items(), *(output_plan or {}).items()]:
        module, _, where = key.rpartition(".")
        if where not in ("input", "output"):
            raise PlanError(
                f"key {key!r} ends in neither input nor output",
                plan_entry=f"Plan.from_sharding_plan({{{quote(key)}: ...}})",
                fix=f'write "{key}.input" or "{key}.output"',
            )
        if value is None:
            continue
        specs = _translate(value)
        entries += activation_entries(f"{module}:{where}", specs) if module else port_entries(f"{where}s", specs)
    return [*entries, Setting("dtensor_outputs", not list(return_local_tensor or ()))]
