"""What people do with modules: each works on two ranks, or says what to do."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardc
from shardc.errors import BackwardError, CaptureError, InputError
from shardc.runtime.namespace import INSTEAD
from tests.ranks import run_ranks

X = torch.linspace(-1, 1, 40, dtype=torch.float64).view(4, 10).sin()


def net() -> nn.Sequential:
    """Of 7 rows in a layer, which two ranks hold with a pad."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 4)).double()


def on_ranks(model: nn.Module, **options: Any) -> Any:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return shardc.compile(model, mesh, shardc.fsdp("dp"), backend="eager", **options)


def square(out: Tensor) -> Tensor:
    return out.square().mean()


def trained(module: nn.Module, average: AveragedModel | None, x: Tensor, steps: int = 2) -> None:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for _ in range(steps):
        out = module(x)
        (out if out.dim() == 0 else square(out)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if average is not None:
            average.update_parameters(module)


def rows(module: Any) -> Tensor:
    return module.shard_inputs(X)


def copies() -> None:
    module = on_ranks(net(), loss=square)
    before = module.full_state_dict()
    module(rows(module)).backward()
    other = copy.deepcopy(module)
    assert all(p.grad is None for p in other.parameters()) and module[0].weight.grad is not None
    trained(other, None, rows(other))
    alone = net()
    trained(alone, None, X)
    for name, value in other.full_state_dict().items():
        torch.testing.assert_close(value, alone.state_dict()[name])
    assert all(torch.equal(value, before[name]) for name, value in module.full_state_dict().items())
    # Values load into the copy alone, and a copy of a copy runs.
    again = copy.deepcopy(other)
    again.load_state_dict(before)
    torch.testing.assert_close(again(rows(again)), module(rows(module)))
    assert not torch.equal(other(rows(other)), module(rows(module)))


def copies_inside() -> None:
    module = copy.deepcopy(nn.Sequential(on_ranks(net()), nn.Linear(4, 2).double()))
    module(X[:2]).sum().backward()
    assert module[0][0].weight.grad is not None


def averages() -> None:
    ema = get_ema_multi_avg_fn(0.5)
    module, alone = on_ranks(net(), loss=square), net()
    ours, theirs = AveragedModel(module, multi_avg_fn=ema), AveragedModel(alone, multi_avg_fn=ema)
    trained(module, ours, rows(module), 3)
    trained(alone, theirs, X, 3)
    torch.testing.assert_close(ours(rows(module)), square(theirs(X)))


def held_back() -> None:
    module = on_ranks(net(), loss=square)
    with module.no_sync():
        module(rows(module)).backward()
    with pytest.raises(BackwardError, match="deepcopy while the gradient"):
        copy.deepcopy(module)


def parts() -> None:
    plain, module = net(), on_ranks(net())
    for part in (module[0], module[:2]):
        with pytest.raises(InputError, match="a part of a compiled module .* was called by itself") as caught:
            part(X)
        assert "summon_full_params" in str(caught.value)
    torch.testing.assert_close(module[1](X), plain[1](X))  # holds no parameters
    with module.summon_full_params():
        torch.testing.assert_close(module[0](X), plain[0](X))
        torch.testing.assert_close(module[:2](X), plain[:2](X))
    torch.testing.assert_close(module(X), plain(X))


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = net(), nn.Linear(4, 10).double()
        self.gain = nn.Parameter(torch.full((4,), 2.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))

    def encode(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.inner(x) * self.gain * scale

    def decode(self, code: Tensor) -> Tensor:
        return self.outer(code)

    def nearest(self, x: Tensor) -> Tensor:
        return self(x).argmax(-1)


def other_methods() -> None:
    """Methods besides forward run as programs once they are registered, each by itself and after another."""
    alone = Coder()
    module = on_ranks(alone)
    with pytest.raises(InputError, match="shardc.register_forward_method"):
        module.encode(X[:2])
    shardc.register_forward_method(module, "encode")
    shardc.register_forward_method(module, "decode")
    mine = X.chunk(2)[torch.distributed.get_rank()]
    for _ in range(2):
        torch.testing.assert_close(module(mine), alone(mine))
        torch.testing.assert_close(module.encode(mine), alone.encode(mine))
        torch.testing.assert_close(module.encode(mine, scale=3.0), alone.encode(mine, scale=3.0))
    assert len(module.shardc.programs) == 3
    torch.testing.assert_close(copy.deepcopy(module).encode(mine), alone.encode(mine))
    square(module.decode(module.encode(mine))).backward()
    square(alone.decode(alone.encode(X))).backward()
    for name, param in alone.named_parameters():
        torch.testing.assert_close(module.get_parameter(name).grad.full_tensor(), param.grad)
    assert torch.equal(module.nearest(mine), alone.nearest(mine))  # it calls the module, and is not registered
    shardc.register_forward_method(alone, "encode")
    for name in ("encoder", "state_dict", "no_sync"):
        with pytest.raises(InputError, match=f"Coder has no method '{name}' of its own"):
            shardc.register_forward_method(module, name)
    shardc.register_forward_method(module, "nearest")
    with pytest.raises(CaptureError, match="Coder calls itself without end"):
        module.nearest(mine)
    with pytest.raises(InputError, match="without loss="):
        shardc.register_forward_method(on_ranks(Coder(), loss=square), "encode")


def methods_of_fsdp2() -> None:
    """What FSDP2's modules have besides: an error of one line says what to write."""
    plain, module = net(), on_ranks(net())
    with pytest.raises(AttributeError, match=r"no attribute 'module': .* leave \.module out"):
        module.module  # noqa: B018
    assert set(INSTEAD) <= set(dir(FSDPModule)) and not any(hasattr(module, name) for name in INSTEAD)
    with pytest.raises(AttributeError, match="no attribute 'unshard': read or change whole") as caught:
        module.unshard()
    assert "\n" not in str(caught.value)
    with pytest.raises(AttributeError, match="no attribute 'nothing'$"):
        module.nothing()
    trained(module, None, X)
    trained(plain, None, torch.cat([X, X]))
    evaluated = shardc.compile(net(), module.shardc.spec.device_mesh, shardc.ddp("dp"), backend="eager")
    evaluated.load_state_dict(module.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(evaluated(X), plain(X))


def compiled_again() -> None:
    plain, module = net(), on_ranks(net())
    torch.testing.assert_close(torch.compile(module, backend="eager")(X), plain(X))
    torch.compile(lambda x: module(x * 2).sum(), backend="eager")(X).backward()
    with pytest.raises(InputError, match="compiled already"):
        on_ranks(module)


def pickles() -> None:
    module = on_ranks(net())
    for act in (pickle.dumps, copy.copy):
        with pytest.raises(InputError, match="cannot be pickled"):
            act(module)
    with pytest.raises(InputError, match="share its memory"):
        module.share_memory()


@dataclass
class Batch:
    x: Tensor
    scale: float = 2.0


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, batch: Any) -> Any:
        if isinstance(batch, Tensor):
            return Batch(self.inner(batch))
        return Batch(self.inner(batch.x) * batch.scale, batch.scale)


def dataclasses() -> None:
    plain, module = Scaled(), on_ranks(Scaled())
    with pytest.raises(InputError, match=r"input 'batch' is a Batch, .*\n  source: .*\n  fix: call torch"):
        module(Batch(X))
    with pytest.raises(CaptureError, match="returns a Batch, a class"):
        module(X)
    torch.export.register_dataclass(Batch)
    out = module(Batch(X))
    torch.testing.assert_close(out.x, plain(Batch(X)).x)
    assert out.scale == 2.0
    out.x.sum().backward()


def lazy() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(InputError, match="'0.weight' is of a lazy module"):
        on_ranks(model)
    model(X.float())
    torch.testing.assert_close(on_ranks(model)(X.float()), model(X.float()))


def checkpointed() -> None:
    model = net()
    checkpoint(model[0])
    torch.testing.assert_close(on_ranks(model)(X), model(X))


def test_on_two_ranks() -> None:
    run_ranks(
        2,
        copies,
        copies_inside,
        averages,
        held_back,
        parts,
        other_methods,
        methods_of_fsdp2,
        compiled_again,
        pickles,
        dataclasses,
        lazy,
        checkpointed,
    )
