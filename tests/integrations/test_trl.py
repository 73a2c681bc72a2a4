"""TRL's trainers behind `shardc.integrations.accelerate.Trainer`: they log what they log in one process."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

import shardc
from shardc.integrations.accelerate import Trainer
from tests.integrations.loops import as_torchrun
from tests.integrations.test_trainer import PLANS, forget, llama, on_mesh, same_lines
from tests.ranks import run_ranks

GIVEN: dict[str, Any] = {"max_steps": 3, "logging_steps": 1, "report_to": [], "save_strategy": "no", "use_cpu": True}
GIVEN |= {"disable_tqdm": True, "bf16": False, "gradient_checkpointing": False, "learning_rate": 1e-2}


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{at}" for at in range(50))]
    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def text(first: int, count: int) -> str:
    return " ".join(f"w{(first + at) % 50}" for at in range(count))


def data(kind: str) -> Any:
    """Samples of different lengths: ranks pad to different ones."""
    from datasets import Dataset

    if kind == "SFT":
        return Dataset.from_list(
            [{"prompt": text(at, 3), "completion": " " + text(at, 2 + at % 4)} for at in range(16)]
        )
    return Dataset.from_list(
        [{"prompt": text(at, 2), "chosen": " " + text(at + 2, 1 + at % 5), "rejected": " " + text(at + 4, 3)}
         for at in range(16)]
    )  # fmt: skip


def lines(kind: str, model: Any, parts: int, reference: Any = None) -> list[tuple[float, ...]]:
    import trl

    theirs = {"SFT": trl.SFTTrainer, "DPO": trl.DPOTrainer}[kind]
    trainer = type(kind, (Trainer, theirs), {}) if hasattr(model, "shardc") else theirs
    config = {"SFT": trl.SFTConfig, "DPO": trl.DPOConfig}[kind]
    more = {"ref_model": reference} if kind == "DPO" else {}
    with tempfile.TemporaryDirectory() as folder:
        args = config(folder, per_device_train_batch_size=4 // parts, **GIVEN)
        made = trainer(model, args=args, train_dataset=data(kind), processing_class=tokenizer(), **more)
        made.train()
    kept = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "rewards/margins", "logps/chosen")
    forget()
    return [tuple(float(x[key]) for key in kept if key in x) for x in made.state.log_history if "loss" in x]


def logs_the_same(kind: str, plan: str, expected: list[tuple[float, ...]]) -> None:
    as_torchrun()

    def compiled() -> Any:
        model = llama()
        return shardc.compile(model, *on_mesh(plan, model), backend="eager")

    parts = dist.get_world_size() // (2 if "tp" in PLANS[plan][0] else 1)
    same_lines(lines(kind, compiled(), parts, compiled()), expected)


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
@pytest.mark.filterwarnings("ignore")
def test_two_ranks_log_what_one_process_logs(kind: str) -> None:
    pytest.importorskip("trl")
    expected = lines(kind, llama(), 1, llama())
    run_ranks(2, *(partial(logs_the_same, kind, plan, expected) for plan in ("fsdp", "ddp")))
