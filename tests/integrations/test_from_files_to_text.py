"""The whole way of a Hugging Face model: files, shards, training, a checkpoint on another mesh, text.

Each station has tests of its own; here one run takes them all, and equals one process without shardc at each.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor

import shardc
from tests.integrations.test_hf_files import peak_bytes
from tests.integrations.test_trainer import SIZES, arguments, forget, launched, logged, on_mesh, rows, same_lines
from tests.ranks import run_ranks

CONFIG = SIZES | {"eos_token_id": None, "bos_token_id": None}
SCHEDULE = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
SCHEDULE |= {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "prediction_loss_only": True}
TEXT: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
Lines = list[tuple[float, ...]]


def llama() -> hf.PreTrainedModel:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**CONFIG)).double()


def prompts() -> dict[str, Tensor]:
    """Two rows, one of them padded on the left."""
    ids = torch.tensor([[0, 0, 7, 11], [5, 3, 9, 2]])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def data(model: Any) -> dict[str, Any]:
    return {"train_dataset": rows(model, 40), "eval_dataset": rows(model, 8)}


def one_process(published: Path) -> tuple[Lines, Tensor]:
    """What the library logs, and then generates, by itself."""
    model = hf.LlamaForCausalLM.from_pretrained(published, dtype=torch.float64)
    with tempfile.TemporaryDirectory() as folder:
        lines = logged(hf.Trainer(model, arguments(folder, 1, **SCHEDULE), **data(model)))
    forget()
    return lines, model.eval().generate(**prompts(), **TEXT)


def loaded(plan: str, published: Path) -> Any:
    """The files in shards; loading them took no more than the shards and one tensor."""
    with torch.device("meta"):
        model = llama()
    mesh, said = on_mesh(plan, model)
    module = shardc.compile(model, mesh, said, backend="eager")
    peak = peak_bytes(lambda: module.load_pretrained(published), published)
    shards = sum(param.to_local().nbytes for param in module.parameters())
    sizes = [param.numel() * param.itemsize for param in module.parameters()]
    assert shards < peak < shards + max(sizes) + 2000 < sum(sizes), (shards, peak, max(sizes), sum(sizes))
    return module


def tunes(work: Path, plan: str, expected: Lines) -> None:
    trainer = launched(loaded(plan, work / "published"), plan, work / "tuned", SCHEDULE, data)
    same_lines(logged(trainer), expected)
    forget()


def goes_on(work: Path, plan: str, expected: Lines, text: Tensor) -> None:
    """From the checkpoint in the middle to the end of training, then to files and text."""
    trainer = launched(loaded(plan, work / "published"), plan, work / "resumed", SCHEDULE, data)
    same_lines(logged(trainer, resume=str(work / "tuned" / "checkpoint-2")), expected)
    trainer.save_model(str(work / "final"))
    parts, part = trainer.accelerator.shares
    mine = {name: x.chunk(parts)[part] for name, x in prompts().items()}
    ours = trainer.model.eval().generate(**mine, **TEXT)
    assert torch.equal(ours, text.chunk(parts)[part]), (ours, text)
    forget()
    dist.barrier()


@pytest.mark.slow
def test_files_to_text(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "published", max_shard_size="40KB")
    expected, text = one_process(tmp_path / "published")
    run_ranks(2, partial(tunes, tmp_path, "fsdp", expected))
    run_ranks(4, partial(goes_on, tmp_path, "fsdp+tp", expected, text))
    final = hf.LlamaForCausalLM.from_pretrained(tmp_path / "final", dtype=torch.float64)
    assert torch.equal(final.generate(**prompts(), **TEXT), text)
