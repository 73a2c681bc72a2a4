"""Parameters of a compiled module whose plan has stages, on real ranks, without a forward: each lies on its stage only.

Gradients come from one device in float64. Steps, norms, state dicts, checkpoints and initialisation equal its own.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional as F

import shardc
from shardc.errors import LayoutError, MeshError
from shardc.ir.mesh import Mesh
from shardc.runtime.storage import grad_from_padded, shard_tensor
from tests.ranks import device_mesh, run_ranks

WIDE = 7
TWO, FOUR = Mesh(pp=2, dp=1), Mesh(pp=2, dp=2)
STAGES = shardc.fsdp("dp") | shardc.pp("pp", microbatches=2)


class Block(nn.Module):
    """Widths that two ranks do not divide, a scalar and a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, WIDE), nn.Linear(WIDE, width)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("shift", torch.arange(float(width)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x) + self.shift)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(Block(6) for _ in range(4))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def model() -> Model:
    torch.manual_seed(3)
    return Model().double()


def compiled(mesh: Mesh, of: nn.Module | None = None, **options: Any) -> Any:
    plan = STAGES if "pp" in mesh else shardc.fsdp("dp")
    return shardc.compile(of or model(), device_mesh(mesh), plan, backend="eager", **options)


def gradients(step: int) -> dict[str, Tensor]:
    """One device's gradients of the model at some weights."""
    one = model()
    torch.manual_seed(step)
    tokens = torch.randint(11, (4, 5))
    F.cross_entropy(one(tokens).flatten(0, 1), tokens.flatten()).backward()
    return {name: param.grad for name, param in one.named_parameters() if param.grad is not None}


def assign(module: Any, grads: dict[str, Tensor]) -> None:
    """Gives parameters their gradients as a step would: from the owner's shard."""
    spec, scalars = module.shardc.spec, {}
    for name, param in module.named_parameters():
        param.grad = grad_from_padded(shard_tensor(grads[name], spec.stored[name], spec.rank), param)
        if spec.stages and not param.ndim:
            owns = spec.owners[name] == spec.groups.stage
            scalars[name] = param.grad._local_tensor if owns else torch.zeros((), dtype=param.dtype)
    for name, grad in scalars.items():
        dist.all_reduce(grad, group=spec.groups.along_stages())  # as a step gives all stages the owner's
        module.get_parameter(name).grad = grad_from_padded(grad, module.get_parameter(name))


def check_equal(module: Any, one: nn.Module, tolerance: float = 1e-12) -> None:
    wanted = dict(one.named_parameters())
    assert list(wanted) == [name for name, _ in module.named_parameters()]
    for name, param in module.named_parameters():
        torch.testing.assert_close(param.full_tensor(), wanted[name], rtol=tolerance, atol=tolerance, msg=name)


def check_places(mesh: Mesh) -> None:
    """Each rank has the bytes of its stage, and no padded buffer of another's."""
    module = compiled(mesh)
    spec = module.shardc.spec
    assert spec.stages == "pp" and set(spec.owners.values()) == {0, 1} and spec.mesh == mesh.of_stage("pp")
    for name, param in module.named_parameters():
        assert isinstance(param, DTensor) and param.device_mesh.mesh_dim_names == ("pp", "dp")
        here = spec.owners[name] == spec.groups.stage or not param.ndim
        held = spec.storages[name].local_shape if here else (0, *spec.storages[name].local_shape[1:])
        assert param._local_tensor.untyped_storage().nbytes() <= torch.Size(held).numel() * 8, name
        assert (param._local_tensor.numel() == 0) >= (not here), name
    total = sum(p._local_tensor.numel() for p in module.parameters())
    owned = [p.numel() for name, p in model().named_parameters() if spec.owners[name] == spec.groups.stage]
    assert total <= sum(owned) / mesh.size("dp") + 40
    assert [b.numel() for b in module.buffers()] == [6] * 4
    check_equal(module, model())
    param = module.layers[0].up.weight
    torch.utils.swap_tensors(param, nn.Parameter(param.detach().redistribute(placements=[Replicate()] * 2)))
    with pytest.raises(LayoutError, match=r"laid out as \[Replicate.*stores it as \[Owned\(0\), "):
        module.shardc.check()


def check_steps(mesh: Mesh) -> None:
    for clips, foreach in ((False, True), (True, True), (False, False)):
        module, one = compiled(mesh), model()
        kinds = {"foreach": True} if foreach else {"fused": True}
        ours, theirs = (torch.optim.AdamW(x.parameters(), lr=0.1, **kinds) for x in (module, one))
        for step in range(3):
            grads = gradients(step)
            assign(module, grads)
            for name, param in one.named_parameters():
                param.grad = grads[name].clone()
            expected = nn.utils.clip_grad_norm_(one.parameters(), 0.1)
            if clips:
                norm = module.clip_grad_norm_(0.1)
            else:
                norm = nn.utils.clip_grad_norm_(module.parameters(), 0.1).full_tensor()
            torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
            ours.step()
            theirs.step()
        check_equal(module, one)
        for order in (1.0, 3.0, float("inf")):
            expected = nn.utils.get_total_norm([p.grad for p in one.parameters()], order)
            torch.testing.assert_close(module.clip_grad_norm_(1e9, order), expected, rtol=1e-12, atol=0)
        for param in module.parameters():
            assert ours.state[param]["exp_avg"].placements == param.placements


def check_optimizers(mesh: Mesh) -> None:
    """Torch's own optimizers on all parameters or on matrices, `shardc.optim.wrap`, an average of the weights."""
    kinds: list[tuple[Callable[..., torch.optim.Optimizer], bool]] = [
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True), False),
        (partial(torch.optim.Adagrad, lr=0.1, foreach=True), False),
        (partial(torch.optim.RMSprop, lr=0.1, centered=True), False),
        (partial(torch.optim.Adafactor, lr=0.1), False),
        (partial(torch.optim.LBFGS, max_iter=1), False),
        (partial(torch.optim.Muon, lr=0.1), True),
    ]
    for kind, matrices in kinds:
        module, one = compiled(mesh), model()
        averages = [torch.optim.swa_utils.AveragedModel(x) for x in (one, module)]
        optimizers = [kind([p for p in x.parameters() if p.ndim == 2 or not matrices]) for x in (one, module)]
        for step in range(2):
            grads = gradients(step)
            assign(module, grads)
            for name, param in one.named_parameters():
                param.grad = grads[name].clone()
            for optimizer in optimizers:
                optimizer.step(lambda: 0.0)
            for average, current in zip(averages, (one, module), strict=True):
                average.update_parameters(current)
        check_equal(module, one, 1e-10)
        check_equal(averages[1].module, averages[0].module, 1e-10)
    module, one = compiled(mesh), model()
    optimizer, plain = shardc.optim.wrap(torch.optim.AdamW, module, lr=0.1), torch.optim.AdamW(one.parameters(), lr=0.1)
    for step in range(3):
        grads = gradients(step)
        assign(module, grads)
        for name, param in one.named_parameters():
            param.grad = grads[name].clone()
        optimizer.step()
        plain.step()
    check_equal(module, one)
    for param in module.parameters():
        assert optimizer.state[param]["exp_avg"].placements == param.placements
    with pytest.raises(Exception, match="torch.compile traces .* on a parameter that lies on one stage"):
        torch.compile(lambda: torch.optim.SGD(module.parameters(), lr=0.1).step(), backend="eager")()


def check_state_dicts(mesh: Mesh) -> None:
    module, one = compiled(mesh), model()
    whole = module.full_state_dict()
    assert whole.keys() == one.state_dict().keys()
    for name, value in one.state_dict().items():
        assert torch.equal(whole[name], value)
    first = module.full_state_dict(rank0_only=True)
    assert first.keys() == (whole.keys() if dist.get_rank() == 0 else set())
    assert all(torch.equal(value, whole[name]) for name, value in first.items())
    other = copy.deepcopy(module)
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(2)
    check_equal(module, one)
    sharded = other.state_dict()
    module.load_state_dict(sharded)
    check_equal(module, scaled(one, 2))
    module.load_state_dict(one.state_dict())
    check_equal(module, one)
    module.load_state_dict(compiled(Mesh(dp=mesh.ranks), scaled(model(), 3)).state_dict())
    check_equal(module, scaled(one, 3))
    with module.summon_full_params():
        module.layers[1].up.weight.data.mul_(2)
    expected = scaled(one, 3)
    expected.layers[1].up.weight.data.mul_(2)
    check_equal(module, expected)
    module.float()
    assert all(p.dtype == torch.float32 for p in module.parameters())
    module.shardc.check()
    assert module.shardc.spec.owners["embed.weight"] == 0


def scaled(one: nn.Module, factor: float) -> Any:
    out = copy.deepcopy(one)
    with torch.no_grad():
        for param in out.parameters():
            param.mul_(factor)
    return out


def check_init(mesh: Mesh) -> None:
    """A model on meta is filled shard by shard, with one device's values; or from a state dict."""

    def fill(module: nn.Module) -> None:
        if isinstance(module, Block):
            nn.init.ones_(module.scale)
            module.shift.copy_(torch.arange(6.0))
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.uniform_(module.bias)
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()

    with torch.device("meta"):
        on_meta = Model().double()
    module = compiled(mesh, on_meta)
    assert all(p.is_meta for p in module.parameters())
    torch.manual_seed(5)
    module.init_weights(fill)
    one = model()
    torch.manual_seed(5)
    one.apply(fill)
    check_equal(module, one, 0)
    again = compiled(mesh, on_meta)
    again.load_state_dict(one.state_dict())
    check_equal(again, one, 0)
    orthogonal = compiled(mesh)
    torch.manual_seed(5)
    orthogonal.init_weights(lambda module: nn.init.orthogonal_(module.weight) if type(module) is nn.Linear else None)
    torch.manual_seed(5)
    one = model()
    torch.manual_seed(5)
    one.apply(lambda module: nn.init.orthogonal_(module.weight) if type(module) is nn.Linear else None)
    check_equal(orthogonal, one)


def check_synced(mesh: Mesh) -> None:
    """Values of the first rank, and a comparison of values that name the ranks."""
    torch.manual_seed(dist.get_rank())
    module = compiled(mesh, Model().double(), init_sync=True)
    torch.manual_seed(0)
    check_equal(module, Model().double(), 0)
    module.shardc.check()
    module.shardc.params.compare_values("the model")
    torch.manual_seed(7 if dist.get_rank() == 1 else 0)
    module = compiled(mesh, Model().double())
    module.shardc.check()
    with pytest.raises(MeshError, match="has other values on rank 1 than on rank 0, and so have 16 more"):
        module.shardc.params.compare_values("the model")


def check_checkpoints(mesh: Mesh, folder: Path) -> None:
    """Model and optimizer, saved from stages and loaded without, and back."""
    whole = Mesh(dp=mesh.ranks)

    def stepped(on: Mesh) -> tuple[Any, torch.optim.Optimizer]:
        module = compiled(on)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        assign(module, gradients(1))
        optimizer.step()
        return module, optimizer

    for source, target in ((mesh, whole), (whole, mesh), (mesh, mesh)):
        module, optimizer = stepped(source)
        values, moments = get_state_dict(module, optimizer)
        dcp.save({"model": values, "optimizer": moments}, checkpoint_id=folder / f"{source} {target}")
        other = compiled(target, scaled(model(), 0))
        fresh = torch.optim.AdamW(other.parameters(), lr=0.3)
        into = dict(zip(("model", "optimizer"), get_state_dict(other, fresh), strict=True))
        dcp.load(into, checkpoint_id=folder / f"{source} {target}")
        set_state_dict(other, fresh, model_state_dict=into["model"], optim_state_dict=into["optimizer"])
        for (name, param), after in zip(module.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(param.full_tensor(), after.full_tensor()), name
            for key, value in optimizer.state[param].items():
                loaded = fresh.state[after][key]
                assert torch.equal(*(x.full_tensor() if isinstance(x, DTensor) else x for x in (value, loaded))), key
    full = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    everything = model().state_dict() if dist.get_rank() == 0 else {}
    target = compiled(mesh, scaled(model(), 0))
    torch.distributed.checkpoint.state_dict.set_model_state_dict(target, everything, options=full)
    check_equal(target, model(), 0)


def checks(mesh: Mesh, folder: str) -> list[Callable[[], None]]:
    of = [check_places, check_steps, check_optimizers, check_state_dicts, check_init, check_synced]
    return [*(partial(check, mesh) for check in of), partial(check_checkpoints, mesh, Path(folder))]


def test_two_ranks() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(2, *checks(TWO, folder))


@pytest.mark.slow
def test_four_ranks() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(4, *checks(FOUR, folder))
