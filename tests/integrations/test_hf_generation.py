"""Text that a compiled model of ``transformers`` generates, and checkpointing that is switched on after ``compile``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import shardc
from tests.ranks import run_ranks

SIZES: dict[str, Any] = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 32}
LENGTH, NEW = 5, 6


def model() -> hf.PreTrainedModel:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, pad_token_id=0, eos_token_id=None, bos_token_id=None)).double()


def rows() -> dict[str, Tensor]:
    """Four prompts, two of them padded on the left."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, SIZES["vocab_size"], (4, LENGTH), generator=generator)
    ids[1, :2], ids[2, :1] = 0, 0
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def generates(plan: str, use_cache: bool | None, **options: Any) -> None:
    one = model().eval()
    given = rows()
    asked = {"max_new_tokens": NEW, "do_sample": False} | ({} if use_cache is None else {"use_cache": use_cache})
    free = one.generate(**given, **asked)
    # A token that the first two rows have early, so that they end before the others.
    ends = next(t for t in free[0, LENGTH:].tolist() if t not in free[2:, LENGTH:] and t in free[0, LENGTH:-2])
    expected = one.generate(**given, **asked, eos_token_id=ends)
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    said = shardc.fsdp("dp") if plan == "fsdp" else shardc.Plan.from_hf(one, axis="dp")
    module = shardc.compile(one, mesh, said, backend="eager", **options)
    if plan == "fsdp":
        given = {name: x.chunk(ranks)[dist.get_rank()] for name, x in given.items()}
        expected = expected.chunk(ranks)[dist.get_rank()]
    with warnings.catch_warnings(record=True) as said_too:
        warnings.simplefilter("always")
        ours = module.generate(**given, **asked, eos_token_id=ends)
    assert any("a program is compiled for each length" in str(w.message) for w in said_too) == (not options)
    assert torch.equal(ours, expected), (ours, expected)
    if options:
        assert not module.shardc.programs  # one program for all lengths


def t5() -> hf.PreTrainedModel:
    sizes = {"vocab_size": 16, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 4}
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))


def bart() -> hf.PreTrainedModel:
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"vocab_size": 16, "d_model": 16, "max_position_embeddings": 32}
    sizes |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    return hf.BartForConditionalGeneration(hf.BartConfig(**layers, **sizes, **tokens))


def translates(build: Callable[[], hf.PreTrainedModel], more: dict[str, Any], **options: Any) -> None:
    """An encoder-decoder model: its encoder runs once."""
    torch.manual_seed(0)
    one = build().double().eval()
    for param in one.parameters():
        param.data *= 6 if param.ndim > 1 else 1  # else all tokens are alike
    given, asked = rows(), {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, **more}
    asked |= {"return_dict_in_generate": True, "output_logits": True}
    expected = one.generate(**given, **asked)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    module = shardc.compile(one, mesh, shardc.fsdp("dp"), backend="eager", **options)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ours = module.generate(**{name: x.chunk(ranks)[rank] for name, x in given.items()}, **asked)
    assert torch.equal(ours.sequences, expected.sequences.chunk(ranks)[rank])
    for x, y in zip(ours.logits, expected.logits, strict=True):
        torch.testing.assert_close(x, y.chunk(ranks)[rank])
    shown = 'pass dynamic={"decoder_input_ids": {1: "length"}} to compile'
    assert any(shown in str(warning.message) for warning in said) == (not options)


@pytest.mark.slow
def test_encoder_decoder_models_generate() -> None:
    run_ranks(2, partial(translates, t5, {}), partial(translates, bart, {"num_beams": 2}))


@pytest.mark.long
def test_encoder_decoder_models_with_a_cache_or_one_program() -> None:
    cached = partial(translates, bart, {"use_cache": True})
    run_ranks(2, cached, partial(translates, t5, {}, dynamic={"decoder_input_ids": {1: "length"}}))


DYNAMIC = {name: {1: "length"} for name in ("input_ids", "attention_mask", "position_ids")}


def one_rank_has_padding() -> None:
    """The library leaves out a mask of ones; ranks call with a mask all the same if one of them needs it."""
    one, given = model().eval(), rows()
    asked = {"max_new_tokens": 2, "do_sample": False}
    given = {name: x[2:] for name, x in given.items()}
    assert [(x == 0).any() for x in given["attention_mask"]] == [True, False]
    expected = one.generate(**given, **asked)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    module = shardc.compile(one, mesh, shardc.fsdp("dp"), backend="eager")
    mine = {name: x.chunk(2)[dist.get_rank()] for name, x in given.items()}
    assert torch.equal(module.generate(**mine, **asked), expected.chunk(2)[dist.get_rank()])


@pytest.mark.slow
def test_each_rank_generates_for_its_rows() -> None:
    run_ranks(2, partial(generates, "fsdp", False))


@pytest.mark.slow
def test_rows_of_one_rank_have_padding() -> None:
    run_ranks(2, one_rank_has_padding)


@pytest.mark.slow
def test_one_program_generates_at_all_lengths() -> None:
    run_ranks(2, *(partial(generates, plan, None, dynamic=DYNAMIC) for plan in ("fsdp", "tp")))


def test_checkpointing_after_compile_saves_memory() -> None:
    one = model().train()
    ids = torch.randint(SIZES["vocab_size"], (4, 24))
    module = shardc.compile(one, shardc.Mesh(dp=2), shardc.fsdp("dp"), loss=lambda out: out.loss, backend="eager")
    example = {"input_ids": ids, "labels": ids, "use_cache": False}
    without = module.lower(**example).schedule().memory
    module.activation_checkpointing_enable()
    assert 0 < module.lower(**example).schedule().memory.peak.total < 0.9 * without.peak.total
    sim = shardc.Simulation(module)
    value = one(**example).loss
    value.backward()
    torch.testing.assert_close(sim(**example), value.detach())
    sim.backward()
    for name, param in one.named_parameters():
        torch.testing.assert_close(sim.grad(name), param.grad)
