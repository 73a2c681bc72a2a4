"""`ReadOnly`: an output that shares memory with another tensor on one device, and is a copy here."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor

from shardc import _compat
from shardc._compat import PyTree
from shardc.errors import LayoutError
from shardc.runtime.gathered import written

pytree = _compat.pytree
# Methods that read the memory; they run on a copy.
_COPIED = (
    Tensor.numpy,
    Tensor.__array__,
    Tensor.tolist,
    Tensor.__repr__,
    Tensor.__deepcopy__,
    Tensor.__reduce_ex__,
)
_PROPERTIES: Any = Tensor
_TAKES_MEMORY = (_PROPERTIES.data.__set__, Tensor.untyped_storage, Tensor.storage, Tensor.data_ptr, Tensor.__dlpack__)
_GRADIENTS = (_PROPERTIES.requires_grad.__set__, Tensor.requires_grad_, Tensor.detach_)


@dataclass
class Shared:
    """Describes the tensor whose memory an output would share on one device. Here the output is a copy, so it must
    not be written, nor read after that tensor was changed.

    Args:
        index: index of the output.
        name: the tensor, as errors name it.
        source: the input, buffer or parameter; None if the tensor is another output, which is read-only too.
        itself: whether the output is a parameter.
        version: version of the source at the last `note`; None before.
        constant: whether it is a plain tensor that forward reads, compiled in as a constant.
    """

    index: int
    name: str
    source: weakref.ref[Tensor] | None = None
    itself: bool = False
    version: int | None = None
    constant: bool = False

    def note(self) -> None:
        """Records the version counter that the tensor described by this object has now, for `check`."""
        self.version = self._version()

    def check(self) -> None:
        """Raises LayoutError if the source (the tensor whose memory the output shares on one device) was changed in
        place since `note`: the output would be outdated. Checks nothing before `note`, or if the source has no version
        (`_version`).
        """
        if self.version is not None and self._version() not in (None, self.version):
            raise LayoutError(
                f"{self.name} was changed in place since output {self.index} of the module was returned, which one "
                "device has in the same memory; here it is a copy, as ranks hold parts, and has the values of then",
                fix=f"read the output before that, or clone it (out.clone()), or read {self.name} itself",
            )

    def _version(self) -> int | None:
        """Returns the version of the source (the tensor described by this object). None if the source is another
        output, a constant or an inference tensor, or was freed.
        """
        x = self.source() if self.source is not None else None
        if x is None or x.is_inference():  # an inference tensor has no version counter
            return None
        return version_of(x)

    def refuse(self) -> NoReturn:
        """Raises the LayoutError for an op that writes to the output, which can only be read."""
        fix = "change a copy (out = out.clone())"
        if self.constant:
            fix += f", or make {self.name} a buffer (register_buffer)"
        else:
            fix += f", or change {self.name}" if self.source is not None else " of each of them"
        why = "the program has its values as constants" if self.constant else "ranks hold parts"
        raise LayoutError(
            f"output {self.index} of the module cannot be changed in place: on one device that changes {self.name} "
            f"too, in whose memory it is, and here it is a copy, as {why}",
            fix=fix,
        )


def version_of(x: Tensor) -> int:
    """Return the version counter of ``x``; of a DTensor, plus that of its local tensor, which also changes it."""
    return x._version + x._local_tensor._version if isinstance(x, DTensor) else x._version


class ReadOnly(Tensor):
    """An output that can only be read: any op that writes to it or to a view of it raises.

    ``.data`` and ``detach()`` are views of it. Other ops return plain tensors.

    Attributes:
        local: the plain tensor.
        shared: the tensor that a write would change on one device.
    """

    local: Tensor
    shared: Shared

    @classmethod
    def of(cls, values: Tensor, shared: Shared) -> ReadOnly:
        """Wraps ``values``, a tensor without autograd history, as an output that raises on writes."""
        out = _compat.wrapper(cls, values, values.device)
        out.local, out.shared = values, shared
        return out

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> PyTree:
        """Refuses methods that hand out the memory, and reads the values for methods such as ``numpy`` from a copy."""
        x = args[0] if args else None
        if isinstance(x, ReadOnly):
            # On a parameter that is returned, `requires_grad_` and `detach_` would change the parameter itself.
            if func in _TAKES_MEMORY or (func in _GRADIENTS and x.shared.itself):
                x.shared.refuse()
            if func in _COPIED:
                args = (x.clone(), *args[1:])
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func in (Tensor.numpy, Tensor.__array__):  # a write to the copy would be lost: numpy refuses it
            result.setflags(write=False)
        return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> PyTree:  # type: ignore[override]
        """Runs an op on the plain tensors: refuses writes, checks that the values are not outdated, and wraps results
        that are views as read-only.
        """
        kwargs = kwargs or {}
        for x in _written(func, args, kwargs):
            if isinstance(x, ReadOnly):
                x.shared.refuse()
        if func is torch.ops.aten._has_compatible_shallow_copy_type.default:  # asked by ``y.data = x``
            return False  # it cannot become the .data of another tensor
        if func is torch.ops.aten.detach_.default:  # writes nothing
            return args[0]
        leaves, spec = pytree.tree_flatten((args, kwargs))
        # Address of the memory of each read-only operand -> the tensor that it shares on one device.
        sources = {_memory(x.local): x.shared for x in leaves if isinstance(x, ReadOnly)}
        for shared in sources.values():
            shared.check()
        args, kwargs = pytree.tree_unflatten([plain(x) for x in leaves], spec)

        def as_view(x: Any) -> object:
            # A result in the memory of a read-only tensor is a view of it, and must not be written either.
            source = sources.get(_memory(x)) if isinstance(x, Tensor) and not isinstance(x, DTensor) else None
            return x if source is None else cls.of(x, source)

        return pytree.tree_map(as_view, func(*args, **kwargs))


def plain(x: object) -> object:
    """Returns the plain tensor of a `ReadOnly`; other values as they are."""
    return x.local if isinstance(x, ReadOnly) else x


def _memory(x: Tensor) -> int:
    """Returns the address of the storage of ``x``, equal for tensors that share memory."""
    return x.untyped_storage().data_ptr()


def _written(func: OpOverload, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> Iterator[object]:
    """Yields the arguments that the op ``func`` writes to, or whose memory it takes over, as ``set_`` does."""
    schema = getattr(func, "_schema", None)
    if schema is None or func is torch.ops.aten.detach_.default:
        return
    yield from written(func, args, kwargs)
    if schema.name == "aten::set_":
        yield from pytree.tree_leaves(args)  # also the tensor whose memory the first argument takes over
    elif func.namespace == "c10d" and schema.name != "c10d::send":
        # Collectives write their first argument, and their schemas do not say so.
        yield from pytree.tree_leaves(args[0])
