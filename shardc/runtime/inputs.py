"""Inputs of a call: their signature, which selects a program; checks of them; shards and local tensors of them."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import lru_cache
from itertools import zip_longest
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._device import DeviceContext

from shardc import _compat
from shardc._compat import FakeTensor, PyTree
from shardc.errors import InputError
from shardc.ir.code import calling_line, constant_key
from shardc.ir.deferred import Deferred
from shardc.ir.executable import Executable
from shardc.ir.guards import Guards
from shardc.ir.kinds import why_refused
from shardc.ir.layout import Layout
from shardc.ir.placements import to_placements
from shardc.runtime.identity_guards import Mode
from shardc.runtime.read_only import ReadOnly
from shardc.runtime.storage import shard_tensor
from shardc.validate import torch_name

WAYS_OUT = (
    "pass this rank's shard, as module.shard_inputs(*global_inputs) cuts it, "
    "or compile for another global size with module.lower(*examples) at global shapes"
)


class Example(NamedTuple):
    """The arguments of a call at global shapes, for which a program is compiled.

    Args:
        args, kwargs: the arguments, with the targets of the loss if ``with_loss``.
        with_loss: whether the program includes the loss.
    """

    args: Sequence[PyTree]
    kwargs: dict[str, PyTree]
    with_loss: bool


class TorchGlobalState(NamedTuple):
    """Global settings of torch on which the captured ops of a model depend, such as autocast.

    Args:
        autocast: (device type, dtype) for each device type with autocast on.
        default_dtype: `torch.get_default_dtype`.
        deterministic: deterministic algorithms, and their warn-only mode.
        matmul_precision: float32 matmul precision.
        attention: whether the math, flash, memory-efficient and cuDNN kernels of attention are enabled.
        default_device: `torch.set_default_device`; "" if unset.
    """

    autocast: tuple[tuple[str, torch.dtype], ...]
    default_dtype: torch.dtype
    deterministic: tuple[bool, bool]
    matmul_precision: str
    attention: tuple[bool, ...]
    default_device: str

    @classmethod
    def now(cls, device: torch.device) -> TorchGlobalState:
        """Reads torch's current settings that select a program for ``device``: autocast, default dtype, determinism,
        precision, attention backends.

        Raises:
            InputError: another TorchFunctionMode is active, which could change what forward computes.
        """
        flags = torch._C
        kinds = dict.fromkeys((device.type, "cpu"))
        return cls(
            tuple([(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]),
            torch.get_default_dtype(),
            (flags._get_deterministic_algorithms(), flags._get_deterministic_algorithms_warn_only()),
            flags._get_float32_matmul_precision(),
            (flags._get_math_sdp_enabled(), flags._get_flash_sdp_enabled(), flags._get_mem_efficient_sdp_enabled(),
             flags._get_cudnn_sdp_enabled()),
            _default_device() if flags._len_torch_function_stack() else "",
        )  # fmt: skip


def _default_device() -> str:
    """Returns the device set by `torch.set_default_device`; InputError under another TorchFunctionMode."""
    modes = [torch._C._get_function_stack_at(at) for at in range(torch._C._len_torch_function_stack())]
    for mode in modes:
        if not isinstance(mode, DeviceContext):
            raise InputError(
                f"a compiled module is called under {type(mode).__qualname__}, a TorchFunctionMode: it would see none "
                "of the functions that forward calls",
                fix="leave the mode before the call, or enter it inside of forward",
            )
    return str(modes[-1].device)  # the innermost counts


# Field of `Mode` -> what it holds for each module, parameter or tensor.
_MODES = {
    "training": "train or eval mode of {} modules",
    "grads": "requires_grad of {} parameters",
    "dtypes": "the dtype of {} tensors",
}
# Types that are pytree leaves.
_LEAVES = frozenset((Tensor, bool, int, float, str, type(None)))


@dataclass(frozen=True)
class Like:
    """Shape, dtype and ``requires_grad`` of a tensor argument; a dynamic size has a name instead of a number."""

    shape: tuple[int | str, ...]
    dtype: torch.dtype
    requires_grad: bool

    def __str__(self) -> str:
        grad = ", requires_grad" if self.requires_grad else ""
        return f"{torch_name(self.dtype)}{list(self.shape)}{grad}"


@dataclass(frozen=True)
class Constant:
    """Value and type of an argument that is not a tensor. The program depends on it; 1, 1.0 and True differ.

    Args:
        kind: name of the value's type.
        value: the value; constants are compared by their `constant_key`.
    """

    kind: str
    value: Hashable = field(compare=False)
    key: Hashable = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", constant_key(self.value))

    def __str__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True)
class Signature:
    """Cache key of a program: types, shapes and constants of a call's arguments, modes of the model, settings of torch.

    Args:
        names: names of the pytree leaves of ``(args, kwargs)``.
        leaves: description of each leaf; shapes are global for a compiled program, local for a call.
        spec: pytree structure.
        mode: mode flags of the model.
        surroundings: torch's settings at the call.
    """

    names: tuple[str, ...]
    leaves: tuple[Like | Constant, ...]
    spec: pytree.TreeSpec
    mode: Mode
    surroundings: TorchGlobalState

    @classmethod
    def of(
        cls,
        mode: Mode,
        surroundings: TorchGlobalState,
        names: Sequence[str],
        args: Sequence[PyTree],
        kwargs: dict[str, PyTree],
    ) -> Signature:
        """Returns the signature of a call of a model in ``mode`` with ``args`` and ``kwargs``. Raises InputError if
        an argument's value cannot be compared with that of another call.
        """
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        described = tuple(map(_leaf, names, leaves))
        return cls(tuple(names), described, spec, mode, surroundings)

    def without(self, dims: Mapping[str, Mapping[int, str]]) -> Signature:
        """Returns this signature with names in place of the dynamic sizes, so that calls of different sizes compare
        equal. ``dims`` maps input -> dim -> name.
        """
        leaves = tuple(
            replace(x, shape=tuple(dims[name].get(at, n) for at, n in enumerate(x.shape)))
            if isinstance(x, Like) and name in dims
            else x
            for name, x in zip(self.names, self.leaves, strict=True)
        )
        return replace(self, leaves=leaves)

    def is_but_for_sizes(self, other: Signature) -> bool:
        """Whether ``other`` equals this signature, except perhaps in the sizes of tensors."""
        pairs = zip(self.leaves, other.leaves, strict=False)  # other numbers of leaves differ in `spec`, below
        same = all(
            replace(x, shape=y.shape) == y and len(x.shape) == len(y.shape)
            if isinstance(x, Like) and isinstance(y, Like)
            else x == y
            for x, y in pairs
        )
        return same and replace(self, leaves=other.leaves) == other

    def is_but_for_constants(self, other: Signature) -> bool:
        """Whether ``other`` equals this signature, except perhaps in the values of arguments that are not tensors."""
        pairs = zip(self.leaves, other.leaves, strict=False)  # other numbers of leaves differ in `spec`, below
        same = all(x == y or (isinstance(x, Constant) and isinstance(y, Constant)) for x, y in pairs)
        return same and replace(self, leaves=other.leaves) == other

    def differences(self, other: Signature) -> list[str]:
        """Returns a text for each difference of this call from ``other``."""
        if self.spec != other.spec or self.names != other.names:
            return [f"the arguments are {', '.join(self.names)} and were {', '.join(other.names)}"]
        pairs = zip(self.names, self.leaves, other.leaves, strict=True)
        out = [f"{name} is {x} and was {y}" for name, x, y in pairs if x != y]
        for what, now, then in zip(self.surroundings._fields, self.surroundings, other.surroundings, strict=True):
            if now != then:
                out.append(f"{what} is {now} and was {then}")
        for kind, what in _MODES.items():
            flags = zip_longest(getattr(self.mode, kind), getattr(other.mode, kind))
            if changed := sum(now != then for now, then in flags):
                out.append(f"{what.format(changed)} changed")
        return out

    @property
    def tensors(self) -> list[tuple[str, Like]]:
        """(Name, description) of each argument that is a tensor."""
        return [(name, x) for name, x in zip(self.names, self.leaves, strict=True) if isinstance(x, Like)]

    @property
    def constants(self) -> list[tuple[str, object]]:
        """(Name, value) of each argument that is no tensor."""
        return [(name, x.value) for name, x in zip(self.names, self.leaves, strict=True) if isinstance(x, Constant)]

    @property
    def kinds(self) -> tuple[object, ...]:
        """Structure of the call: its pytree spec, and the type of each leaf (`Like` for a tensor, `Constant` for
        other values).
        """
        return self.spec, tuple(type(x) for x in self.leaves)


class Arguments(NamedTuple):
    """Arguments of a call, with the targets of the loss last among ``args``.

    Args:
        leaves, spec: pytree leaves and structure of ``(args, kwargs)``.
    """

    args: tuple[PyTree, ...]
    kwargs: dict[str, PyTree]
    leaves: list[Any]
    spec: pytree.TreeSpec

    @classmethod
    def of(cls, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> Arguments:
        """Flattens ``(args, kwargs)`` like pytree; faster than pytree if no argument is a container."""
        leaves = [*args, *kwargs.values()]
        if _LEAVES.issuperset(map(type, leaves)):  # none is a container
            return cls(args, kwargs, leaves, _flat_spec(len(args), *kwargs))
        return cls(args, kwargs, *pytree.tree_flatten((args, kwargs)))

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the leaves."""
        return [x for x in self.leaves if isinstance(x, Tensor)]

    def examples(self, shapes: Sequence[tuple[int, ...]]) -> PyTree:
        """Returns the ``(args, kwargs)`` as examples for a capture: tensors become ``meta`` tensors of the global
        ``shapes``.
        """
        whole = iter(shapes)  # of the tensors, in their order
        examples = [
            torch.empty(next(whole), dtype=x.dtype, device="meta").requires_grad_(x.requires_grad)
            if isinstance(x, Tensor)
            else x
            for x in self.leaves
        ]
        return pytree.tree_unflatten(examples, self.spec)

    def key(self, mode: Mode, surroundings: TorchGlobalState, deferred: Deferred) -> Hashable | None:
        """Returns a hashable key for the program of a call with these local inputs; None if such calls cannot be
        cached.

        Args:
            mode: mode of the module's snapshot, which outlives the key: its id is part of the key.
            surroundings: torch's global settings at the call.
            deferred: the gradients that are left unreduced.
        """
        described: list[tuple[object, ...]] = []
        for x in self.leaves:
            if isinstance(x, Tensor):
                # Nested tensors are refused, and marks of dynamic dims read, in the slow path, which cached calls skip.
                if x.is_nested or hasattr(x, _compat.DYNAMIC_DIMS):
                    return None
                described.append((type(x), x.shape, x.dtype, x.requires_grad, x.layout, x.is_meta))
            else:
                described.append(constant_key(x))
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        key = self.spec, tuple(described), id(mode), surroundings, deferred, modes
        try:
            hash(key)
        except TypeError:
            return None
        return key


@lru_cache
def _flat_spec(count: int, *names: str) -> pytree.TreeSpec:
    """Returns the pytree structure of a call with ``count`` positional arguments and keywords ``names``, none of them
    a container.
    """
    return pytree.tree_structure(((None,) * count, dict.fromkeys(names)))


class CacheKey(NamedTuple):
    """Key of a program in the cache. The program serves calls with this signature and these unreduced gradients,
    while the guards hold.
    """

    call: Signature
    guards: Guards
    deferred: Deferred


def fitting(call: Signature, tensors: Sequence[Tensor], programs: dict[CacheKey, Executable]) -> Executable:
    """Returns the most recent of ``programs`` that accepts the ``call``. Train and eval mode of the model are not
    compared.

    Raises:
        InputError: no program fits; the text is for the one that fits best.
    """
    names = [name for name, _ in call.tensors]
    errors: list[tuple[int, InputError]] = []  # (number of checks that a program passed, error of the next check)
    for key, program in reversed(programs.items()):  # the most recent first
        passed = 0
        try:
            _check_structure(call, key.call)
            passed = 1
            values, expected = ([value for _, value in x.constants] for x in (call, key.call))
            check_constants([name for name, _ in call.constants], values, expected)
            passed = 2
            dtypes = [like.dtype for _, like in key.call.tensors]
            check_inputs(names, tensors, [layout for _, layout in program.inputs], dtypes)
        except InputError as error:
            errors.append((passed, error))
        else:
            return program
    raise max(errors, key=itemgetter(0))[1]


def _check_structure(call: Signature, expected: Signature) -> None:
    """Raises InputError if ``call`` passes other arguments than ``expected``: another pytree structure, or a tensor
    in place of another value.
    """
    if call.kinds != expected.kinds:
        raise InputError(
            f"the call passes {_shown(call)}; the module was lowered for {_shown(expected)}",
            fix="pass the same arguments, or lower the module for these too: module.lower(*examples) at global shapes",
        )


def _shown(signature: Signature) -> str:
    """Returns the arguments of a call as text: ``x, mask=...``."""
    # The names in the structure (args, kwargs): the leaves of args come first.
    count = len(pytree.tree_leaves(pytree.tree_unflatten(signature.names, signature.spec)[0]))
    named = [name if at < count else f"{name}=..." for at, name in enumerate(signature.names)]
    return ", ".join(named) or "nothing"


def _leaf(name: str, x: object) -> Like | Constant:
    """Describes one leaf of the arguments: `Like` for a tensor, `Constant` for a hashable value. Raises InputError for
    a dataclass, and for a value that is not hashable.
    """
    if isinstance(x, Tensor):
        # A nested tensor has no such shape, and `check_kinds` refuses it.
        return Like(() if x.is_nested else tuple(x.shape), x.dtype, x.requires_grad)
    if is_dataclass(x) and not isinstance(x, type):
        kind = type(x).__name__
        raise InputError(
            f"input {name!r} is a {kind}, a dataclass that torch's pytrees do not know",
            source=calling_line(),
            fix=f"call torch.export.register_dataclass({kind}) once, before the first call",
        )
    try:
        hash(x)
    except TypeError:
        raise InputError(
            f"input {name!r} is a {type(x).__name__}, neither a tensor nor a constant that can be compared",
            source=calling_line(),
            fix="pass a tensor, or a number, a string or None (in lists, tuples and dicts, if need be)",
        ) from None
    return Constant(type(x).__name__, x)


def shard_input(whole: Tensor, layout: Layout, rank: int) -> Tensor:
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


def local_input(x: Tensor, layout: Layout, device_mesh: DeviceMesh) -> Tensor:
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


def in_order(x: Tensor) -> Tensor:
    """Returns ``x`` contiguous, with its conjugation and negation bits resolved, as compiled code needs it."""
    return x.resolve_neg().resolve_conj().contiguous()


def local_part(x: Tensor) -> Tensor:
    """Returns the local tensor of a DTensor; other tensors as they are."""
    return x._local_tensor if isinstance(x, DTensor) else x


def check_inputs(
    names: Sequence[str],
    tensors: Sequence[Tensor],
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
        if not isinstance(x, Tensor):
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
        if constant_key(value) != constant_key(constant):
            raise InputError(
                f"input {name!r} is {value!r}; the program was captured with {constant!r}, which is part of it",
                fix="pass the captured value, lower the module for this one too, or pass it as a tensor",
            )


def _wrong_shape(name: str, x: Tensor, layout: Layout) -> str:
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
