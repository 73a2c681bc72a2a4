"""Parameters as plain tensors, with their optimizer state: optimizers of `shardc.optim` update these in place of
DTensors.

A `Shard` is this rank's local tensor. A `WholeParameter` is there during a step, on the rank that owns the parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from operator import is_

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardc import _compat
from shardc.runtime.gathered import gather, scattered_like
from shardc.runtime.gradients import local_grad
from shardc.runtime.owners import Owner
from shardc.runtime.storage import like_parameter

pytree = _compat.pytree
# State that is a scalar per parameter, even if the parameter is one too.
_NUMBERS = ("step", "mu_product", "eta", "mu")


class Shard:
    """A parameter's local tensor as a plain parameter in the same memory, with its optimizer state.

    Attributes:
        is_local: whether this rank updates it.
    """

    is_local = True

    def __init__(self, param: nn.Parameter, name: str) -> None:
        self.param, self.name = param, name
        self.local: Tensor = param._local_tensor  # type: ignore[attr-defined]
        self.data = nn.Parameter(self.local, requires_grad=self.local.is_floating_point() or self.local.is_complex())
        self.fuses = self.local.is_floating_point()  # whether fused kernels take it: not if complex
        self.dtype = self.local.dtype
        self._last_read: list[object] = []  # values of the parameter's state at the last `read` or `write`
        self._last_written: list[object] = []  # values of the shard's state at the last `write`

    def end_step(self) -> None:
        """Drops the plain parameter's gradient, which only the step needs."""
        self.data.grad = None

    def placed(self, x: object) -> object:
        """Reshards ``x``, an entry of the optimizer state, to the parameter's layout if it is a DTensor of the
        parameter's shape. Returns other values as they are.
        """
        if not isinstance(x, DTensor) or x.shape != self.param.shape or x.placements == self.param.placements:  # type: ignore[attr-defined]
            return x
        return scattered_like(self.param, gather(x))  # type: ignore[arg-type]

    def take_grad(self) -> bool:
        """Sets the gradient of the plain shard from that of the DTensor parameter. Returns whether a fused optimizer
        kernel can use it.
        """
        grad = self.param.grad
        if grad is None:  # the optimizer skips it
            return self.fuses
        local = self.gradient(grad)
        self._set_grad(local)
        return self.fuses and local.dtype == self.dtype

    def _set_grad(self, grad: Tensor) -> None:
        """Sets the gradient of the plain parameter to ``grad``, whose dtype may differ from the parameter's."""
        if grad.dtype != self.dtype:
            self.data.grad_dtype = grad.dtype
        self.data.grad = grad

    def gradient(self, grad: Tensor) -> Tensor:
        """Returns the local tensor of ``grad``, the parameter's gradient. Raises LayoutError unless it has the
        parameter's layout.
        """
        if type(grad) is DTensor and grad._spec is self.param._spec:  # type: ignore[attr-defined]
            return grad._local_tensor
        return local_grad(self.name, self.param)

    def read(self, state: Mapping[str, object] | None, fused: bool, into: dict[Tensor, dict[str, object]]) -> None:
        """Copies the optimizer state of the DTensor parameter to the plain shard, as local tensors. Does nothing if
        the state has not changed since the last copy.

        Args:
            state: state of the parameter by key, such as ``exp_avg``.
            fused: whether a fused kernel runs, which needs ``step`` on the shard's device.
            into: state by shard, to which the shard's is written.
        """
        if not state:
            if self._last_read:  # the parameter's state was cleared: clear the shard's
                into.pop(self.data, None)
                self._last_read, self._last_written = [], []
            return
        if _are(state.values(), self._last_read):
            return  # the shard's state was made of these
        entries = {key: x._local_tensor if isinstance(x, DTensor) else x for key, x in state.items()}
        step = state.get("step")
        if fused and isinstance(step, Tensor) and step.device != self.local.device:
            entries["step"] = step.to(self.local.device)
        into[self.data] = entries
        # Of new entries, none is written yet: `write` must look at all.
        self._last_read, self._last_written = list(state.values()), []

    def write(self, mine: Mapping[str, object] | None, states: Mapping[Tensor, dict[str, object]]) -> None:
        """Copies the optimizer state of the plain shard to the state of the DTensor parameter. Tensors become
        DTensors; those that exist already stay the same objects.

        Args:
            mine: state of the shard by key.
            states: state by parameter, to which the parameter's is written.
        """
        if not mine or _are(mine.values(), self._last_written):
            return
        state = states[self.param]
        for key, x in mine.items():
            state[key] = self._as_dtensor(key, x, state.get(key))
        self._last_read, self._last_written = list(state.values()), list(mine.values())

    def _as_dtensor(self, key: str, x: object, present: object) -> object:
        """Converts ``x``, entry ``key`` of the shard's optimizer state, to an entry of the parameter's state. A
        tensor of the shard's shape becomes a DTensor; other values stay.

        Args:
            present: the entry that the parameter's state has now; returned if it is a DTensor with the local tensor
                ``x``.
        """
        if not isinstance(x, Tensor) or key in _NUMBERS or x.shape != self.local.shape:
            return x
        if isinstance(present, DTensor) and present._local_tensor is x:
            return present
        return like_parameter(x, self.param)


@dataclass(frozen=True)
class Described:
    """What ranks other than a parameter's owner get told about an entry of the owner's optimizer state: its shape and
    dtype, or its number.

    Args:
        shape: shape of a tensor with dims.
        dtype: its dtype.
        number: the value of a tensor without dims, on the CPU.
        device: type of its device.
        unshared: name of the class of any other value, which is not sent; "" for a tensor.
    """

    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    number: Tensor | None = None
    device: str = "cpu"
    unshared: str = ""

    @staticmethod
    def of(x: object) -> object:
        """Returns a description (shape, dtype, device) of ``x``, a leaf of an optimizer state. Numbers, text and None
        are returned as they are.
        """
        if isinstance(x, Tensor):
            shape, number = tuple(x.shape), None if x.dim() else x.detach().cpu()  # such as Adam's `step`
            return Described(shape, x.dtype, number=number, device=x.device.type)
        if x is None or isinstance(x, bool | int | float | complex | str | bytes | torch.dtype | torch.device):
            return x
        return Described(unshared=type(x).__name__)


class WholeParameter(Shard):
    """A parameter that one rank, the owner, updates as a whole plain tensor. Has its optimizer state, too.

    Between steps it has no memory but that of the state.

    Args:
        at: index of the parameter among those of `Owners`.
        owner: its owner.

    Attributes:
        shared: whether all ranks know what its state consists of.
    """

    def __init__(self, param: nn.Parameter, name: str, at: int, owner: Owner) -> None:
        super().__init__(param, name)
        self.at, self.owner, self.is_local, self.shared = at, owner, owner.is_local, False
        # Empty between steps: `take` sets the whole value, on the owner.
        self.data = nn.Parameter(self.local.new_empty(0), requires_grad=self.data.requires_grad)
        self._same_dtype = True  # whether the gradient has the parameter's dtype, as fused kernels need

    def take(self, value: Tensor | None, grad: Tensor | None) -> None:
        """Sets the unsharded value and gradient of the parameter for a step. On ranks that do not own the parameter
        both are None, and nothing is set.
        """
        if value is not None and grad is not None:
            self.data.data = value
            self._set_grad(grad)
            self._same_dtype = grad.dtype == self.dtype

    def take_grad(self) -> bool:
        """Returns whether a fused optimizer kernel can use the gradient, which `take` has set."""
        return self.fuses and self._same_dtype

    def end_step(self) -> None:
        """Drops the gradient and the unsharded value, which only the step needs."""
        super().end_step()
        self.data.data = self.local.new_empty(0)

    def read(self, state: Mapping[str, object] | None, fused: bool, into: dict[Tensor, dict[str, object]]) -> None:
        """Copies the optimizer state of the DTensor parameter to the plain whole tensor, on the owner only (see
        `Shard.read`). Entries may be nested, so leaves are compared.
        """
        leaves = pytree.tree_leaves(state or {})
        if not self.is_local or _are(leaves, self._last_read):  # read already
            return
        self._last_read, self._last_written = leaves, []
        if not state:
            into.pop(self.data, None)
            return
        into[self.data] = pytree.tree_map_only(DTensor, lambda x: x._local_tensor, dict(state))
        step = into[self.data].get("step")
        if fused and isinstance(step, Tensor) and step.device != self.local.device:
            into[self.data]["step"] = step.to(self.local.device)

    def write(self, mine: Mapping[str, object] | None, states: Mapping[Tensor, dict[str, object]]) -> None:
        """Copies the optimizer state of the plain whole tensor to the DTensor parameter's, on the owner only (see
        `Shard.write`): tensors become DTensors that have rows on the owner alone.
        """
        leaves = pytree.tree_leaves(mine or {})
        if not self.is_local or not mine or _are(leaves, self._last_written):
            return
        state = states[self.param]
        dtensors = {id(x._local_tensor): x for x in pytree.tree_leaves(state) if isinstance(x, DTensor)}
        # Entries whose memory is unchanged stay the same DTensors.
        new = pytree.tree_map(lambda x: dtensors.get(id(x)) if id(x) in dtensors else self.placed(x), dict(mine))
        state.clear()
        state.update(new)
        self._last_read, self._last_written = pytree.tree_leaves(state), leaves

    def placed(self, x: object) -> object:
        """Moves ``x``, an entry of the optimizer state, to the parameter's owner: returns a DTensor that has no rows
        on other ranks. Numbers stay on all ranks.
        """
        if not isinstance(x, Tensor):
            return x
        if isinstance(x, DTensor):
            mesh = self.owner.param.device_mesh
            if x.dim() and x.device_mesh == mesh and x.placements == self.owner.placements:
                return x
            x = gather(x)  # loaded in another layout
        return self.owner.place(x, x.shape, x.dtype) if x.dim() else x

    def described(self, x: Described) -> object:
        """Returns what a rank that does not own the parameter stores for the entry ``x`` of the optimizer state: a
        DTensor without local rows for a tensor, the number for a number, and ``x`` for a value that was not sent.
        """
        if x.unshared:
            return x
        return self.owner.place(None, x.shape, x.dtype) if x.number is None else x.number.to(x.device)


def _are(values: Collection[object], others: Collection[object]) -> bool:
    """Whether ``values`` and ``others`` are the same objects, one by one."""
    return len(values) == len(others) and all(map(is_, values, others))
