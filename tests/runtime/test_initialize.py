"""Initialisation shard by shard equals the single device's, bit for bit, and holds no parameter whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardc.errors import InitError
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.runtime.initialize import CHUNK_BYTES, check_slots, reset_parameters, shardwise
from shardc.runtime.sharded_init import Piece, Virtual, draw
from shardc.runtime.storage import shard_tensor

MESH = Mesh(dp=2, tp=2)


def init_weights(
    model: nn.Module,
    fn: Callable[[nn.Module], None] | None,
    storages: dict[str, Layout],
    rank: int,
    *,
    seed: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> dict[str, torch.Tensor]:
    """The padded local tensors after ``model.apply(fn)`` of one rank; the model keeps its own tensors."""
    if seed is not None:
        torch.manual_seed(seed)
    with shardwise(model, storages, rank, chunk_bytes) as slots:
        model.apply(reset_parameters if fn is None else fn)
        check_slots(model, slots)
        return {slot.name: slot.value() for slot in slots}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(40, 12, padding_idx=3)
        self.fc = nn.Linear(12, 36)
        self.norm = nn.LayerNorm(12)
        self.rms = nn.RMSNorm(12)
        self.conv = nn.Conv2d(4, 6, 3)
        self.bn = nn.BatchNorm1d(6)
        self.odd = nn.Linear(10, 7)
        self.head = nn.Linear(12, 40, bias=False)
        self.head.weight = self.emb.weight


STORAGES = {
    name: Layout.parse(text, MESH)
    for name, text in {
        "emb.weight": "[40@(tp,dp),12]",
        "head.weight": "[40@(tp,dp),12]",
        "fc.weight": "[(3 12@tp),12@dp]",
        "fc.bias": "[(3 12@tp)]",
        "conv.weight": "[6@dp,4@tp,3,3]",
        "odd.weight": "[8@dp,12@tp]",
        "odd.bias": "[8@dp]",
    }.items()
}


def defaults(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def each_linear(init: Callable[[torch.Tensor], Any]) -> Callable[[nn.Module], None]:
    """``init`` on the weights of linear layers, what is usual on the rest."""

    def apply(module: nn.Module) -> None:
        defaults(module)
        if isinstance(module, nn.Linear):
            init(module.weight)
            if module.bias is not None:
                nn.init.constant_(module.bias, 0.5)

    return apply


def through_views(weight: torch.Tensor) -> None:
    weight.data.mul_(2).add_(1).div_(3).sub_(0.1).clamp_(-1, 1)
    weight.data[1, 2:4] = 5
    weight.data[2:4].normal_()
    weight.data.t()[1].fill_(7)
    weight.data[:, 3:5].copy_(torch.arange(weight.shape[0] * 2.0).view(-1, 2))
    weight.data.mul_(torch.linspace(0, 1, weight.shape[1])).add_(torch.tensor(3.0))
    weight.data[0, 0] = 3.0
    for part in weight.data.chunk(2):
        nn.init.kaiming_normal_(part)
    weight.data[1:3].add_(weight.data[1:3])


def by_inversion(weight: torch.Tensor) -> None:
    """A truncated normal as torch drew it before 2.13."""
    weight.data.uniform_(-0.9, 0.9).erfinv_().mul_(0.02 * 2**0.5).add_(0.1).clamp_(0.09, 0.11)


INITS: dict[str, Callable[[nn.Module], None] | None] = {
    "reset_parameters": None,
    "kaiming_uniform_": each_linear(nn.init.kaiming_uniform_),
    "kaiming_normal_": each_linear(nn.init.kaiming_normal_),
    "xavier_uniform_": each_linear(nn.init.xavier_uniform_),
    "xavier_normal_": each_linear(nn.init.xavier_normal_),
    "normal_": each_linear(lambda w: nn.init.normal_(w, 0.5, 0.02)),
    "uniform_": each_linear(lambda w: nn.init.uniform_(w, -0.3, 0.4)),
    "ones_": each_linear(nn.init.ones_),
    "zeros_": each_linear(nn.init.zeros_),
    "trunc_normal_": each_linear(lambda w: nn.init.trunc_normal_(w, std=0.02)),
    "trunc_normal_, many rounds": each_linear(lambda w: nn.init.trunc_normal_(w, std=0.02, a=-0.01, b=0.03)),
    "by inversion": each_linear(by_inversion),
    "bernoulli_": each_linear(lambda w: w.data.bernoulli_(0.3)),
    "through views": each_linear(through_views),
    "own generator": each_linear(lambda w: nn.init.normal_(w, generator=torch.Generator().manual_seed(4))),
}


@pytest.mark.parametrize("name", INITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk_bytes", [256, 1 << 20])
def test_equals_the_single_device(name: str, dtype: torch.dtype, chunk_bytes: int) -> None:
    fn = INITS[name]
    with torch.device("meta"):
        model = Net().to(dtype)
    whole = Net().to(dtype)
    torch.manual_seed(7)
    whole.apply(fn or defaults)
    state = torch.get_rng_state()
    expected = dict(whole.named_parameters(remove_duplicate=False)) | dict(whole.named_buffers())
    for rank in range(MESH.ranks):
        found = init_weights(model, fn, STORAGES, rank, seed=7, chunk_bytes=chunk_bytes)
        assert torch.equal(torch.get_rng_state(), state)
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            shard = shard_tensor(tensor, STORAGES[key], rank) if key in STORAGES else tensor
            assert torch.equal(found[key], shard), key
        assert found["emb.weight"] is found["head.weight"]
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fill", ["normal_", "uniform_", "exponential_", "bernoulli_"])
def test_chunks_of_every_size(fill: str, dtype: torch.dtype) -> None:
    """torch's normal_ has blocks of 16 and a tail; every size around them, in chunks, is the whole fill."""
    for size in (1, 15, 16, 17, *range(60, 100), 1000, 1023, 4097):
        torch.manual_seed(3)
        whole = getattr(torch.empty(size, dtype=dtype), fill)()
        state = torch.get_rng_state()
        torch.manual_seed(3)
        found = torch.empty(size, dtype=dtype)
        draw(Piece((size,), (range(size),), found), lambda buffer: getattr(buffer, fill)(), dtype, 48)
        assert torch.equal(found, whole), size
        assert torch.equal(torch.get_rng_state(), state), size


class Largest(TorchDispatchMode):
    """The most elements that any real tensor had."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if type(leaf) is torch.Tensor and not leaf.is_meta:
                self.numel = max(self.numel, leaf.untyped_storage().nbytes() // leaf.itemsize)
        return result


@pytest.mark.parametrize("text", ["[512@(tp,dp),256]", "[(4 128@tp),256@dp]", "[512,256@(dp,tp)]"])
@pytest.mark.parametrize("init", ["normal_", "uniform_", "trunc_normal_"])
def test_no_tensor_is_whole(init: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = nn.Linear(256, 512, bias=False)
    chunk = 4096
    fill = getattr(nn.init, init)
    largest, dispatch = Largest(), Virtual.__torch_dispatch__

    def watched(*args: Any) -> Any:
        with largest:  # a mode around a subclass does not see what that does inside
            return dispatch(*args)

    monkeypatch.setattr(Virtual, "__torch_dispatch__", staticmethod(lambda *args: watched(*args[-4:])))
    with largest:
        init_weights(model, lambda m: fill(m.weight), {"weight": Layout.parse(text, MESH)}, 1, chunk_bytes=chunk * 4)
    shard = 512 * 256 // 4
    assert largest.numel == shard > chunk


def test_real_parameters_keep_what_is_not_written() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    before = model[0].weight.detach().clone()
    storages = {"0.weight": Layout.parse("[8@dp,8]", MESH)}
    found = init_weights(model, lambda m: m.weight.data[1:3].zero_() if isinstance(m, nn.Linear) else None, storages, 0)
    before[1:3] = 0
    assert torch.equal(found["0.weight"], before[:4])
    assert torch.equal(found["1.weight"], torch.ones(8))


def test_small_tensors_may_be_made_whole() -> None:
    """orthogonal_ needs the whole matrix; within the chunk it gets one."""
    with torch.device("meta"):
        model = nn.Linear(6, 8, bias=False)
    whole = nn.Linear(6, 8, bias=False)
    torch.manual_seed(2)
    nn.init.orthogonal_(whole.weight)
    storage = Layout.parse("[8@dp,6@tp]", MESH)
    found = init_weights(model, lambda module: nn.init.orthogonal_(module.weight), {"weight": storage}, 3, seed=2)
    assert torch.equal(found["weight"], shard_tensor(whole.weight, storage, 3))


def test_a_tensor_put_in_place_is_sharded() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 8, bias=False)
    values = torch.randn(8, 4)

    def replace(module: nn.Module) -> None:
        module.weight = nn.Parameter(values)

    storage = Layout.parse("[8@dp,4]", MESH)
    found = init_weights(model, replace, {"weight": storage}, 2)
    assert torch.equal(found["weight"], values[4:]) and model.weight.is_meta


def norm_of_itself(module: nn.Linear) -> None:
    nn.init.normal_(module.weight)
    module.weight.data.div_(module.weight.norm())


def from_meta(module: nn.Linear) -> None:
    module.weight.data.copy_(torch.ones(8, 4, device="meta"))


def strided(module: nn.Linear) -> None:
    module.weight.data[::2].fill_(1)


def replaced(module: nn.Linear) -> None:
    module.weight = nn.Parameter(torch.ones(4, 4))


def part_of_it(module: nn.Linear) -> None:
    module.weight.data[1:].zero_()


def overlapping_parts(module: nn.Linear) -> None:
    module.weight.data[:6].zero_()
    module.weight.data[2:7].fill_(1.0)


ERRORS: list[tuple[Callable[[Any], None], str]] = [
    (norm_of_itself, "aten.linalg_vector_norm.default cannot initialise 'weight' ([8, 4]) shard by shard"),
    (from_meta, "aten.copy_.default cannot initialise 'weight' ([8, 4]) from a tensor on meta, which has no values"),
    (strided, "aten.fill_.Scalar cannot initialise 'weight' ([8, 4]) through a view of shape [4, 4], strides [8, 1]"),
    (
        replaced,
        "the initialisation replaced 'weight', [8, 4] torch.float32, by a tensor of shape [4, 4], torch.float32 on cpu",
    ),
    (lambda module: None, "'weight' is on meta and the initialisation filled nothing of it"),
    (part_of_it, "'weight' is on meta and the initialisation filled only a part of it"),
    (overlapping_parts, "'weight' is on meta and the initialisation filled only a part of it"),
]


@pytest.mark.parametrize(("init", "message"), ERRORS, ids=[f"{init.__name__}: {message}" for init, message in ERRORS])
def test_errors(init: Callable[[Any], None], message: str) -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 8, bias=False)
    weight = model.weight
    with pytest.raises(InitError) as caught:
        init_weights(model, init, {"weight": Layout.parse("[8@dp,4]", MESH)}, 0, chunk_bytes=64)
    assert caught.value.what == message
    assert caught.value.fix
    # The model is as before.
    assert model.weight is weight


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8, bias=False), nn.Linear(4, 8, bias=False)
        self.register_buffer("mask", torch.ones(8))


def places_of_a_buffer(module: Masked) -> None:
    module.mask[torch.tensor([1, 3])] = 0


def scaled_before(module: Masked) -> None:
    module.first.weight.data.mul_(0.5)


def copied_before(module: Masked) -> None:
    module.second.weight.data.copy_(module.first.weight)
    nn.init.normal_(module.first.weight)


@pytest.mark.parametrize("init", [places_of_a_buffer, scaled_before, copied_before])
def test_values_that_were_not_filled_are_not_read(init: Callable[[Any], None]) -> None:
    """They would be zeros, and not what the model was built with: also of tensors that a rank has whole."""
    with torch.device("meta"):
        model = Masked()
    layout = Layout.parse("[8@dp,4]", MESH)
    for storages in ({}, {"first.weight": layout, "second.weight": layout}):
        with pytest.raises(InitError, match="some of the elements that this reads were not filled"):
            init_weights(model, lambda module: init(module) if module is model else None, storages, 0)


def test_an_unsupported_op_names_the_line() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 8, bias=False)
    with pytest.raises(InitError) as caught:
        init_weights(model, norm_of_itself, {"weight": Layout.parse("[8@dp,4]", MESH)}, 0)
    line = norm_of_itself.__code__.co_firstlineno + 2
    assert caught.value.source == f"{__file__}:{line}"
