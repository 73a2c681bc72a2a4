"""Compiled ``transformers`` models: loading and saving the library's checkpoints shard by shard, and ``generate``."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from shardc.errors import InputError, MeshError, ShardcWarning
from shardc.integrations import safetensors
from shardc.runtime.events import Event
from shardc.runtime.full_params import unshard_on_first
from shardc.runtime.module import ShardedModule
from shardc.runtime.namespace import Namespace, shares_errors
from shardc.runtime.sharded_init import Lazy, part
from shardc.runtime.state import State

_LENGTHS = 'name: {1: "length"} for name in ("input_ids", "attention_mask", "position_ids")'
_LENGTHS_OF_DECODERS = '"decoder_input_ids": {1: "length"}'
_NOT_OF_ENCODERS = ("decoder_", "cross_attn", "use_cache", "cache", "past_key_values")  # as in `generate`


class PretrainedNamespace(Namespace):
    """``module.shardc`` of a compiled `transformers.PreTrainedModel`: adds loading of checkpoints."""

    @shares_errors
    def load_pretrained(self, folder: str | Path) -> None:
        """Loads a ``transformers`` checkpoint; each rank reads its shards, and holds at most one full tensor.

        The model may be on ``meta``: parameters get memory as they are read. Values are cast to the module's dtypes.
        Buffers that are not in the files (rotary frequencies) are computed as ``from_pretrained`` does. Parameters that
        the files lack are initialised by it, from the CPU's generator, and are unsharded on each rank until this
        returns.

        Args:
            folder: safetensors files, one or several with an index.

        Raises:
            InputError: there are no such files.
            RuntimeError: the library's own: a tensor has another shape. Missing and unexpected tensors are warnings.
        """
        if self.spec.groups is None:
            raise MeshError(f"the module was compiled for the abstract mesh {self.spec.mesh} and holds no shards")
        self.check()
        owner, cls = self.params.owner, type(self.params.view)
        dtypes = {param.dtype for param in owner.parameters() if param.is_floating_point()}
        source = cls.from_pretrained(
            None,
            config=copy.deepcopy(owner.config),
            state_dict=safetensors.read_folder(Path(folder)),
            dtype=reduce(torch.promote_types, dtypes) if dtypes else None,
        )
        fresh: dict[int, Tensor] = {}
        for name, buffer in list(owner.named_buffers(remove_duplicate=False)):
            if id(buffer) not in fresh:
                read = source.get_buffer(name)
                value = read.value() if isinstance(read, Lazy) else read
                fresh[id(buffer)] = value.to(self.spec.device, buffer.dtype)
            path, _, key = name.rpartition(".")
            owner.get_submodule(path)._buffers[key] = fresh[id(buffer)]
        buffers = dict(owner.named_buffers(remove_duplicate=False))
        owner.load_state_dict({name: buffers.get(name, value) for name, value in source.state_dict().items()})
        if (Path(folder) / "generation_config.json").is_file():
            owner.generation_config = GenerationConfig.from_pretrained(folder)
        if (used := getattr(source, "_weight_conversions", None)) is not None:
            owner._weight_conversions = used


class ShardedPretrained(ShardedModule):
    """Like `ShardedModule`, for models of class `transformers.PreTrainedModel`."""

    def save_pretrained(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: Mapping[str, Any] | None = None,
        max_shard_size: int | str = "50GB",
        save_original_format: bool = True,
        **kwargs: Any,
    ) -> None:
        """Writes a checkpoint that the model's own ``from_pretrained`` loads. All ranks call it.

        The mesh's first rank writes. Each parameter is gathered and written before the next, so no rank holds more than
        its shards and one full tensor. The files are complete when a rank returns.

        Args:
            save_directory: a folder that the first rank can write to.
            state_dict: full tensors to write instead; written by the first rank, and not collective.
            max_shard_size: largest size of a file, as in ``transformers``.
            save_original_format: whether to use names and shapes of the checkpoints that the library publishes.

        Raises:
            InputError: an argument is not supported.
            MeshError: another rank does not call it.
        """
        state = self.shardc
        cls: Any = type(state.params.view)
        if state.spec.groups is None or state_dict is not None:
            kwargs |= {"max_shard_size": max_shard_size, "save_original_format": save_original_format}
            return cls.save_pretrained(state.params.view, save_directory, is_main_process, state_dict, **kwargs)
        if unsupported := {
            key for key, value in kwargs.items() if value and key not in ("safe_serialization", "token")
        }:
            raise InputError(
                f"save_pretrained of a compiled module takes no {' and no '.join(sorted(unsupported))}",
                fix="save to a folder first; huggingface_hub.upload_folder(folder_path=...) uploads it",
            )
        with state.shares_errors():
            state.check()
            state.spec.groups.consistency.enter(Event((("event", f"save_pretrained of {state.name}"),)), ask=True)
            writes = state.spec.groups.first
            # Config, generation config and code of the model's own; without tensors it writes no others.
            cls.save_pretrained(state.params.view, save_directory, writes, {}, save_original_format=False)
            tensors = _unsharded_tensors(state, save_original_format)
            split = split_state_dict_into_shards_factory(
                tensors,
                get_storage_size=lambda tensor: tensor.numel() * tensor.itemsize,
                filename_pattern="model{suffix}.safetensors",
                max_shard_size=max_shard_size,
            )
            folder = Path(save_directory)
            if writes:
                safetensors.forget(folder, split.filename_to_tensors)
            for file, names in split.filename_to_tensors.items():
                safetensors.write_file(folder / file if writes else None, {name: tensors[name] for name in names})
            if writes and split.is_sharded:
                index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
                (folder / safetensors.INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
            state.spec.groups.consistency.enter(
                Event((("event", f"end of save_pretrained of {state.name}"),)), ask=True
            )

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generates tokens as the model's own method; each rank passes its rows, and gets their tokens.

        All ranks pass equally many rows of equal length; under a plan that splits no rows (tensor parallelism), the
        same rows, with one seed for sampling. By default there is no cache: each token runs the whole sequence (that of
        the decoder in an encoder-decoder model).

        Warns:
            ShardcWarning: each length compiles a program; the text says how to compile one for all lengths.
        """
        kwargs.setdefault("use_cache", False)
        model = self.shardc.params.view
        if not self.shardc.cache.build.dynamic.names:
            names = _LENGTHS_OF_DECODERS if model.config.is_encoder_decoder else _LENGTHS
            text = (
                f"{type(model).__name__}.generate: a program is compiled for each length of the sequence; for one "
                f"for all lengths, pass dynamic={{{names}}} to compile"
            )
            warnings.warn(ShardcWarning(text), stacklevel=2)
        return super().generate(*args, **kwargs)  # type: ignore[misc]

    def _has_unfinished_sequences(self, this_peer_finished: bool, synced_gpus: bool, device: torch.device) -> bool:
        """Returns whether any rank has unfinished sequences. ``generate`` asks this before each token; ranks that are
        finished go on with padding.

        All ranks run the same program, so none may stop before the others.
        """
        groups = self.shardc.spec.groups
        return not this_peer_finished if groups is None else groups.any(not this_peer_finished)

    def _prepare_text_encoder_decoder_kwargs_for_generation(
        self, inputs_tensor: Tensor, model_kwargs: dict[str, Any], model_input_name: str, generation_config: Any
    ) -> dict[str, Any]:
        """Returns ``model_kwargs`` with the encoder's outputs; called by ``generate``, once, before the first token.

        The encoder is sharded and cannot run separately: its states come from a call with the decoder's first token.
        """
        rows = torch.ones((len(inputs_tensor), 1), dtype=torch.int64, device=inputs_tensor.device)
        inputs = {name: x for name, x in model_kwargs.items() if not name.startswith(_NOT_OF_ENCODERS)}
        inputs |= {model_input_name: inputs_tensor, "use_cache": False, "return_dict": True}
        inputs |= {"decoder_input_ids": rows * generation_config._decoder_start_token_tensor.view(-1, 1)}
        flags = ("output_attentions", "output_hidden_states")
        out = self(**inputs, **{name: True for name in flags if getattr(generation_config, name)})
        states = (out.encoder_last_hidden_state, out.encoder_hidden_states, out.encoder_attentions)
        return model_kwargs | {"encoder_outputs": BaseModelOutput(*states)}

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], mode: object, batch_size: int, *args: Any
    ) -> None:
        """Called by ``generate`` before the first token: adds an attention mask to ``model_kwargs``, in place, if
        another rank has one and this rank none.

        The library omits a mask of ones, while rows of other ranks may have padding.
        """
        groups, mask = self.shardc.spec.groups, model_kwargs.get("attention_mask")
        if groups is not None and groups.any(mask is not None) and mask is None:
            rows = batch_size * max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
            length = generation_config._mask_length
            model_kwargs["attention_mask"] = torch.ones(rows, length, dtype=torch.int64, device=self.shardc.spec.device)
        super()._prepare_cache_for_generation(generation_config, model_kwargs, mode, batch_size, *args)  # type: ignore[misc]


def _unsharded_tensors(state: State, original_format: bool) -> dict[str, Lazy]:
    """Maps the name of each tensor of a checkpoint to a `Lazy`. Reading a `Lazy` gathers the tensor to the first
    rank; all ranks must do so.
    """
    present: Any = state.params.present()
    ignored = set(present._keys_to_ignore_on_save or ())
    metas = {name: meta for name, meta in present.state_dict().items() if name not in ignored}
    names = {id(param): name for name, param in state.params.owner.named_parameters()}
    values = state.params.owner.state_dict(keep_vars=True)
    last: dict[str, Tensor] = {}  # several tensors of a file may be parts of one parameter

    def gathered(name: str) -> Tensor:
        if name not in last:
            last.clear()
            value = values[name]
            if isinstance(value, DTensor):
                assert state.spec.groups is not None
                last[name] = unshard_on_first(value, state.spec.stored[names[id(value)]], state.spec.groups)
            else:
                last[name] = value.detach()
        return last[name]

    def lazy(name: str, meta: Tensor) -> Lazy:
        return Lazy(meta, lambda index: part(gathered(name), index))

    untied = remove_tied_weights_from_state_dict(metas, present)
    tensors: Any = {name: lazy(name, meta) for name, meta in untied.items()}
    return revert_weight_conversion(state.params.view, tensors) if original_format else tensors
