"""Inputs of a call: cutting shards out of global tensors, checks of local ones, resharding of DTensors."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardc._compat import FakeTensor, PyTree
from shardc.errors import InputError
from shardc.ir.kinds import why_refused
from shardc.ir.layout import Layout
from shardc.ir.placements import to_placements
from shardc.runtime.read_only import ReadOnly
from shardc.runtime.storage import shard_tensor

WAYS_OUT = (
    "pass this rank's shard, as module.shard_inputs(*global_inputs) cuts it, "
    "or compile for another global size with module.lower(*examples) at global shapes"
)


def shard_input(whole: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """Cuts the shard of ``rank`` out of the global input ``whole``. Returns a contiguous copy with the same
    ``requires_grad``.

    Gradients do not flow back to ``whole``.

    Raises:
        InputError: ``whole`` does not have the layout's global shape.
    """
    if tuple(whole.shape) != layout.shape:
        raise InputError(
            f"a global input has shape {list(whole.shape)}; the plan lays out {layout}",
            fix="pass a tensor of that global shape, or lower the module for this one",
        )
    shard = shard_tensor(whole, layout, rank)
    return shard.requires_grad_(whole.requires_grad)


def local_input(x: torch.Tensor, layout: Layout, device_mesh: DeviceMesh) -> torch.Tensor:
    """Returns the local tensor of input ``x``, contiguous; a DTensor is first resharded to ``layout``, on the same
    mesh.
    """
    if isinstance(x, ReadOnly):
        # A plain tensor, as programs take; reading the output checks that it is not outdated.
        return x.clone()
    if not isinstance(x, DTensor):
        return in_order(x)
    if x.device_mesh != device_mesh:
        raise InputError(
            f"a DTensor input of shape {list(x.shape)} is on {x.device_mesh}, the module on {device_mesh}",
            fix="pass a DTensor on the module's mesh, or its local tensor",
        )
    if tuple(x.shape) != layout.shape:
        raise InputError(
            f"a DTensor input has global shape {list(x.shape)}, expected {list(layout.shape)}", fix=WAYS_OUT
        )
    return in_order(x.redistribute(placements=to_placements(layout)).to_local())


def in_order(x: torch.Tensor) -> torch.Tensor:
    """Returns ``x`` contiguous, with its conjugation and negation bits resolved, as compiled code needs it."""
    return x.resolve_neg().resolve_conj().contiguous()


def local_part(x: torch.Tensor) -> torch.Tensor:
    """Returns the local tensor of a DTensor; other tensors as they are."""
    return x._local_tensor if isinstance(x, DTensor) else x


def check_inputs(
    names: Sequence[str],
    tensors: Sequence[torch.Tensor],
    layouts: Sequence[Layout],
    dtypes: Sequence[torch.dtype] | None = None,
) -> None:
    """Raises InputError unless each tensor has the local shape of its layout (a DTensor: the global shape) and its
    dtype in ``dtypes``.
    """
    if not len(names) == len(tensors) == len(layouts):
        raise InputError(f"{len(tensors)} tensor inputs ({', '.join(names)}), expected {len(layouts)}")
    wrong, fix = [], "pass it in that dtype, or lower the module for this one too"
    for at, (name, x, layout) in enumerate(zip(names, tensors, layouts, strict=True)):
        expected = layout.shape if isinstance(x, DTensor) else layout.local_shape
        if tuple(x.shape) != expected:
            wrong.append(_wrong_shape(name, x, layout))
            fix = WAYS_OUT
        elif dtypes is not None and x.dtype != dtypes[at]:
            wrong.append(f"input {name!r} is {x.dtype}, expected {dtypes[at]}")
    if wrong:
        raise InputError("; ".join(wrong), fix=fix)


def check_kinds(names: Sequence[str], leaves: Sequence[object], values: bool) -> None:
    """Raises InputError if a tensor among ``leaves`` is of a class or memory layout that programs do not take, or has
    no values.

    Args:
        values: whether the call needs values, so that tensors on meta and fake tensors are refused.
    """
    for name, x in zip(names, leaves, strict=True):
        if not isinstance(x, torch.Tensor):
            continue
        if refused := why_refused(x):
            what, instead = refused
            raise InputError(f"input {name!r} is {what}", fix=f"pass {instead.format(name)}")
        if values and (x.device.type == "meta" or isinstance(x, FakeTensor)):
            kind = "on meta" if x.device.type == "meta" else "a fake tensor"
            raise InputError(f"input {name!r} is {kind}, without values", fix="pass a tensor with values")


def check_constants(names: Sequence[str], values: Sequence[object], captured: Sequence[object]) -> None:
    """Raises InputError if an argument that is not a tensor has another value than at capture, which is compiled into
    the program.
    """
    for name, value, constant in zip(names, values, captured, strict=True):
        if type(value) is not type(constant) or value != constant:
            raise InputError(
                f"input {name!r} is {value!r}; the program was captured with {constant!r}, which is part of it",
                fix="pass the captured value, lower the module for this one too, or pass it as a tensor",
            )


def _wrong_shape(name: str, x: torch.Tensor, layout: Layout) -> str:
    """Returns the error text for input ``name``, whose shape does not fit ``layout``. The text has the actual and the
    expected shape.
    """
    shape = tuple(x.shape)
    expected = f"expected local shape {list(layout.local_shape)} (global {list(layout.shape)}, layout {layout})"
    if isinstance(x, DTensor):
        return f"DTensor input {name!r} has global shape {list(shape)}; {expected}"
    hint = ", which is the whole global input" if shape == layout.shape else ""
    return f"input {name!r} has local shape {list(shape)}{hint}; {expected}"


def takes_loss(model: nn.Module, args: Sequence[PyTree], kwargs: dict[str, PyTree], loss_args: int | None) -> bool:
    """Whether the last ``loss_args`` positional arguments of a call belong to the loss, as ``model.forward`` takes
    the call without them.

    False if ``forward`` takes all arguments; InputError if it takes neither. ``loss_args`` is None without a loss.
    """
    model_args = len(args) - (loss_args or 0)
    if loss_args is not None and model_args >= 0 and _refuses(model, args[:model_args], kwargs) is None:
        return True
    reason = _refuses(model, args, kwargs)
    if reason is None:
        return False
    takes = f"{type(model).__name__}.forward{inspect.signature(model.forward)}"
    after = f", and after these {loss_args} for the loss, by position" if loss_args else ""
    raise InputError(f"{takes}: {reason}", fix=f"pass what forward takes{after}")


def targets_last(
    model: nn.Module, args: Sequence[PyTree], kwargs: dict[str, PyTree], targets: Sequence[str]
) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
    """Returns ``(args, kwargs)`` with the loss's ``targets`` moved from the keywords to the end of the positionals.

    Nothing moves unless all targets are keywords, or if ``forward`` has a parameter of a target's name: then the model
    takes them itself.
    """
    accepts_targets = not inspect.signature(model.forward).parameters.keys().isdisjoint(targets)
    if accepts_targets or not targets or not all(name in kwargs for name in targets):
        return tuple(args), kwargs
    last = [kwargs[name] for name in targets]
    return (*args, *last), {name: x for name, x in kwargs.items() if name not in targets}


def in_call(
    model: nn.Module, batch: PyTree, targets: Sequence[str] | None
) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
    """Returns the ``(args, kwargs)`` of ``module(**batch)`` for a dict, and of ``module(batch)`` for other batches.

    A dict is one argument if ``forward`` (with the loss's ``targets``) does not take its keys as keywords.
    """
    if isinstance(batch, dict) and batch and all(isinstance(key, str) for key in batch):
        args, kwargs = targets_last(model, (), batch, targets or ())
        if takes(model, args, kwargs, targets):
            return (), batch
    return (batch,), {}


def takes(model: nn.Module, args: Sequence[PyTree], kwargs: dict[str, PyTree], targets: Sequence[str] | None) -> bool:
    """Whether ``model.forward`` accepts these arguments: either all of them, or all but the last ones, which are the
    ``targets`` of the loss.
    """
    model_args = len(args) - len(targets or ())
    without = targets is not None and model_args >= 0 and _refuses(model, args[:model_args], kwargs) is None
    return without or _refuses(model, args, kwargs) is None


def no_targets(model: nn.Module, targets: Sequence[str]) -> InputError:
    """Returns the error for a call in training mode without the loss's ``targets``."""
    several = ", ".join(targets)
    return InputError(
        f"the loss that {type(model).__name__} was compiled with needs {several}, and a call in training mode passes "
        "none",
        fix=f"pass {several} behind what forward takes, or by name; outputs without a loss are those of module.eval(), "
        "or under torch.no_grad(); a model that computes its loss itself, as from labels, is compiled without loss=",
    )


def _refuses(model: nn.Module, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> str | None:
    """Returns Python's error text if ``model.forward`` does not take these arguments; None if it does."""
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return None
