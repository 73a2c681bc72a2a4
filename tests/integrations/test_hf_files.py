"""Compiled models of ``transformers`` write and read the library's files, equal to one device's bit for bit."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc.errors import InputError, MeshError
from shardc.integrations import safetensors
from tests.ranks import run_ranks

SIZES: dict[str, Any] = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 36, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 32, "head_dim": 4}
SPARSE = {"num_local_experts": 4, "experts_implementation": "batched_mm"}
MODELS: dict[str, Callable[[], hf.PreTrainedModel]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)),
    "tied": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, tie_word_embeddings=True)),
    "experts": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES, **SPARSE)),  # files have each expert by itself
    "norms": lambda: hf.ResNetForImageClassification(
        hf.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], num_labels=3, layer_type="basic")
    ),
}
PLANS = {
    "fsdp": lambda model: shardc.fsdp("dp"),
    "tp": lambda model: shardc.Plan.from_hf(model, axis="dp"),
    "fused": lambda model: shardc.Plan(params={"**.up_proj.weight": "(3 _@dp), _"}),
}


def build(name: str, seed: int = 0) -> hf.PreTrainedModel:
    torch.manual_seed(seed)
    return MODELS[name]()


def compiled(model: nn.Module, plan: str = "fsdp") -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    return shardc.compile(model, mesh, PLANS[plan](model), backend="eager")


def same_folder() -> Path:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    return Path(folder[0])


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype and torch.equal(ours[name], value), name


def saves(name: str, plan: str, max_shard_size: int | str) -> None:
    source, folder = build(name), same_folder()
    compiled(source, plan).save_pretrained(folder, max_shard_size=max_shard_size)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [type(source).__name__]
    files = sorted(file.name for file in folder.glob("*.safetensors*"))
    assert (len(files) > 2) == (max_shard_size != "50GB"), files
    loaded = type(source).from_pretrained(folder)
    assert_equal(loaded.state_dict(), source.state_dict())
    dist.barrier()
    if dist.get_rank() == 0:  # the very names and values that one device writes
        with tempfile.TemporaryDirectory() as other:
            source.save_pretrained(other, max_shard_size=max_shard_size)
            theirs = {key: value.value() for key, value in safetensors.read_folder(Path(other)).items()}
        assert_equal({key: value.value() for key, value in safetensors.read_folder(folder).items()}, theirs)


def loads(name: str, plan: str) -> None:
    source, folder = build(name), same_folder()
    if dist.get_rank() == 0:
        source.save_pretrained(folder, max_shard_size=4000)
    dist.barrier()
    expected = type(source).from_pretrained(folder)
    with torch.device("meta"):
        model = build(name, seed=1)
    module = compiled(model, plan)
    module.load_pretrained(folder)
    assert_equal(module.full_state_dict(), expected.state_dict())
    assert_equal(dict(module.named_buffers()), dict(expected.named_buffers()))
    module.eval()
    if "vocab_size" in SIZES and hasattr(source.config, "vocab_size"):
        ids = torch.arange(16).view(4, 4)
        ours = module(module.shard_inputs(ids), use_cache=False).logits
        theirs = expected(ids, use_cache=False).logits
        torch.testing.assert_close(ours, module.shard_inputs(theirs) if plan == "fsdp" else theirs)


def other_files() -> None:
    """Parameters that the files lack, another dtype, another prefix; and what cannot be loaded."""
    source, folder = build("llama").to(torch.bfloat16), same_folder()
    if dist.get_rank() == 0:
        source.model.save_pretrained(folder)  # no head, and no prefix in the names
    dist.barrier()
    torch.manual_seed(7)
    expected = hf.LlamaForSequenceClassification.from_pretrained(folder, num_labels=3, dtype=torch.float32)
    with torch.device("meta"):
        model = hf.LlamaForSequenceClassification(hf.LlamaConfig(**SIZES, num_labels=3))
    module = compiled(model)
    torch.manual_seed(7)
    module.load_pretrained(folder)
    assert_equal(module.full_state_dict(), expected.state_dict())
    with pytest.raises(InputError, match="is no folder with model.safetensors or model.safetensors.index.json"):
        module.load_pretrained(folder / "nothing")
    kept = module.full_state_dict()
    wide = compiled(hf.LlamaForSequenceClassification(hf.LlamaConfig(**SIZES | {"vocab_size": 30}, num_labels=3)))
    before = wide.full_state_dict()
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        wide.load_pretrained(folder)
    assert_equal(wide.full_state_dict(), before)
    with pytest.raises(InputError, match="save_pretrained of a compiled module takes no push_to_hub"):
        module.save_pretrained(folder, push_to_hub=True)
    module.save_pretrained(folder)  # into the folder of another model, with whole tensors, and by one rank alone
    assert_equal(hf.LlamaForSequenceClassification.from_pretrained(folder).state_dict(), kept)
    dist.barrier()
    module.save_pretrained(folder, state_dict=kept, is_main_process=dist.get_rank() == 0)
    dist.barrier()
    assert_equal(hf.LlamaForSequenceClassification.from_pretrained(folder).state_dict(), kept)


def one_rank_alone_saves() -> None:
    module = compiled(build("llama"))
    with pytest.raises(MeshError, match="save_pretrained of LlamaForCausalLM"):
        if dist.get_rank() == 0:
            module.save_pretrained(tempfile.mkdtemp())
        else:
            module(torch.zeros(2, 4, dtype=torch.int64), use_cache=False)


@pytest.mark.slow
def test_saved_and_loaded_on_two_ranks() -> None:
    checks = [partial(saves, name, "fsdp", "50GB") for name in MODELS]
    checks += [partial(saves, "llama", "tp", 4000), partial(saves, "llama", "fused", 4000)]
    checks += [partial(saves, "experts", "fsdp", 4000)]
    checks += [partial(loads, name, "fsdp") for name in MODELS]
    checks += [partial(loads, "tied", "tp"), partial(loads, "llama", "fused")]
    run_ranks(2, *checks, other_files, one_rank_alone_saves)


def peak_bytes(work: Callable[[], object], folder: Path) -> int:
    """The most memory that ``work`` held at once, of torch's CPU allocator; files that it mapped are no memory."""
    gc.collect()
    mapped = {file.stat().st_size for file in folder.iterdir()}
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]  # type: ignore[union-attr]
    return max(accumulate(event.nbytes() for event in events if abs(event.nbytes()) not in mapped), default=0)


def holds_its_shards_and_one_tensor(plan: str) -> None:
    """The peaks of loading into shards, and of saving them."""
    sizes = SIZES | {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8}
    folder, config = same_folder(), hf.LlamaConfig(**sizes)
    if dist.get_rank() == 0:
        hf.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="100KB")
    dist.barrier()
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(config)
    module = compiled(model, plan)
    loading = peak_bytes(lambda: module.load_pretrained(folder), folder)
    shards = sum(param.to_local().nbytes for param in module.parameters())
    sizes_of = [param.numel() * param.itemsize for param in module.parameters()]
    assert shards < 0.6 * sum(sizes_of) and max(sizes_of) < 0.2 * shards
    slack = 2000  # buffers and the like
    assert shards < loading < shards + max(sizes_of) + slack, (loading, shards, max(sizes_of))
    saving = peak_bytes(lambda: module.save_pretrained(folder), folder)
    beside = max(sizes_of) // dist.get_world_size() if plan == "tp" else 0  # of a shard that is not rows of the tensor
    assert saving < max(sizes_of) + beside + slack, (saving, max(sizes_of))


@pytest.mark.parametrize("ranks", [2, 4])
def test_no_rank_holds_more_than_its_shards_and_one_tensor(ranks: int) -> None:
    run_ranks(ranks, *(partial(holds_its_shards_and_one_tensor, plan) for plan in ("fsdp", "tp")))


def test_shardc_imports_none_of_it() -> None:
    code = "import sys, shardc; sys.exit(bool({'transformers', 'safetensors', 'huggingface_hub'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
