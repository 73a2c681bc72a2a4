"""Caches of keys and values of ``transformers``, as outputs and as inputs of a compiled module."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import shardc
from shardc._compat import pytree
from shardc.capture import Dtypes, find_repeats, register_caches
from shardc.errors import CaptureError
from shardc.precompiled.record import spec_from_json, spec_to_json
from tests.ranks import device_mesh, run_ranks

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0}
WINDOW = {"sliding_window": 4, "head_dim": 4}
BART = {"vocab_size": 64, "d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4}
BART |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 32}
BART |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "dropout": 0.0}
MODELS = {
    "llama": (hf.LlamaConfig, hf.LlamaForCausalLM, SIZES),
    "mistral": (hf.MistralConfig, hf.MistralForCausalLM, SIZES | WINDOW),
    "bart": (hf.BartConfig, hf.BartForConditionalGeneration, BART),
}


def build(name: str) -> nn.Module:
    config, model, sizes = MODELS[name]
    torch.manual_seed(0)
    return model(config(**sizes)).double().eval()


def tokens(length: int) -> Tensor:
    return torch.randint(1, 64, (4, length))


def assert_close(ours: Any, theirs: Any) -> None:
    """The same classes in the same places, the same constants, and tensors that differ by rounding."""
    mine, spec = pytree.tree_flatten(ours)
    others, expected = pytree.tree_flatten(theirs)
    assert spec == expected
    for x, y in zip(mine, others, strict=True):
        assert type(x) is type(y)
        if isinstance(x, Tensor):  # the loss is taken in float32
            torch.testing.assert_close(x, y, rtol=0, atol=1e-12 if x.dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("name", ["llama", *(pytest.param(x, marks=pytest.mark.slow) for x in MODELS if x != "llama")])
def test_one_call_takes_the_cache_that_another_gives(name: str) -> None:
    model = build(name)
    plan = shardc.fsdp("dp", level=3)
    if name != "bart":
        plan |= shardc.Plan.from_hf(model, axis="tp")
    module = shardc.compile(copy.deepcopy(model), shardc.Mesh(dp=2, tp=2), plan, backend="eager")
    sim = shardc.Simulation(module)
    key = "decoder_input_ids" if name == "bart" else "input_ids"
    rest = {"input_ids": tokens(6)} if name == "bart" else {}
    ours, theirs = None, None
    for length in (5, 1, 2):
        inputs = {key: tokens(length), **rest}
        with torch.no_grad():
            expected = model(**inputs, past_key_values=theirs)
        out = sim(**inputs, past_key_values=ours, grad=False)
        before = ours.get_seq_length() if ours is not None else 0
        ours, theirs = out.past_key_values, expected.past_key_values
        assert type(out) is type(expected)
        assert_close(dict(out), dict(expected))
        assert ours.get_seq_length() == before + length


@pytest.mark.slow
def test_training_with_labels_returns_the_cache() -> None:
    model = build("llama").train()
    module = shardc.compile(copy.deepcopy(model), shardc.Mesh(dp=2), shardc.fsdp("dp", level=3), backend="eager")
    sim = shardc.Simulation(module)
    ids = tokens(6)
    expected, out = model(input_ids=ids, labels=ids), sim(input_ids=ids, labels=ids)
    assert_close(dict(out), pytree.tree_map_only(Tensor, torch.detach, dict(expected)))
    expected.loss.backward()
    sim.backward(torch.ones(()), *[None] * (len(pytree.tree_leaves(out)) - 1))
    for name, param in model.named_parameters():
        torch.testing.assert_close(sim.grad(name), param.grad, rtol=0, atol=1e-7)


def test_blocks_that_fill_a_cache_are_alike_while_it_is_not_returned() -> None:
    register_caches()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES | {"num_hidden_layers": 6}))

    def repeats(loss: Any) -> list[int]:
        args = (model, (), {"input_ids": tokens(4)})
        found = find_repeats(*args, device=torch.device("cpu"), keep=4, loss=loss, dtypes=Dtypes())
        return [each.count for each in found]

    assert repeats(lambda out: out.logits.mean()) == [6]
    assert repeats(None) == []
    assert repeats(lambda out: out.logits.mean() + out.past_key_values.layers[0].keys.mean()) == []


def test_the_structure_of_a_cache_is_saved() -> None:
    register_caches()
    for name in MODELS:
        model = build(name)
        spec = pytree.tree_flatten(model(input_ids=tokens(3)))[1]
        assert spec_from_json(spec_to_json(spec, "the outputs"), "the outputs") == spec


def test_a_cache_that_is_written_to_in_place_is_refused() -> None:
    model = build("llama")
    module = shardc.compile(model, shardc.Mesh(dp=2), shardc.fsdp("dp"), backend="eager")
    cache = hf.StaticCache(config=model.config, max_cache_len=8)
    cache.early_initialization(4, 2, 4, torch.float64, torch.device("cpu"))
    with pytest.raises(CaptureError, match=r"changes its input 'past_key_values\.layers\.0\.keys' in place"):
        shardc.Simulation(module)(input_ids=tokens(3), past_key_values=cache, grad=False)


def _decode() -> None:
    model = build("llama")
    mesh = device_mesh(shardc.Mesh(dp=2))
    module = shardc.compile(copy.deepcopy(model), mesh, shardc.fsdp("dp", level=3), backend="eager")
    ours, theirs = None, None
    mine = slice(2 * mesh.get_local_rank("dp"), 2 * mesh.get_local_rank("dp") + 2)
    for length in (5, 1, 1):
        ids = tokens(length)
        with torch.no_grad():
            expected = model(input_ids=ids, past_key_values=theirs)
            out = module(input_ids=ids[mine], past_key_values=ours)
        ours, theirs = out.past_key_values, expected.past_key_values
        assert isinstance(ours, hf.DynamicCache)
        torch.testing.assert_close(out.logits, expected.logits[mine], rtol=0, atol=1e-12)
        torch.testing.assert_close(ours.layers[1].keys, theirs.layers[1].keys[mine], rtol=0, atol=1e-12)


@pytest.mark.slow
def test_ranks_keep_their_part_of_a_cache() -> None:
    run_ranks(2, _decode)
