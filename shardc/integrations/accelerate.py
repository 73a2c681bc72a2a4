"""Subclasses of accelerate's `Accelerator` and transformers' `Trainer` that train compiled modules, which are sharded
already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed.checkpoint as dcp
import transformers
from accelerate.data_loader import prepare_data_loader
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.utils.data import DataLoader
from transformers.trainer import SCHEDULER_NAME

from shardc.batches import batches, data_parts, padded, part_of_rank
from shardc.errors import InputError
from shardc.integrations.trl import replace_fused_head
from shardc.runtime.module import ShardedModule

OPTIMIZER_FOLDER = "optimizer_0"  # a folder that Trainer looks for


class Accelerator(accelerate.Accelerator):
    """An ``accelerate.Accelerator`` whose ``prepare`` takes a compiled module, which it does not wrap.

    Batches are split over the mesh axes that split the module's inputs; ranks that differ along other axes get the same
    rows. The module clips gradients. A loss returned by the model is that of all ranks' rows, so it needs no averaging.
    """

    _sharded: ShardedModule | None = None
    _cuts_sequences = False  # whether the caller cuts batches where the plan splits the sequence

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Works like ``Accelerator.prepare``, and accepts compiled modules too. Pass the module with, or before, the
        data loaders.
        """
        for module in args:
            if isinstance(module, ShardedModule):
                self.hold(module)
        return super().prepare(*args, device_placement=device_placement)

    def hold(self, module: ShardedModule) -> None:
        """Sets the compiled module whose mesh decides how batches are split.

        Raises:
            InputError: the module does not span all ranks, its plan splits the sequence, or mixed precision is float16.
        """
        spec = module.shardc.spec
        if spec.groups is None or spec.groups.whole.mesh.ranks != self.num_processes:
            raise InputError(
                f"the module was compiled for the mesh {spec.mesh}, and accelerate runs {self.num_processes} processes",
                fix="compile it for a DeviceMesh of all ranks that torchrun started",
            )
        if (sequence := _sequence_entries(module)) and not self._cuts_sequences:
            raise InputError(
                "the plan splits the sequence, and accelerate deals out whole sequences",
                plan_entry=sequence[0],
                fix="use Trainer of shardc.integrations.accelerate, or a loop over shardc.batches(loader, module)",
            )
        if self.mixed_precision not in ("no", "bf16"):
            raise InputError(
                f"mixed precision {self.mixed_precision!r} does not work with a compiled module",
                fix="use bf16, or add shardc.precision(param=torch.float16) to the plan",
            )
        self._sharded = module

    @property
    def shares(self) -> tuple[int, int]:
        """(Number of parts that each batch is split into, index of the part for this rank). Several ranks may get the
        same part.
        """
        if self._sharded is None:
            return self.num_processes, self.process_index
        return data_parts(self._sharded)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Returns a compiled module as it is. Other models are wrapped as accelerate does."""
        if not isinstance(model, ShardedModule):
            return super().prepare_model(model, device_placement, evaluation_mode)
        if self._sharded is None:  # a reference model may follow
            self.hold(model)
        if model not in self._models:
            self._models.append(model)
        return model

    def prepare_data_loader(
        self,
        data_loader: DataLoader,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., object] | None = None,
    ) -> Any:
        """Splits the batches of a loader into the parts of the plan (`shares`)."""
        parts, mine = self.shares
        if parts == self.num_processes or getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=parts,
            process_index=mine,
            split_batches=self.split_batches,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types.copy(),
            dispatch_batches=False,  # the library's dispatch counts every process
            even_batches=self.even_batches,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
        )
        self._dataloaders.append(prepared)
        return prepared

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Context manager like ``Accelerator.no_sync``, but a model in pipeline stages always reduces its gradients."""
        staged = isinstance(model, ShardedModule) and model.shardc.spec.stages
        with nullcontext() if staged else super().no_sync(model):
            yield

    def clip_grad_norm_(self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2) -> Any:
        """Clips gradients by their global norm, and returns the norm. For the parameters of the compiled module this
        takes one all-reduce; other parameters are left to accelerate.
        """
        parameters, mine = list(parameters), self._sharded
        if mine is None or {id(x) for x in parameters} != {id(x) for x in mine.parameters()}:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        return mine.shardc.clip_grad_norm_(float(max_norm), float(norm_type))

    def gather_for_metrics(self, input_data: object, use_gather_object: bool = False) -> Any:
        """Gathers the rows of all ranks, without the padding of the last batch.

        If ranks share rows, each row counts once, and a vector with a value for each row is gathered (such as the
        losses that ``Trainer`` repeats).

        Raises:
            InputError: ranks share rows, and ``input_data`` is no vector.
        """
        parts, _ = self.shares
        if parts == self.num_processes or self._sharded is None:
            return super().gather_for_metrics(input_data, use_gather_object)
        if not isinstance(input_data, torch.Tensor) or input_data.dim() != 1:
            raise InputError(
                f"{self.num_processes} ranks hold {parts} different parts of a batch, and gather_for_metrics would "
                "count rows several times",
                fix="evaluate with prediction_loss_only=True, or on a mesh whose axes all split the batch",
            )
        by_rank: Any = self.gather(input_data)
        first = {part: rank for rank, part in reversed(part_of_rank(self._sharded).items())}
        rows = torch.cat([by_rank.view(self.num_processes, -1)[first[part]] for part in range(parts)])
        ends = self.gradient_state.end_of_dataloader and self.gradient_state.remainder > 0
        return rows[: self.gradient_state.remainder] if ends else rows

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Returns the full state dict of a compiled module, on the CPU, and that of another model as accelerate does.
        All ranks call it.
        """
        if isinstance(model, ShardedModule):
            return model.shardc.full_state_dict("cpu")
        return super().get_state_dict(model, unwrap)


class Trainer(transformers.Trainer):
    """A ``transformers.Trainer`` for a module from `shardc.compile`; to combine it with another Trainer, put it first.

    Losses, also logged ones, are those of the global batch. The effective batch is ``per_device_train_batch_size``
    times the number of parts of the batch: two on dp=2, tp=2. Checkpoints consist of the model's safetensors and the
    optimizer's state by ``torch.distributed.checkpoint``, so that training resumes on another mesh.

    Attributes:
        pad: name of a tensor of a batch -> the value to pad it with if its lengths differ between ranks, as collators
            pad the rows that they see. ``input_ids`` are padded with the tokenizer's ``pad_token_id``, or 0.

    Raises:
        InputError: the model is not from `shardc.compile`, or an option of ``args`` is not supported.
    """

    model: Any
    lr_scheduler: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        names = ("attention_mask", "token_type_ids", "position_ids", "completion_mask")
        token = getattr(self.processing_class, "pad_token_id", None)
        self.pad: dict[str, int | float] = dict.fromkeys(names, 0) | {"input_ids": token or 0, "labels": -100}
        self._parts = batches([], self.model, own_rows=True)
        for model in (self.model, getattr(self, "ref_model", None)):
            replace_fused_head(model)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> Any:
        """Pads a batch to the longest of all ranks, because all must call the model with the same shapes."""
        inputs = super()._prepare_inputs(inputs)
        state = self.model.shardc
        if isinstance(inputs, Mapping) and not state.spec.groups.consistency.alone:
            named = [(name, x) for name, x in inputs.items() if isinstance(x, torch.Tensor)]
            pad = {name: value for name, value in self.pad.items() if name in inputs}
            inputs |= dict(padded(state, named, pad))
        return inputs

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if not isinstance(self.model, ShardedModule):
            raise InputError("the model is not from shardc.compile", fix="pass what shardc.compile returned")
        if self.args.n_gpu > 1 or self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise InputError(
                "TrainingArguments ask for DataParallel, FSDP or DeepSpeed, and the model is sharded already",
                fix="leave fsdp= and deepspeed= out, and start the ranks with torchrun",
            )
        if not self.args.average_tokens_across_devices:
            raise InputError(
                "average_tokens_across_devices=False: the loss of a compiled module is that of all ranks' tokens",
                fix="leave average_tokens_across_devices at True",
            )
        self.accelerator.__class__ = Accelerator
        self.accelerator._cuts_sequences = not _of_trl(self)
        self.accelerator.hold(self.model)

    def get_tp_size(self) -> int:
        """Returns the number of ranks that get the same rows of a batch; the Trainer takes them for tensor-parallel
        ranks.
        """
        return self.accelerator.num_processes // self.accelerator.shares[0]

    def compute_loss_context_manager(self) -> Any:
        stack = super().compute_loss_context_manager()
        stack.enter_context(self.accelerator.autocast())
        return stack

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if _sequence_entries(self.model):  # cut here: Trainer counts tokens of whole sequences before
            inputs = self._parts.part(inputs)
        out = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        in_program = not _of_trl(self) and self.compute_loss_func is None and self.label_smoother is None
        if not (in_program and self.model_accepts_loss_kwargs and num_items_in_batch is not None):
            return out
        # Trainer multiplies by the number of parts, for DDP's mean; here the loss is of all parts already.
        loss = (out[0] if return_outputs else out) / self.accelerator.shares[0]
        return (loss, out[1]) if return_outputs else loss

    def _save(self, output_dir: str | None = None, state_dict: object = None) -> None:
        folder = output_dir or self.args.output_dir
        if not hasattr(self.model.shardc, "load_pretrained"):
            return super()._save(folder, self.model.shardc.full_state_dict("cpu"))
        super()._save(folder, {})  # all but the weights
        self.model.save_pretrained(folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not hasattr(self.model.shardc, "load_pretrained"):
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.model.shardc.load_pretrained(resume_from_checkpoint)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = get_optimizer_state_dict(self.model, self._own_optimizer())
        dcp.save({"optimizer": state}, checkpoint_id=Path(output_dir, OPTIMIZER_FOLDER))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not Path(checkpoint, OPTIMIZER_FOLDER).is_dir():
            return
        optimizer = self._own_optimizer()
        state = {"optimizer": get_optimizer_state_dict(self.model, optimizer)}
        dcp.load(state, checkpoint_id=Path(checkpoint, OPTIMIZER_FOLDER))
        set_optimizer_state_dict(self.model, optimizer, state["optimizer"])
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, SCHEDULER_NAME), weights_only=True))

    def _own_optimizer(self) -> Any:
        """Return the torch optimizer that accelerate wrapped."""
        return getattr(self.optimizer, "optimizer", self.optimizer)


def _sequence_entries(module: ShardedModule) -> list[str]:
    """Returns the plan's entries that split the sequence, as text."""
    build: Any = module.shardc.cache.build
    return [str(entry) for entry in build.plan.entries if entry.sequence is not None]


def _of_trl(trainer: object) -> bool:
    """Whether a Trainer is one of TRL's, which computes losses and metrics of whole sequences itself."""
    return any(cls.__module__.startswith("trl.") for cls in type(trainer).__mro__)
