"""Uses of a model's original parameters after it was compiled: they raise a warning or reach the new parameters.

After `shardc.compile`, which leaves the model as it is, training or loading the model instead of the compiled module
warns. After `shardc.shard`, which replaces parameters, an optimizer of old ones gets the new ones at its next step, and
other uses of an old one are forwarded.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from shardc._compat import pytree
from shardc.errors import InputError, ShardcWarning


@dataclass(eq=False)
class _Pair:
    """A compiled module, held weakly, and which warnings were given about the model that it was compiled from.

    Args:
        replaced: whether the model is the compiled module itself, with new parameters (`shardc.shard`).
        warned: the ``fix`` texts of warnings given so far.
    """

    module: ReferenceType[nn.Module]
    replaced: bool
    warned: set[str] = field(default_factory=set)

    def warn(self, what: str, fix: str) -> None:
        """Gives the warning ``what; fix``, once for each ``fix``."""
        if fix not in self.warned:
            self.warned.add(fix)
            warnings.warn(ShardcWarning(f"{what}; {fix}"), stacklevel=4)


def _of_new(name: str) -> Any:
    """Returns a property for replaced parameters: it reads and writes the attribute ``name`` of the new parameter
    instead.
    """
    return property(
        lambda self: getattr(_originals.new(self), name),
        lambda self, value: setattr(_originals.new(self), name, value),
        lambda self: delattr(_originals.new(self), name),
    )


class Replaced(nn.Parameter):
    """Class of a parameter that `shardc.shard` has replaced. Ops on the old parameter run on the new one."""

    grad, data = _of_new("grad"), _of_new("data")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(cls, _originals.new, (args, kwargs or {}))
        return func(*args, **kwargs)


class _Originals:
    """Registry of the parameters that models had before they were compiled, held weakly, to detect that they are used
    afterwards. Also remembers which optimizers were checked for them.
    """

    def __init__(self) -> None:
        # Original parameter -> (`_Pair` of its compiled module, name of the parameter).
        self._pairs: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._seen: WeakKeyDictionary[Optimizer, list[int]] = WeakKeyDictionary()  # number of parameters per group
        self._hooked = False  # whether `before_step` runs before the steps of all optimizers

    def note(self, model: nn.Module, module: nn.Module, params: Mapping[str, Tensor]) -> None:
        """Starts to watch ``params``, the parameters of ``model`` by name, for uses after compile. ``module`` is the
        compiled module; for `shardc.shard` it is ``model`` itself.
        """
        pair = _Pair(ref(module), replaced=module is model)
        for name, param in params.items():
            self._pairs[param] = pair, name
            if pair.replaced and type(param) is nn.Parameter:  # a subclass keeps its own methods
                param.__class__ = Replaced
        # If the model is the compiled module, loading into it is right.
        for part in () if pair.replaced else model.modules():
            if _loaded not in part._load_state_dict_post_hooks.values():
                part.register_load_state_dict_post_hook(_loaded)
        self._seen.clear()  # optimizers that were fine may have these parameters
        if not self._hooked:
            register_optimizer_step_pre_hook(self.before_step)
            self._hooked = True

    def new(self, param: Tensor) -> Tensor:
        """Returns the parameter that replaced the original ``param``. Raises InputError if the module with the new
        one was deleted.
        """
        pair, name = self._pairs[param]
        module: nn.Module | None = pair.module()
        if module is None:
            raise InputError(
                f"parameter {name!r} was replaced by shardc.shard, and its model is gone", fix="keep the model"
            )
        return module.get_parameter(name)

    def pairs(self, params: Iterable[Tensor]) -> list[tuple[_Pair, nn.Module]]:
        """Returns (`_Pair`, compiled module) for each compiled module that was made from a model with one of
        ``params``.
        """
        pairs = {id(noted[0]): noted[0] for noted in map(self._pairs.get, params) if noted is not None}
        return [(pair, module) for pair in pairs.values() if (module := pair.module()) is not None]

    def before_step(self, optimizer: Optimizer, *_: object) -> None:
        """Hook before an optimizer's step. Puts new parameters in place of those that `shardc.shard` replaced
        (`_replace`). Warns if the optimizer has parameters of a model that was compiled, which get no gradients, while
        the compiled module's have some.
        """
        # Each optimizer is looked at once, and again if parameters were added.
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        if self._seen.get(optimizer) == sizes:
            return
        self._replace(optimizer)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        trains = any(param.grad is not None for param in params)  # the user trains the original model on purpose
        idle = False  # whether neither the model nor the compiled module has gradients yet
        for pair, module in () if trains else self.pairs(params):
            idle = True
            if any(param.grad is not None for param in module.parameters()):
                pair.warn(
                    f"the optimizer {type(optimizer).__name__} has the parameters of the model that was compiled, not "
                    "those of the compiled module: no step of it trains the module",
                    f"make the optimizer of the compiled module's parameters: {type(optimizer).__name__}"
                    "(module.parameters(), ...)",
                )
                idle = False
        if not idle:  # else nothing was trained yet: check again
            self._seen[optimizer] = sizes

    def _replace(self, optimizer: Optimizer) -> None:
        """Exchanges, in place, the parameters in ``optimizer`` that `shardc.shard` has replaced for the new ones.
        Raises InputError if the optimizer has state for one already.
        """
        for group in optimizer.param_groups:
            for at, param in enumerate(group["params"]):
                pair, name = self._pairs.get(param, (None, ""))
                module = pair.module() if pair is not None and pair.replaced else None
                if module is None:  # not an original parameter, not of `shardc.shard`, or the module was deleted
                    continue
                kind = type(optimizer).__name__
                if optimizer.state.get(param):
                    raise InputError(
                        f"the optimizer {kind} has state of parameter {name!r} from before shardc.shard, for the whole "
                        "parameter and not for its shards",
                        fix=f"make it again: {kind}(module.parameters(), ...); load its state with "
                        "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict",
                    )
                group["params"][at] = module.get_parameter(name)


_originals = _Originals()
note_original = _originals.note


def _loaded(part: nn.Module, _: object) -> None:
    """Hook on the original model's modules: warns that loaded values do not reach the compiled module."""
    for pair, _module in _originals.pairs(part.parameters()):
        pair.warn(
            "values were loaded into the model that was compiled: the compiled module has parameters of its own, and "
            "keeps its values",
            "load them into the compiled module: module.load_state_dict(...); or load before shardc.compile",
        )
