"""`save_pretrained` of compiled models of peft, diffusers and others: the first rank writes whole tensors."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from shardc.runtime.events import Event
from shardc.runtime.full_params import unshard_on_first
from shardc.runtime.module import ShardedModule


class ShardedSaving(ShardedModule):
    """A `ShardedModule` for models whose library gives them a ``save_pretrained`` that writes ``self.state_dict()``.
    Whole tensors are written.
    """

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Writes what the model's own ``save_pretrained`` writes, with whole tensors. All ranks call it.

        The mesh's first rank gathers the tensors to its CPU and writes; of peft's models those of the adapter alone.
        The files are complete when a rank returns.

        Args:
            save_directory: a folder that the first rank can write to.
            args, kwargs: the method's other arguments.

        Returns:
            What the method returns on the first rank; None on the others.

        Raises:
            MeshError: another rank does not call it.
        """
        state, out = self.shardc, None
        save: Any = super().save_pretrained  # type: ignore[misc]
        if state.spec.groups is None or kwargs.get("state_dict") is not None:
            return save(save_directory, *args, **kwargs)
        consistency = state.spec.groups.consistency
        with state.shares_errors():
            state.check()
            consistency.enter(Event((("event", f"save_pretrained of {state.name}"),)), ask=True)
            names = {id(param): name for name, param in self.named_parameters()}
            values, gathered, whole = self.state_dict(keep_vars=True), {}, {}
            for name, value in _written(self, values).items():
                if isinstance(value, DTensor) and id(value) not in gathered:
                    storage = state.spec.stored[names[id(value)]]
                    gathered[id(value)] = unshard_on_first(value, storage, state.spec.groups)
                whole[name] = gathered.get(id(value), value.detach().cpu() if isinstance(value, Tensor) else value)
            if state.spec.groups.first:
                vars(self)["state_dict"] = lambda *args, **kwargs: whole
                try:
                    out = save(save_directory, *args, **kwargs)
                finally:
                    del vars(self)["state_dict"]
            consistency.enter(Event((("event", f"end of save_pretrained of {state.name}"),)), ask=True)
        return out


def _written(model: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of a state dict that ``save_pretrained`` will write: all, or for a model of peft only its
    adapters.
    """
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return values
    written: set[int] = set()
    for name in model.peft_config:
        written |= {id(x) for x in peft.get_peft_model_state_dict(model, values, name).values()}
    return {name: value for name, value in values.items() if id(value) in written}
