"""`Namespace`: the methods that a compiled module has in addition to the model's.

`INSTEAD` lists methods of FSDP2 modules that a compiled module lacks, with their replacements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, wraps
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from shardc._compat import PyTree
from shardc.ir.module_paths import is_public
from shardc.runtime.containers import from_dicts, to_dicts
from shardc.runtime.full_params import first_state_dict, full_state_dict, summon_full_params
from shardc.runtime.gloo.buffers import MemoryUse
from shardc.runtime.gradients import clip_grad_norm_
from shardc.runtime.initialize import initialise, reset_parameters
from shardc.runtime.inputs import CacheKey, check_kinds, in_call, targets_last
from shardc.runtime.state import State
from shardc.validate import Range, typed

P = ParamSpec("P")
S = TypeVar("S", bound=State)
T = TypeVar("T")

_SCHEDULED = "nothing to write: the compiler schedules gathers"
_IN_BACKWARD = "nothing to write: the compiled backward decides it"
_DIVIDE = 'add Plan(reduce="sum", grad_scale=...) to the plan'
OF_WRAPPERS = {"module": "a compiled module wraps no other: leave .module out"}
INSTEAD = {
    "set_reshard_after_forward": "to evaluate without gathers, compile the model once more under shardc.ddp(...), and "
    "load the state: evaluated.load_state_dict(module.state_dict())",
    "set_requires_gradient_sync": "run steps that reduce nothing inside of `with module.no_sync():`",
    "set_is_last_backward": _IN_BACKWARD,
    "set_reshard_after_backward": _IN_BACKWARD,
    "set_unshard_in_backward": _IN_BACKWARD,
    "set_modules_to_forward_prefetch": _SCHEDULED,
    "set_modules_to_backward_prefetch": _SCHEDULED,
    "unshard": "read or change whole parameters inside of `with module.summon_full_params():`",
    "reshard": "parameters are split again at the end of `with module.summon_full_params():`",
    "set_gradient_divide_factor": _DIVIDE,
    "set_reduce_scatter_divide_factor": _DIVIDE,
    "set_custom_all_gather": "put shardc.passes.OnTheWire into Options(pipeline=...)",
    "set_custom_reduce_scatter": 'put shardc.passes.OnTheWire(of="reduce") into Options(pipeline=...)',
    "set_all_reduce_hook": 'put shardc.passes.OnTheWire(of="reduce") into Options(pipeline=...)',
}


def shares_errors(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorator for methods that all ranks call: if one rank raises an error, the other ranks raise it too."""

    @wraps(method)
    def call(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.shares_errors():
            return method(self, *args, **kwargs)

    return call


class Namespace(State):
    """``module.shardc`` of a compiled module: its methods besides the model's.

    Each is also available as ``module.<name>``, unless the model has an attribute of that name.
    """

    @classmethod
    @cache
    def short_names(cls) -> frozenset[str]:
        """Names of the methods of ``module.shardc`` that are available on the module itself, too."""
        bases = cls.__mro__[: cls.__mro__.index(State)]
        return frozenset(name for base in bases for name in vars(base) if is_public(name)) - {"short_names"}

    def _meet(self, method: str) -> None:
        """Waits until all ranks call ``method``. Raises MeshError if another rank goes on without calling it."""
        if self.spec.groups is not None:
            self.spec.groups.consistency.meet(f"{type(self.spec.template).__name__}.{method}")

    def _waits(self) -> AbstractContextManager[None]:
        """Context manager around collectives: if another rank raises meanwhile, the collectives raise on this rank
        instead of waiting.
        """
        return nullcontext() if self.spec.groups is None else self.spec.groups.consistency.waits()

    def _compiles(self) -> AbstractContextManager[None]:
        """Context manager around compilations on all ranks: if another rank raises meanwhile, this rank raises early
        too.
        """
        return nullcontext() if self.spec.groups is None else self.spec.groups.consistency.compiles()

    @typed()
    def no_sync(self, parameters: str = "*") -> AbstractContextManager[None]:
        """Context manager for gradient accumulation without communication: each rank sums unsharded gradients locally.

        The next backward outside reduces the sum with its own gradients. Until then ``.grad`` does not change,
        ``zero_grad()`` (of the module or an optimizer) drops the sum, and an optimizer's ``step()`` raises. Forwards
        gather parameters as usual.

        Args:
            parameters: glob of names; gradients of other parameters are reduced as usual.
        """
        return self.params.sync.pause(self.params.sync.matching(parameters))

    @typed()
    def set_requires_grad_sync(self, sync: bool, parameters: str = "*") -> None:
        """Sets whether backwards reduce gradients. With False, each rank sums its unreduced gradients locally; this
        holds for plans without FSDP and with ZeRO-1.

        With ZeRO-2 and -3 every backward reduces gradients. True also resumes reduction over replicas
        (`set_requires_all_reduce`).

        Args:
            parameters: glob of names; others keep their setting.
        """
        self.params.sync.sync(sync, self.params.sync.matching(parameters))

    @typed()
    def set_requires_all_reduce(self, sync: bool, parameters: str = "*") -> None:
        """Sets whether backwards reduce gradients over the axes that replicate parameters (`shardc.hsdp`).

        With False, gradients are reduced over the sharding axes only, and each rank accumulates its shard as in
        `no_sync`. A parameter that no axis shards is then not reduced at all; plans without replicas are not affected.
        Gradients left unreduced by `no_sync` or `set_requires_grad_sync` stay so.

        Args:
            parameters: glob of names; others keep their setting.
        """
        self.params.sync.all_reduce(sync, self.params.sync.matching(parameters))

    def memory(self) -> MemoryUse:
        """Returns the bytes of collective results on this rank, planned and observed; see `MemoryUse`."""
        planned: dict[str, int] = {}
        # All programs share the memory: the largest need of each graph counts.
        for runner in self.cache.runners.values():
            for which, size in runner.planned().items():
                planned[which] = max(size, planned.get(which, 0))
        return self.cache.buffers.use(planned)

    @shares_errors
    def lower(self, *args: PyTree, **kwargs: PyTree) -> Any:
        """Compiles for example inputs at *global* shapes (on any device, or ``meta``) and returns the `Program`.

        After this, calls with other shapes, dtypes or constants raise, until lowered too; sizes in
        ``shardc.compile(dynamic=...)`` may vary. A change of mode, as by ``eval()``, compiles at the next call.
        """
        self.check()
        args, kwargs = targets_last(self.params.view, args, kwargs, self.spec.targets or ())
        check_kinds(self.cache.input_names(args, kwargs), pytree.tree_leaves((args, kwargs)), values=False)
        with self._compiles():
            program = self.cache.program_for(args, kwargs, needs_dumps=True)
        # Calls are looked up anew: earlier ones may have run programs that were not lowered.
        self.cache.explicit = True
        self.cache.calls.clear()
        # A program of dynamic sizes: entered for these sizes too, so that calls with shards of them find it.
        if program not in self.cache.programs.values():
            key = CacheKey(self.cache.signature(args, kwargs), program.guards, program.deferred)
            self.cache.programs[key] = program
        return program

    def shard_inputs(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Cuts global inputs into this rank's shards: tensors, or batches of any structure.

        A batch may be nested of lists, tuples, dicts, dataclasses and mappings such as a ``BatchEncoding``. It comes
        back in the same structure and classes. A dict whose keys are keywords of the model's ``forward`` (or the loss's
        targets) is cut as ``module(**batch)`` takes it.

        Returns:
            The shard for one argument, else a tuple; with keywords ``(args, kwargs)``. Targets of the loss that are
            given by name come last in the tuple.

        Raises:
            InputError: an input of another global shape had shards of the same shape, an input is marked
                `shardc.per_rank`, or an object of an unknown class holds tensors.
        """
        model, targets = self.params.view, self.spec.targets
        if len(args) == 1 and not kwargs:
            # A dict may be the model's keywords: `in_call` says which arguments the batch stands for.
            in_order, by_name = in_call(model, to_dicts(args[0]), targets)
            cut_args, cut_kwargs = self.map_inputs(in_order, by_name, self.cut_global)
            return from_dicts(args[0], cut_kwargs or cut_args[0])
        # Containers that pytree does not know are converted to dicts, and back afterwards.
        plain_args, plain_kwargs = to_dicts((args, kwargs))
        cut = self.map_inputs(plain_args, plain_kwargs, self.cut_global)
        out_args, out_kwargs = from_dicts((args, kwargs), cut)
        out_args, out_kwargs = targets_last(model, out_args, out_kwargs, targets or ())
        if out_kwargs:
            return out_args, out_kwargs
        return out_args[0] if len(out_args) == 1 else out_args

    @shares_errors
    @typed()
    def init_weights(self, fn: Callable[[nn.Module], Any] | None = None) -> None:
        """Initialises parameters and buffers shard by shard. The values are those that one device draws with the same
        seed.

        Args:
            fn: applied to every module as ``module.apply(fn)``; None calls each module's ``reset_parameters()``.

        Raises:
            InitError: an op cannot run shard by shard, or a tensor was not filled.
        """
        initialise(self, lambda model: nn.Module.apply(model, fn or reset_parameters), complete=True)

    @shares_errors
    @typed()
    def summon_full_params(self, writeback: bool = True, with_grads: bool = False) -> AbstractContextManager[None]:
        """Context manager: parameters are unsharded tensors. See `shardc.runtime.full_params.summon_full_params`."""
        self.check()
        if with_grads:
            self.params.sync.refuse("summon_full_params(with_grads=True)")
        self._meet("summon_full_params()")
        self.params.fresh |= writeback  # ranks compare the new values at the next call
        return self._summoned(writeback, with_grads)

    @contextmanager
    def _summoned(self, writeback: bool, with_grads: bool) -> Iterator[None]:
        """Implements the context manager of `summon_full_params`, after the checks."""
        with self.shares_errors(), ExitStack() as block:
            with self._waits():
                owner, spec = self.params.owner, self.spec
                block.enter_context(summon_full_params(owner, spec.stored, spec.rank, writeback, with_grads))
            yield

    @shares_errors
    @typed()
    def full_state_dict(self, device: torch.device | str | None = None, rank0_only: bool = False) -> dict[str, Any]:
        """Returns the unsharded model's state dict, of plain tensors. All ranks call it.

        Args:
            device: device of the tensors; by default their own.
            rank0_only: only the mesh's first rank gets the tensors (on the CPU by default), and others an empty dict.
                No other rank holds an unsharded tensor.

        Raises:
            MeshError: at once, if another rank does not call it; only on the ranks that do.
        """
        self.check()
        self._meet("full_state_dict()")
        with self._waits():
            if not rank0_only or self.spec.groups is None:
                return full_state_dict(self.params.owner, self.spec.stored, device)
            return first_state_dict(self.params.owner, self.spec.stored, self.spec.groups, device)

    @shares_errors
    @typed()
    def clip_grad_norm_(
        self,
        max_norm: Annotated[float, Range(0)],
        norm_type: Annotated[float, Range(0, above=True)] = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Clips the gradients by their global norm and returns it; see `shardc.runtime.gradients.clip_grad_norm_`.

        Raises:
            MeshError: on all ranks, if they are not all at this call.
        """
        self.params.sync.refuse("clip_grad_norm_()")
        spec = self.spec
        if spec.groups is None:
            return nn.utils.clip_grad_norm_(self.params.owner.parameters(), max_norm, norm_type, error_if_nonfinite)
        return clip_grad_norm_(
            self.params.owner, spec.stored, spec.groups, spec.device, max_norm, norm_type, error_if_nonfinite
        )
