"""Reads styles of ``torch.distributed.tensor.parallel``, as ``parallelize_module`` takes them, into entries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.placement_types import Placement

from shardc.errors import PlanError
from shardc.plan.constructor_calls import in_order
from shardc.plan.entries import Entry
from shardc.plan.from_hf import pin, split_module
from shardc.plan.match import by_part, matching
from shardc.plan.spec_forms import quote

At = int | str
KNOWN = (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    PrepareModuleInputOutput,
)


def style_entries(
    styles: Mapping[str, ParallelStyle] | ParallelStyle, axis: str, model: nn.Module | None
) -> list[Entry]:
    """Return the entries of path -> style, or of one style for the root.

    Weights get the layouts of the styles. Inputs and outputs are pinned only if a style asks for another output than
    its default, or prepares them. Default outputs (split features after column-wise, a sum after row-wise) are left to
    propagation, which may find cheaper layouts if the next module needs a split sequence.

    Args:
        model: distinguishes linear modules and embeddings. Without it a row-wise module with a replicated input counts
            as an embedding, and a column-wise one as linear.

    Raises:
        PlanError: a style is of a class that is not torch's own.
    """
    entries: list[Entry] = []
    for key, style in styles.items() if isinstance(styles, Mapping) else [("", styles)]:
        if type(style) not in KNOWN:
            raise PlanError(
                f"unknown style {type(style).__name__} of {key!r}",
                plan_entry=f"Plan.from_styles({{{quote(key)}: ...}})",
                fix="use the styles of torch.distributed.tensor.parallel, or write layouts with Plan(activations=...)",
            )
        entries += _read(by_part(key), style, axis, model)
    return in_order(entries)


def _read(glob: str, style: ParallelStyle, axis: str, model: nn.Module | None) -> list[Entry]:
    match style:
        case ColwiseParallel():
            embedding = model is not None and _embeddings(glob, model)
            usual = style.output_layouts == (Shard(-1),)
            split = split_module(glob, "output", embedding, axis)
            return split if usual else [*split, pin(f"{glob}:output", axis, style.output_layouts[0])]
        case RowwiseParallel():
            whole = style.input_layouts == (Replicate(),)
            split = split_module(glob, "input", whole if model is None else _embeddings(glob, model), axis)
            usual = style.output_layouts == (Replicate(),)
            return split if usual else [*split, pin(f"{glob}:output", axis, style.output_layouts[0])]
        case SequenceParallel():
            return [pin(f"{glob}:{where}", axis, style.sequence_sharding[0]) for where in ("input", "output")]
        case PrepareModuleInput():
            return _prepared_input(glob, style, axis)
        case PrepareModuleOutput():
            pairs = zip(style.output_layouts, style.desired_output_layouts, strict=True)
            return _prepared(f"{glob}:output", axis, enumerate(pairs))
        case PrepareModuleInputOutput():
            prepared = style.prepare_module_output
            return [*_prepared_input(glob, style.prepare_module_input, axis), *_read(glob, prepared, axis, model)]
    raise AssertionError(f"{style} is in KNOWN and is not read")


def _embeddings(glob: str, model: nn.Module) -> bool:
    names = matching(glob, [name for name, _ in model.named_modules()])
    return bool(names) and all(isinstance(model.get_submodule(name), nn.Embedding) for name in names)


def _prepared_input(glob: str, style: PrepareModuleInput, axis: str) -> list[Entry]:
    pairs: dict[At, tuple[Placement | None, Placement | None]] = {}
    if style.input_layouts is not None:
        pairs.update(enumerate(zip(style.input_layouts, style.desired_input_layouts or (), strict=True)))
    for name, layout in style.input_kwarg_layouts.items():
        pairs[name] = layout, style.desired_input_kwarg_layouts.get(name)
    return _prepared(f"{glob}:input", axis, pairs.items())


def _prepared(
    target: str, axis: str, pairs: Iterable[tuple[At, tuple[Placement | None, Placement | None]]]
) -> list[Entry]:
    """Return a pin for each tensor for which the style gives a current (first) and a desired placement (second)."""
    return [pin(f"{target}[{at}]", axis, wanted) for at, (current, wanted) in pairs if current and wanted]
