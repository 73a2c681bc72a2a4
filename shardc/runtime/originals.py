"""Warns where a model that was compiled is trained, or loaded, in the place of the compiled module."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from weakref import ReferenceType, WeakSet, ref

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from shardc.errors import ShardcWarning


@dataclass(eq=False)
class _Pair:
    """A compiled module, and what has been told of the model that it was made of."""

    module: ReferenceType[nn.Module]
    warned: set[str] = field(default_factory=set)

    def warn(self, what: str, fix: str) -> None:
        if fix not in self.warned:
            self.warned.add(fix)
            warnings.warn(ShardcWarning(f"{what}; {fix}"), stacklevel=4)


class _Originals:
    """The parameters of models that were compiled, held weakly, and the optimizers that were looked at."""

    def __init__(self) -> None:
        self._pairs: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._seen: WeakSet[Optimizer] = WeakSet()
        self._hooked = False

    def note(self, model: nn.Module, module: nn.Module) -> None:
        """Watches for uses of ``model`` in place of ``module``, which `shardc.compile` made of it."""
        pair = _Pair(ref(module))
        for param in model.parameters():
            self._pairs[param] = pair
        for part in model.modules():
            if _loaded not in part._load_state_dict_post_hooks.values():
                part.register_load_state_dict_post_hook(_loaded)
        self._seen.clear()
        if not self._hooked:
            register_optimizer_step_pre_hook(self.before_step)
            self._hooked = True

    def pairs(self, params: Iterable[Tensor]) -> list[tuple[_Pair, nn.Module]]:
        """For which compiled modules ``params`` are the parameters of the model."""
        pairs = {id(pair): pair for pair in map(self._pairs.get, params) if pair is not None}
        return [(pair, module) for pair in pairs.values() if (module := pair.module()) is not None]

    def before_step(self, optimizer: Optimizer, *_: object) -> None:
        """Warns at the first step that has gradients in the module, and none in the parameters that it would change."""
        if optimizer in self._seen:
            return
        params = [param for group in optimizer.param_groups for param in group["params"]]
        trains = any(param.grad is not None for param in params)
        idle = False
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
        if not idle:  # else nobody has trained yet: look again
            self._seen.add(optimizer)


_originals = _Originals()
note_original = _originals.note


def _loaded(part: nn.Module, _: object) -> None:
    """A hook of the modules of models that were compiled; a function, so that the model can be pickled."""
    for pair, _module in _originals.pairs(part.parameters()):
        pair.warn(
            "values were loaded into the model that was compiled: the compiled module has parameters of its own, and "
            "keeps its values",
            "load them into the compiled module: module.load_state_dict(...); or load before shardc.compile",
        )
