"""`ParamStore`: parameters and buffers of a compiled module between steps, with checks and hooks for loading.

Names, ties, global shapes and storage layouts must not change. Values, ``requires_grad``, dtypes and the objects may.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from shardc._compat import is_wrapper
from shardc.errors import LayoutError
from shardc.ir.clone import clone_tree, unsharded
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.runtime import forward_calls
from shardc.runtime.gradients import Sync
from shardc.runtime.host import ParamLocation
from shardc.runtime.identity_guards import ModuleSnapshot
from shardc.runtime.owned import stored_placements
from shardc.runtime.replicas import Sources, compare_values
from shardc.runtime.sharding_spec import ShardingSpec
from shardc.runtime.storage import cut, padded_local, refill, shard_tensor

_spec, _device = attrgetter("_spec"), attrgetter("device")
_FIX = "load values into the module's own parameters (load_state_dict, or copy_ under torch.no_grad())"


@dataclass(frozen=True)
class ParamContract:
    """Properties of a parameter that must not change after compile: name, shape and placements.

    Args:
        first: the name it is stored under; tied parameters share it.
        shape: global shape, without padding.
        placements: DTensor placements of its storage layout.
    """

    first: str
    shape: tuple[int, ...]
    placements: tuple[Placement, ...]


class CheckedParams:
    """Remembers the DTensor specs and devices of parameters that have passed `check`. While these stay the same, the
    parameters need no new check.

    Args:
        runs: whether the check was for a run of the module.
    """

    def __init__(self, params: Mapping[str, nn.Parameter], runs: bool) -> None:
        self._specs, self._devices = list(map(_spec, params.values())), list(map(_device, params.values()))
        self._runs = runs

    def still_passed(self, params: Mapping[str, nn.Parameter], runs: bool) -> bool:
        """Whether ``params`` need no new check: they have the same DTensor specs (objects) and devices as those that
        passed the last one.

        Args:
            runs: whether the module is about to run; an earlier check without ``runs`` does not suffice for that.
        """
        return (
            runs <= self._runs  # False only if a run needs values that the last check did not ask for
            and all(map(is_, self._specs, map(_spec, params.values())))
            and self._devices == list(map(_device, params.values()))
        )


def check(
    params: Mapping[str, nn.Parameter],
    expected: Mapping[str, ParamContract],
    device_mesh: DeviceMesh,
    homes: Mapping[str, ParamLocation],
    runs: bool = False,
) -> None:
    """Checks types, layouts, devices and ties of ``params`` against ``expected``; reads no values.

    Args:
        params: by each of their names; `ParamContract.first` is the first name of a tied one.
        homes: device of each between steps.
        runs: whether the module is about to run, so that the parameters need values.

    Raises:
        LayoutError: names the first parameter that does not fit.
    """
    if params.keys() != expected.keys():
        gone, new = sorted(expected.keys() - params.keys()), sorted(params.keys() - expected.keys())
        what = f"parameter {gone[0]!r} is gone" if gone else f"parameter {new[0]!r} came after the module was compiled"
        raise LayoutError(what, fix="change the model first, then compile it")
    for name, param in params.items():
        contract = expected[name]
        if param is not params[contract.first]:
            raise LayoutError(f"parameters {contract.first!r} and {name!r} were tied and are now two tensors", fix=_FIX)
        if not isinstance(param, DTensor):
            raise LayoutError(
                f"parameter {name!r} was replaced by a {type(param).__name__} of shape {list(param.shape)} that is no "
                f"DTensor (or the module is inside of summon_full_params, where it does not run)",
                fix=_FIX,
            )
        if tuple(param.shape) != contract.shape:
            raise LayoutError(
                f"parameter {name!r} has shape {list(param.shape)}; the module was compiled with "
                f"{list(contract.shape)}",
                fix="compile the changed model again",
            )
        if param.device_mesh != device_mesh or param.placements != contract.placements:
            raise LayoutError(
                f"parameter {name!r} is laid out as {list(param.placements)} on {param.device_mesh}; the plan stores "
                f"it as {list(contract.placements)} on {device_mesh}",
                fix=_FIX,
            )
        home = homes[contract.first]
        if param.device.type != home.place.type and (runs or not param.is_meta):
            raise _moved(name, param, home)


def _moved(name: str, param: DTensor, home: ParamLocation) -> LayoutError:
    """Returns the error for a parameter that is on meta, or not on the device where ``home`` requires it."""
    entry = home.entry or None
    if param.is_meta:
        fix = "give it some: module.init_weights(...) or module.load_state_dict(...)"
        return LayoutError(f"parameter {name!r} is on meta and has no values", plan_entry=entry, fix=fix)
    location = "the plan keeps it on the host" if entry else f"the program runs on {home.device.type}"
    fix = 'leave it there, or write offload(..., to="device")' if entry else "compile for a mesh of that device"
    return LayoutError(f"parameter {name!r} was moved to {param.device}; {location}", plan_entry=entry, fix=fix)


def load_hooks(module: nn.Module, spec: ShardingSpec) -> None:
    """Registers hooks by which ``load_state_dict`` of ``module`` and its submodules accepts unsharded tensors, and
    DTensors on any mesh.
    """
    names = {id(param): name for name, param in module.named_parameters()}
    for submodule in module.modules():
        names_by_key = {key: names[id(param)] for key, param in submodule._parameters.items() if param is not None}
        # In a copied module they are there already: `deepcopy` copies hooks.
        if names_by_key and not any(_is_ours(hook) for hook in submodule._load_state_dict_pre_hooks.values()):
            stored = {key: (spec.stored[name], spec.homes[name]) for key, name in names_by_key.items()}
            submodule.register_load_state_dict_pre_hook(partial(_load, stored, spec.rank))


def _is_ours(hook: object) -> bool:
    """Whether a load_state_dict pre-hook is one that `load_hooks` registered."""
    return getattr(getattr(hook, "hook", hook), "func", None) is _load


def _load(
    stored: Mapping[str, tuple[Layout, ParamLocation]],
    rank: int,
    module: nn.Module,
    state_dict: dict[str, object],
    prefix: str,
    *_: object,
) -> None:
    """Pre-hook of ``load_state_dict`` that lets a sharded module load unsharded tensors. Copies this rank's shard of
    each value of ``state_dict`` into the parameter, and puts the parameter in the value's place, so that torch's
    own copy changes nothing.
    """
    for key, (storage, home) in stored.items():
        param, loaded = module._parameters.get(key), state_dict.get(prefix + key)
        if not isinstance(param, DTensor) or not isinstance(loaded, Tensor) or loaded is param:
            continue
        if loaded.shape != param.shape or loaded.is_meta:
            continue  # torch raises its own error
        shard = _shard(loaded.detach(), param, storage, rank)  # padded
        if param.is_meta:  # it has no memory to copy to
            refill(param, home.keep(shard.to(param.dtype, copy=True)), storage, rank)
        else:
            with torch.no_grad():
                param._local_tensor.copy_(cut(shard, param._local_tensor.shape))
        state_dict[prefix + key] = param


def _shard(value: Tensor, param: DTensor, storage: Layout, rank: int) -> Tensor:
    """Returns this rank's padded shard of ``value``, an unsharded tensor or a DTensor on any mesh."""
    if not isinstance(value, DTensor):
        return shard_tensor(value, storage, rank)
    if value.device_mesh == param.device_mesh and value.placements == param.placements:
        return padded_local(value, storage)  # its shard is that of `param`: nothing to gather
    return shard_tensor(value.full_tensor(), storage, rank)


def check_loads(template: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> None:
    """Checks that ``state_dict`` fits before any value is changed. Loads meta tensors of the same shapes into
    ``template``, so torch raises its own errors.
    """
    shapes = OrderedDict(
        (name, value if not isinstance(value, Tensor) or is_wrapper(value) else _on_meta(value))
        for name, value in state_dict.items()
    )
    if hasattr(state_dict, "_metadata"):
        shapes._metadata = state_dict._metadata  # type: ignore[attr-defined]
    nn.Module.load_state_dict(template, shapes, strict=strict)


def _on_meta(value: Tensor) -> Tensor:
    """Returns a ``meta`` tensor with the global shape and dtype of ``value``."""
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def renew(module: nn.Module, spec: ShardingSpec) -> None:
    """Gives each parameter a padded local buffer again, after ``module.to`` or a similar call has replaced its local
    tensor. The DTensors stay the same objects. A parameter on a wrong device stays there, and `check` will refuse it.
    """
    for name, param in module.named_parameters():
        if isinstance(param, DTensor):
            # `refill` swaps the parameter for a new tensor, which would take the gradient along.
            grad, param.grad = param.grad, None
            storage, home = spec.stored[name], spec.homes[name]
            padded = padded_local(param, storage)
            refill(param, home.keep(padded) if padded.device.type == home.place.type else padded, storage, spec.rank)
            param.grad = grad


@dataclass
class ParamStore:
    """Gives access to the parameters and buffers of a compiled module, ``owner``, and checks them before use.

    Args:
        owner: the module itself.
        spec: mesh and layouts of the module.
        sync: settings of the gradients that are left unreduced, with their sums.
        sources: fingerprints of unsharded tensors and of the shards cut from them; see `shardc.runtime.replicas`.
        fresh: whether values have been written since the ranks last compared them.

    Attributes:
        view: the module as an instance of the user's class, with the same parameters.
    """

    spec: ShardingSpec
    owner: Any
    sync: Sync
    sources: Sources = field(default_factory=dict)
    fresh: bool = True
    _snapshot: ModuleSnapshot | None = None
    _checked: CheckedParams | None = None

    def __post_init__(self) -> None:
        self.view: Any = unsharded(self.owner)
        self.sync.parameters = lambda: self.current_snapshot().parameters  # those of now: they may be replaced
        if self.spec.device_mesh is not None:  # else the module is only analysed or simulated
            load_hooks(self.owner, self.spec)
            forward_calls.guard(self.owner)

    @property
    def snapshot(self) -> ModuleSnapshot:
        """Snapshot of the module at the last call of `current_snapshot`."""
        assert self._snapshot is not None
        return self._snapshot

    def current_snapshot(self) -> ModuleSnapshot:
        """Returns a snapshot of the module. It is the last one as long as modules, parameters, buffers and hooks are
        the same objects.
        """
        if self._snapshot is None or not self._snapshot.holds():
            self._snapshot, self._checked = ModuleSnapshot(self.owner), None
        return self._snapshot

    def present(self) -> nn.Module:
        """Returns a copy of the user's module in its present state, with ``meta`` tensors at global shapes, for
        capture.
        """
        # Strides are those of the user's parameters at compile; DTensors of the module are contiguous.
        named = self.spec.template.named_parameters(remove_duplicate=False)
        strides = {name: param.stride() for name, param in named}

        def tensor(name: str, x: Tensor) -> Tensor:
            """Returns a meta tensor for ``x`` (a parameter or buffer), a parameter if ``x`` is one."""
            empty = torch.empty_strided(x.shape, strides.get(name, x.stride()), dtype=x.dtype, device="meta")
            return nn.Parameter(empty, requires_grad=x.requires_grad) if isinstance(x, nn.Parameter) else empty

        # As the user's model was: without the state of the compiled module and its guards of `forward`.
        template = clone_tree(self.view, tensor)
        vars(template).pop("shardc")
        forward_calls.unguard(template)
        return template

    @cached_property
    def contracts(self) -> dict[str, ParamContract]:
        """Maps each parameter name to the properties (`ParamContract`) that the parameter must keep. A tied parameter
        has several names.
        """
        assert self.spec.param_mesh is not None
        view, storages = Mesh.of(self.spec.param_mesh), self.spec.stored
        stored_under: dict[int, str] = {}  # id of a parameter -> its first name
        out = {}
        for name, param in self.spec.template.named_parameters(remove_duplicate=False):
            first = stored_under.setdefault(id(param), name)
            out[name] = ParamContract(first, tuple(param.shape), stored_placements(storages[first], view))
        return out

    def check(self, runs: bool = False) -> None:
        """Raises LayoutError if a parameter is no longer as it was compiled (shape, layout, device, ties). If the
        module ``runs``, its parameters must have values, too.
        """
        mesh, params = self.spec.param_mesh, self.snapshot.parameters
        # Checked before each run: usually the same specs and devices as at the last full check, which is quick to see.
        if mesh is None or self._checked is not None and self._checked.still_passed(params, runs):
            return
        check(params, self.contracts, mesh, self.spec.homes, runs)
        self._checked = CheckedParams(params, runs)

    def compare_values(self, name: str) -> None:
        """Raises MeshError if ranks that should hold equal values of a parameter or buffer hold different ones.
        Compares only if values were written since the last comparison.

        Args:
            name: name of the module.
        """
        if self.fresh and self.spec.groups is not None:
            tensors = [*self.snapshot.parameters.items(), *self.snapshot.buffers.items()]
            # Each tensor once, by its first name if it is tied: in reverse, the first name is written last.
            named = {id(x): (name, x) for name, x in reversed(tensors)}
            compare_values(name, dict(reversed(named.values())), self.spec.stored, self.sources, self.spec.groups)
            self.fresh = False
