"""Adapters of peft on a Llama that is sharded: trained as on one device, saved as the library reads them."""

from __future__ import annotations

import os
import tempfile
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from safetensors.torch import load_file
from torch import nn

from shardc.errors import InputError
from tests.integrations.loops import compiled
from tests.integrations.test_trainer import llama
from tests.ranks import run_ranks

KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "DoRA": {"use_dora": True},
    "rank-stabilised, biases": {"use_rslora": True, "bias": "lora_only"},
    "with a trained head": {"modules_to_save": ["lm_head"]},
}


def adapted(kind: str) -> nn.Module:
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **KINDS[kind])
    return peft.get_peft_model(llama(), config, autocast_adapter_dtype=False)


def shared_folder() -> str:
    """A new folder, the same on all ranks."""
    name = [tempfile.mkdtemp()]
    dist.broadcast_object_list(name)
    return name[0]


def trains_and_saves(kind: str) -> None:
    import peft

    source, module = adapted(kind), compiled("fsdp", adapted(kind), loss=None)
    ids = torch.randint(1, 60, (4, 8), generator=torch.Generator().manual_seed(1))
    batch = module.shard_inputs(hf.BatchEncoding({"input_ids": ids, "labels": ids}))
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], 0.01) for m in (module, source)]
    for _ in range(3):
        values = module(**batch).loss, source(input_ids=ids, labels=ids).loss
        torch.testing.assert_close(*values)  # transformers computes losses in float32
        for value, optimizer in zip(values, optimizers, strict=True):
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, whole in module.full_state_dict().items():
        torch.testing.assert_close(whole, source.state_dict()[name], rtol=1e-5, atol=1e-6)
    theirs, ours = shared_folder(), shared_folder()
    module.save_pretrained(ours)
    if dist.get_rank() == 0:
        source.save_pretrained(theirs)
        assert sorted(os.listdir(ours)) == sorted(os.listdir(theirs))
        files = [load_file(f"{folder}/adapter_model.safetensors") for folder in (ours, theirs)]
        torch.testing.assert_close(*files, rtol=1e-5, atol=1e-6)
        again: Any = peft.PeftModel.from_pretrained(llama(), ours)
        logits = again(input_ids=ids).logits, source(input_ids=ids).logits
        torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-6)
    dist.barrier()


def generation_is_refused() -> None:
    module = compiled("fsdp", adapted("LoRA"), loss=None)
    with pytest.raises(InputError, match="a part of a compiled module"):
        module.generate(input_ids=torch.ones(1, 3, dtype=torch.long), max_new_tokens=1)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_trains_and_is_saved(kind: str) -> None:
    pytest.importorskip("peft")
    run_ranks(2, partial(trains_and_saves, kind))


def test_generation_is_refused() -> None:
    pytest.importorskip("peft")
    run_ranks(2, generation_is_refused)
