"""`ShardcStrategy`: trains a ``LightningModule`` that holds compiled modules with ``lightning.pytorch.Trainer``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from shardc.batches import data_parts
from shardc.errors import InputError
from shardc.runtime.module import ShardedModule

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class ShardcStrategy(DDPStrategy):
    """A strategy for a ``LightningModule`` with modules from `shardc.compile`, which it does not wrap.

    Write ``Trainer(strategy=ShardcStrategy(), devices=...)``, and compile in ``configure_model``. Samplers deal out the
    parts of the plan (`shardc.data_parts`). Checkpoints are Lightning's own files, of whole tensors, so they load on
    another mesh, and into the plain model. All other parameters of the ``LightningModule`` have to be frozen.

    Raises:
        InputError: no module is from `shardc.compile`, or parameters beside it are trained.
    """

    def setup(self, trainer: Any) -> None:
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        inside = {id(param) for _, module in self._compiled() for param in module.parameters()}
        for name, param in self.model.named_parameters():
            if param.requires_grad and id(param) not in inside:
                raise InputError(
                    f"parameter {name!r} of {type(self.model).__name__} is in no compiled module, and nothing would "
                    "reduce its gradient",
                    fix="move it into the model before shardc.compile, or freeze it: requires_grad_(False)",
                )
        self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        parts, mine = data_parts(next(self._compiled())[1])
        return {"num_replicas": parts, "rank": mine}

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the state dict with whole tensors, on the CPU. All ranks call it."""
        assert self.lightning_module is not None
        out = self.lightning_module.state_dict()
        for path, module in self._compiled():
            out |= {f"{path}.{name}": value for name, value in module.shardc.full_state_dict("cpu").items()}
        return out

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads the whole tensors of a checkpoint, each rank its shards."""
        assert self.lightning_module is not None
        rest = dict(checkpoint["state_dict"])
        for path, module in self._compiled():
            inner = {name: rest.pop(name) for name in list(rest) if name.startswith(f"{path}.")}
            module.load_state_dict({name[len(path) + 1 :]: x for name, x in inner.items()}, strict=strict)
        current = self.lightning_module.state_dict()
        self.lightning_module.load_state_dict({**current, **rest}, strict=strict)

    def optimizer_state(self, optimizer: Any) -> dict[str, Tensor]:
        """Returns an optimizer's state with whole tensors, by the parameters' names. All ranks call it."""
        assert self.lightning_module is not None
        return get_optimizer_state_dict(self.lightning_module, self._unwrapped(optimizer), options=_WHOLE)  # type: ignore[return-value]

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the optimizers' states from a checkpoint, each rank its shards."""
        assert self.lightning_module is not None
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            set_optimizer_state_dict(self.lightning_module, self._unwrapped(optimizer), state, options=_WHOLE)

    def _compiled(self) -> Iterator[tuple[str, ShardedModule]]:
        """Yields (path, module) of the compiled modules in the LightningModule; InputError if there are none."""
        assert self.lightning_module is not None
        modules: list[tuple[str, nn.Module]] = list(self.lightning_module.named_modules())
        compiled = [(path, module) for path, module in modules if isinstance(module, ShardedModule)]
        if not compiled:
            raise InputError(
                f"{type(self.lightning_module).__name__} has no module from shardc.compile",
                fix="in configure_model, write self.model = shardc.compile(self.model, shardc.mesh(), plan)",
            )
        yield from compiled

    def _unwrapped(self, optimizer: Any) -> Any:
        """Returns the torch optimizer that Lightning wrapped."""
        return getattr(optimizer, "_optimizer", optimizer)
