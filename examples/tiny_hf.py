"""What the fine-tuning example trains, with and without shardc: a tiny Llama, windows of bytes, Trainer's arguments."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers as hf
from text import standard_library
from torch.utils.data import Dataset

import shardc

PLANS = {
    "ddp": lambda model: shardc.ddp("dp"),
    "fsdp": lambda model: shardc.fsdp("dp"),
    "hsdp": lambda model: shardc.hsdp(shard="dp", replicate="rep"),
    "tp": lambda model: shardc.Plan.from_hf(model, axis="tp"),
    "fsdp+tp": lambda model: shardc.fsdp("dp") | shardc.Plan.from_hf(model, axis="tp"),
}
# Sizes that change, for `generate`: one program serves all lengths.
LENGTHS = {name: {1: "length"} for name in ("input_ids", "attention_mask", "position_ids", "labels")}
BATCH, LENGTH, ROWS = 16, 64, 1600
SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
ENDLESS = {"bos_token_id": None, "eos_token_id": None}


def llama(dtype: torch.dtype) -> hf.PreTrainedModel:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, **ENDLESS)).to(dtype)


class Windows(Dataset):
    """``count`` windows of the standard library's bytes, from all over it."""

    def __init__(self, first: int, count: int) -> None:
        self.text, self.first, self.count = standard_library(), first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        start = (self.first + at) * 7919 * LENGTH % (len(self.text) - LENGTH)
        tokens = self.text[start : start + LENGTH].long()
        return {"input_ids": tokens, "labels": tokens}


def training(folder: Path, steps: int, parts: int = 1) -> dict:
    """The arguments of a Trainer; ``parts``: in how many parts a batch is split."""
    batch = {"per_device_train_batch_size": BATCH // parts, "per_device_eval_batch_size": BATCH // parts}
    often = {"logging_steps": 1, "eval_strategy": "steps", "eval_steps": steps // 2, "save_steps": steps // 2}
    often |= {"prediction_loss_only": True, "report_to": [], "log_level": "error", "disable_tqdm": True}
    args = hf.TrainingArguments(str(folder), max_steps=steps, learning_rate=3e-3, use_cpu=True, **batch, **often)
    return {"args": args, "train_dataset": Windows(0, ROWS), "eval_dataset": Windows(ROWS, 4 * BATCH)}


def history(trainer: hf.Trainer) -> tuple[list[float], list[float]]:
    """The loss of every step, and of every evaluation."""
    lines = trainer.state.log_history
    return [x["loss"] for x in lines if "loss" in x], [x["eval_loss"] for x in lines if "eval_loss" in x]
