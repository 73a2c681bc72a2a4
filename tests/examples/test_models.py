"""The example models on one device: shapes, causality, masking, sizes, and that each of them learns."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import nn

from examples.models import convnet, gpt2, llama, mlp, vit

MODELS = [mlp, llama, gpt2, vit, convnet]
DECODERS = [llama, gpt2]


def config_of(models: ModuleType) -> object:
    (name,) = (name for name in vars(models) if name.endswith("Config"))
    return getattr(models, name)()


@pytest.mark.parametrize("models", MODELS, ids=lambda m: m.__name__.rpartition(".")[2])
def test_example_is_tiny_on_meta(models: ModuleType) -> None:
    """Same names, shapes and dtypes; nothing of ``example`` has storage."""
    abstract, abstract_args = models.example()
    real, real_args = models.tiny()
    tensors = {**abstract.state_dict(), **{str(i): arg for i, arg in enumerate(abstract_args)}}
    expected = {**real.state_dict(), **{str(i): arg for i, arg in enumerate(real_args)}}
    assert {t.device.type for t in tensors.values()} == {"meta"}
    assert {k: (t.shape, t.dtype) for k, t in tensors.items()} == {k: (t.shape, t.dtype) for k, t in expected.items()}
    assert abstract(*abstract_args).shape == real(*real_args).shape


@pytest.mark.parametrize("models", MODELS, ids=lambda m: m.__name__.rpartition(".")[2])
def test_targets_are_those_of_the_loss(models: ModuleType) -> None:
    """As the command line asks for them."""
    model, (x, targets) = models.tiny(targets=True)
    assert models.loss(model(x), targets).dim() == 0
    assert [t.shape for t in models.example(targets=True)[1]] == [x.shape, targets.shape]


@pytest.mark.parametrize("models", MODELS, ids=lambda m: m.__name__.rpartition(".")[2])
def test_model_learns_one_batch(models: ModuleType) -> None:
    model, _ = models.tiny()
    inputs, targets = models.batch(config_of(models))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        value = models.loss(model(inputs), targets)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("models", MODELS, ids=lambda m: m.__name__.rpartition(".")[2])
def test_meta_model_initialises_like_a_real_one(models: ModuleType) -> None:
    """Every parameter and buffer belongs to a module whose ``reset_parameters`` sets it."""

    def initialise(model: nn.Module) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model.apply(lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None)
        return model.state_dict()

    poisoned = models.example()[0].to_empty(device="cpu")
    with torch.no_grad():
        for tensor in poisoned.state_dict().values():
            tensor.fill_(7)
    torch.testing.assert_close(initialise(poisoned), initialise(models.tiny()[0]), rtol=0, atol=0)


@pytest.mark.parametrize("models", DECODERS, ids=lambda m: m.__name__.rpartition(".")[2])
def test_decoder_is_causal(models: ModuleType) -> None:
    """Changing token 9 changes the logits of position 9 and of later ones, and of no earlier one."""
    model, (tokens,) = models.tiny()
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 64
    before, after = model(tokens), model(changed)
    differs = (before - after).abs().amax(dim=(0, 2)) > 1e-7
    assert differs.tolist() == [False] * 9 + [True] * (tokens.shape[1] - 9)


@pytest.mark.parametrize("models", DECODERS, ids=lambda m: m.__name__.rpartition(".")[2])
def test_masked_targets_do_not_count(models: ModuleType) -> None:
    model, (tokens,) = models.tiny()
    targets = tokens.roll(-1, dims=1)
    targets[2:] = -100
    torch.testing.assert_close(models.loss(model(tokens), targets), models.loss(model(tokens[:2]), targets[:2]))


def test_rotary_attention_sees_only_distances() -> None:
    """The score of a rotated query and key depends on how far apart they are, not on where they are."""
    config = llama.LlamaConfig(dim=32, heads=4)
    q, k = torch.randn(8), torch.randn(8)
    cos, sin = llama.rotary_tables(12, config, like=q)
    scores = llama.rotate(q.expand(12, 8), cos, sin) @ llama.rotate(k.expand(12, 8), cos, sin).T
    torch.testing.assert_close(scores[:-1, :-1], scores[1:, 1:])
    assert not torch.allclose(scores[0], scores[0, 0].expand(12))


@pytest.mark.parametrize(
    ("build", "billions"), [(llama.llama3_8b, 8.030), (llama.qwen3_14b, 14.768), (llama.llama3_405b, 405.853)]
)
def test_llama3_sizes(build, billions: float) -> None:
    model, (tokens,) = build()
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 3) == billions
    assert tokens.device.type == "meta"
