"""`Trainer` on compiled modules: losses, norms, metrics and checkpoints equal those of one process without shardc."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from accelerate.state import AcceleratorState, GradientState
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardc
from shardc.integrations.accelerate import Trainer
from tests.ranks import run_ranks

SIZES: dict[str, Any] = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 32, "pad_token_id": 0}
BATCH = 4


def llama() -> hf.PreTrainedModel:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)).double()


def classifier() -> hf.PreTrainedModel:
    """Whose forward takes no ``num_items_in_batch``."""
    torch.manual_seed(0)
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return hf.BertForSequenceClassification(hf.BertConfig(**SIZES, **dropout, num_labels=3)).double()


def rows(model: hf.PreTrainedModel, count: int) -> list[dict[str, Any]]:
    """Samples of which ranks mask different numbers of labels, with a column that the model does not take."""
    draws = torch.Generator().manual_seed(3)
    out = []
    for at in range(count):
        tokens = torch.randint(1, 60, (8,), generator=draws)
        labels: Any = at % 3
        if isinstance(model, hf.LlamaForCausalLM):
            labels = torch.where(torch.arange(8) < at % 5, -100, tokens)
        out.append({"input_ids": tokens, "labels": labels, "note": float(at)})
    return out


def arguments(folder: str | Path, parts: int, **more: Any) -> hf.TrainingArguments:
    given: dict[str, Any] = {"max_steps": 4, "logging_steps": 1, "report_to": [], "save_strategy": "no"}
    given |= {"learning_rate": 1e-2, "lr_scheduler_type": "linear", "disable_tqdm": True, "use_cpu": True}
    given |= {"per_device_train_batch_size": BATCH // parts, "per_device_eval_batch_size": BATCH // parts}
    return hf.TrainingArguments(str(folder), **given | more)


def accuracy(given: Any) -> dict[str, float]:
    logits, labels = given
    return {"rows": float(len(labels)), "accuracy": float((logits.argmax(-1) == labels).mean())}


def logged(trainer: hf.Trainer, resume: str | None = None) -> list[tuple[float, ...]]:
    trainer.train(resume_from_checkpoint=resume)
    kept = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_rows", "eval_accuracy")
    lines = [[float(line[key]) for key in kept if key in line] for line in trainer.state.log_history]
    return [tuple(line) for line in lines if line]


def one_process(name: str, more: dict[str, Any]) -> list[tuple[float, ...]]:
    """What Trainer logs for the plain model in a process without ranks; run before any world exists."""
    model = MODELS[name]()
    with tempfile.TemporaryDirectory() as folder:
        trainer = hf.Trainer(model, arguments(folder, 1, **more), **data(model))
        out = logged(trainer)
    forget()
    return out


def data(model: hf.PreTrainedModel) -> dict[str, Any]:
    given: dict[str, Any] = {"train_dataset": rows(model, 40), "eval_dataset": rows(model, 8)}
    if isinstance(model, hf.BertForSequenceClassification):
        given["compute_metrics"] = accuracy
    return given


def forget() -> None:
    """Accelerate keeps the state of a world for the life of a process."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


MODELS = {"llama": llama, "bert": classifier}
PLANS = {
    "fsdp": (("dp",), (2,), lambda model: shardc.fsdp("dp")),
    "ddp": (("dp",), (2,), lambda model: shardc.ddp("dp")),
    "tp": (("tp",), (2,), lambda model: shardc.Plan.from_hf(model, axis="tp")),
    "fsdp+tp": (("dp", "tp"), (2, 2), lambda model: shardc.fsdp("dp") | shardc.Plan.from_hf(model, axis="tp")),
    "cp": (("cp",), (2,), lambda model: shardc.cp("cp")),
    "pp": (("pp",), (2,), lambda model: shardc.pp("pp", microbatches=2)),
    "fsdp+pp": (("dp", "pp"), (2, 2), lambda model: shardc.fsdp("dp") | shardc.pp("pp", microbatches=2)),
    "tp, then hsdp": (
        ("tp", "rep", "dp"),
        (2, 1, 2),
        lambda model: shardc.hsdp(shard="dp", replicate="rep") | shardc.Plan.from_hf(model, axis="tp"),
    ),
}


def on_mesh(plan: str, model: hf.PreTrainedModel) -> tuple[DeviceMesh, shardc.Plan]:
    """The mesh and the plan of that name, on all ranks of the world."""
    axes, sizes, make = PLANS[plan]
    sizes = (dist.get_world_size(),) if len(sizes) == 1 else sizes
    return init_device_mesh("cpu", sizes, mesh_dim_names=axes), make(model)


def launched(
    module: Any, plan: str, folder: str | Path, more: dict[str, Any], given: Callable[[Any], dict[str, Any]] = data
) -> Trainer:
    """A Trainer of a compiled module, as in a process that torchrun started."""
    ranks = dist.get_world_size()
    os.environ |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank()), "WORLD_SIZE": str(ranks)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # unused
    parts = ranks // (2 if {"tp", "cp", "pp"} & {*PLANS[plan][0]} else 1)
    return Trainer(module, arguments(folder, parts, **more), **given(module))


def trainer_on(name: str, plan: str, folder: str | Path, more: dict[str, Any]) -> Trainer:
    model = MODELS[name]()
    mesh, said = on_mesh(plan, model)
    return launched(shardc.compile(model, mesh, said, backend="eager"), plan, folder, more)


def same_lines(mine: list[tuple[float, ...]], theirs: list[tuple[float, ...]]) -> None:
    assert len(mine) == len(theirs) > 0, (mine, theirs)
    for ours, plain in zip(mine, theirs, strict=True):
        assert ours == pytest.approx(plain, rel=1e-5, abs=1e-6), (mine, theirs)


def logs_the_same(name: str, plan: str, more: dict[str, Any], expected: list[tuple[float, ...]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mine = logged(trainer_on(name, plan, folder, more))
    forget()
    same_lines(mine, expected)


ACCUMULATED = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}


@pytest.mark.slow
def test_two_ranks_log_what_one_process_logs() -> None:
    cases = [
        ("llama", "fsdp", ACCUMULATED),
        ("llama", "tp", {}),
        ("bert", "fsdp", EVALUATED),
        ("bert", "ddp", ACCUMULATED),
    ]
    run_ranks(2, *(partial(logs_the_same, name, plan, more, one_process(name, more)) for name, plan, more in cases))


def test_one_rank_logs_what_one_process_logs() -> None:
    run_ranks(1, partial(logs_the_same, "llama", "fsdp", ACCUMULATED, one_process("llama", ACCUMULATED)))


def test_ranks_that_split_the_sequence_log_what_one_process_logs() -> None:
    more = {"eval_strategy": "steps", "eval_steps": 2, "prediction_loss_only": True, **ACCUMULATED}
    run_ranks(2, partial(logs_the_same, "llama", "cp", more, one_process("llama", more)))


@pytest.mark.slow
def test_pipeline_stages_log_what_one_process_logs() -> None:
    losses = EVALUATED | {"prediction_loss_only": True}
    cases = [("llama", ACCUMULATED), ("bert", losses)]
    run_ranks(2, *(partial(logs_the_same, name, "pp", more, one_process(name, more)) for name, more in cases))
    run_ranks(4, partial(logs_the_same, "llama", "fsdp+pp", {}, one_process("llama", {})))


@pytest.mark.long
def test_four_ranks_log_what_one_process_logs() -> None:
    more = {"eval_strategy": "steps", "eval_steps": 2, "prediction_loss_only": True, **ACCUMULATED}
    expected = one_process("llama", more)
    run_ranks(
        4, *(partial(logs_the_same, "llama", plan, more, expected) for plan in ("fsdp", "fsdp+tp", "tp, then hsdp"))
    )


SAVED = {"save_strategy": "steps", "save_steps": 2, "max_grad_norm": 0.5}


def saves(folder: str, expected: list[tuple[float, ...]]) -> None:
    same_lines(logged(trainer_on("llama", "fsdp", folder, SAVED)), expected)
    forget()


def resumes(folder: str, plan: str, expected: list[tuple[float, ...]]) -> None:
    trainer = trainer_on("llama", plan, folder, SAVED)
    same_lines(logged(trainer, resume=f"{folder}/checkpoint-2"), expected)
    forget()


@pytest.mark.slow
def test_a_checkpoint_resumes_on_another_plan(tmp_path: Path) -> None:
    """And the folder is one that the library loads."""
    expected = one_process("llama", SAVED)
    run_ranks(2, partial(saves, str(tmp_path), expected), partial(resumes, str(tmp_path), "tp", expected))
    saved = hf.LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-4", dtype=torch.float64)
    assert {p.name for p in (tmp_path / "checkpoint-4").iterdir()} >= {
        "model.safetensors",
        "config.json",
        "optimizer_0",
    }
    tokens = torch.stack([row["input_ids"] for row in rows(saved, 4)])
    assert saved(tokens, labels=tokens).loss < llama()(tokens, labels=tokens).loss


@pytest.mark.long
def test_a_checkpoint_of_two_ranks_resumes_on_four(tmp_path: Path) -> None:
    expected = one_process("llama", SAVED)
    run_ranks(2, partial(saves, str(tmp_path), expected))
    run_ranks(
        4, partial(resumes, str(tmp_path), "fsdp+tp", expected), partial(resumes, str(tmp_path), "fsdp", expected)
    )
