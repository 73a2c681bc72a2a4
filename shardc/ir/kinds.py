"""Says which tensor classes programs accept: those that are described completely by shape, strides and values."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual
from torch.distributed.tensor import DTensor

from shardc._compat import AsyncCollectiveTensor, FakeTensor, is_in_transform, is_wrapper
from shardc.ir.module_paths import is_in
from shardc.validate import torch_name

_PLAIN = (Tensor, nn.Parameter, nn.Buffer, DTensor, AsyncCollectiveTensor, FakeTensor)
# Attributes that a class may override: they construct, copy and print it, and do not change its ops.
_HARMLESS = frozenset(
    "__module__ __qualname__ __doc__ __dict__ __weakref__ __slots__ __annotations__ __annotate__ __annotate_func__ "
    "__annotations_cache__ __orig_bases__ __parameters__ __firstlineno__ __static_attributes__ __init_subclass__ "
    "__class_getitem__ __init__ __new__ __repr__ __str__ __format__ __dir__ __hash__ __sizeof__ __copy__ __deepcopy__ "
    "__reduce__ __reduce_ex__ __getstate__ __setstate__".split()
)
CLASS = "_shardc_class"
# Results of torch's functions on them are plain tensors.
_UNWRAPPED = ("torchvision.tv_tensors",)


def why_refused(x: Tensor, stored: bool = False) -> tuple[str, str] | None:
    """Return None if a program can take the tensor ``x``, else (description of ``x``, replacement to suggest to the
    user).

    The replacement is a text with ``{}`` for the tensor's name. The allowed classes are torch's own, and subclasses
    that override nothing of these.

    Args:
        stored: whether ``x`` is a parameter or buffer, which may be of a wrapper subclass; see `shardc.ir.inner`.
    """
    if x.is_nested:
        return "a nested tensor", "torch.nested.to_padded_tensor({}, 0.0), and a mask"
    if x.layout is not torch.strided:
        return f"a {torch_name(x.layout).strip('_')} tensor", "a dense one: {}.to_dense()"
    if x.is_quantized:
        return f"quantised, of {x.dtype}", "{}.dequantize()"
    if is_in_transform(x):
        return "a tensor inside of a transform of torch.func", "plain tensors, outside of vmap, grad, jvp and the like"
    if not x.is_inference() and unpack_dual(x).tangent is not None:
        return "a dual tensor of forward-mode autograd", "its primal: torch.autograd.forward_ad.unpack_dual({})"
    if isinstance(x, DTensor):
        return why_refused(x._local_tensor)
    if overridden := _overridden(type(x)):
        if stored and is_wrapper(x) and not x.requires_grad:
            inner = (why_refused(getattr(x, name), stored) for name in x.__tensor_flatten__()[0])  # type: ignore[attr-defined]
            return next(filter(None, inner), None)
        if stored and is_wrapper(x):
            return f"a {type(x).__name__} that is trained, and of its inner tensors no optimizer would make the same", (
                "a frozen one ({}.requires_grad_(False)), with adapters to train, or a plain tensor of its values"
            )
        if hasattr(x, "__tensor_flatten__"):
            return f"a {type(x).__name__}, which holds its values in other tensors", (
                "a plain tensor of its values ({}.dequantize()), or register it as a buffer or a frozen parameter"
            )
        return f"a {type(x).__name__}, a class with {', '.join(overridden[:3])} of its own, which would be lost", (
            "a plain tensor, {}.as_subclass(torch.Tensor), and write what the class does in forward"
        )
    return None


def as_plain(x: Tensor) -> Tensor:
    """Return ``x`` as a plain `torch.Tensor`, which a trace requires. A tensor of one of torch's own classes, or of a
    class that overrides methods of `torch.Tensor`, is returned as it is.
    """
    return x if type(x) in _PLAIN or _overridden(type(x)) else x.as_subclass(Tensor)


def note_attributes(x: Tensor, like: Tensor) -> None:
    """Give ``x``, which takes the place of ``like``, the attributes of ``like`` and of its class. Also record that
    class on ``x``, for `lost_names`. Do nothing if ``like`` is a fake tensor.
    """
    if isinstance(like, FakeTensor):  # its attributes are its state
        return
    cls = type(like)
    added = {name: value for name, value in _added(cls).items() if not hasattr(value, "__get__")}
    noted = {} if cls in _PLAIN else {CLASS: cls}
    for name, value in {**added, **noted, **vars(like)}.items():
        if not name.startswith("_dynamo_"):  # set by torch.compile
            vars(x).setdefault(name, value)


def lost_names(x: Tensor) -> tuple[type, set[str]]:
    """Return the class of the user's tensor that ``x`` was copied from, and the names that ``x`` lacks: that class and
    the methods that it adds to `torch.Tensor`.
    """
    cls: type = vars(x).get(CLASS, type(x))
    return cls, {name for name, value in _added(cls).items() if hasattr(value, "__get__")} | {cls.__name__}


@cache
def _added(cls: type) -> dict[str, object]:
    """Return name -> value of the class attributes of ``cls`` that `torch.Tensor` lacks."""
    bases = [base for base in reversed(cls.__mro__) if cls not in _PLAIN and not issubclass(Tensor, base)]
    return {name: value for base in bases for name, value in vars(base).items() if not hasattr(Tensor, name)}


@cache
def _overridden(cls: type) -> list[str]:
    """Return the names of the methods of torch's tensor classes that ``cls`` overrides."""
    names: list[str] = []
    for base in cls.__mro__:
        if base in _PLAIN or any(is_in(base.__module__, module) for module in ("shardc", *_UNWRAPPED)):
            break
        off = torch._C._disabled_torch_function_impl  # disables overriding
        members = ((name, member) for name, member in vars(base).items() if member is not off)
        names += [name for name, _ in members if name not in _HARMLESS and hasattr(Tensor, name)]
    return names
