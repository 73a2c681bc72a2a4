"""Styles of ``torch.distributed.tensor.parallel``, as ``parallelize_module`` takes them, read into entries."""

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
from shardc.plan.calls import in_order
from shardc.plan.entries import Entry
from shardc.plan.forms import quote
from shardc.plan.from_hf import pin, split_module
from shardc.plan.match import by_part, matching

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
    """The entries of path -> style, or of one style for the root.

    Weights lie as the styles say. Borders are pinned where a style asks for other than its usual output, or prepares
    one; usual ones (split features after column-wise, summed after row-wise) are left to propagation, which finds
    cheaper ones where the next module wants a split sequence.

    Args:
        model: tells linear modules from embeddings; without it a row-wise module whose input is replicated is taken
            for an embedding, and a column-wise one for linear.

    Raises:
        PlanError: a style of a class that is not one of torch's own.
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
    found = matching(glob, [name for name, _ in model.named_modules()])
    return bool(found) and all(isinstance(model.get_submodule(name), nn.Embedding) for name in found)


def _prepared_input(glob: str, style: PrepareModuleInput, axis: str) -> list[Entry]:
    pairs: dict[At, tuple[Placement | None, Placement | None]] = {}
    if style.input_layouts is not None:
        pairs.update(enumerate(zip(style.input_layouts, style.desired_input_layouts or (), strict=True)))
    for name, given in style.input_kwarg_layouts.items():
        pairs[name] = given, style.desired_input_kwarg_layouts.get(name)
    return _prepared(f"{glob}:input", axis, pairs.items())


def _prepared(
    target: str, axis: str, pairs: Iterable[tuple[At, tuple[Placement | None, Placement | None]]]
) -> list[Entry]:
    """A pin for each tensor that the style takes in hand (the first of the pair) and wants somewhere (the second)."""
    return [pin(f"{target}[{at}]", axis, wanted) for at, (given, wanted) in pairs if given and wanted]
