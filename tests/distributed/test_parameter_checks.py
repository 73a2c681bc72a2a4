"""Parameters that change between steps: what works equals one device, what cannot is told before anything is lost."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from shardc.errors import LayoutError
from tests.ranks import run_ranks
from tests.state import assert_same, batch, close, model, sharded, step


def steps_as(module: Any, source: nn.Module) -> None:
    """One step of both is the same: the compiled program sees the parameters' present values."""
    ours, theirs = step(module, source, *batch())
    close(ours, theirs, "loss")
    assert_same(module, source)
    assert_same(module, source, grads=True)
    for one in (module, source):
        one.zero_grad()


def loads(plan: str, path: str) -> None:
    """The unsharded model's checkpoint, plain, assigned, by submodule, and a sharded state dict of another layout."""
    source = model()
    module = sharded(source, plan)
    objects = list(module.parameters())
    for seed, assign in ((3, False), (4, True)):
        other = model(seed)
        torch.save(other.state_dict(), f"{path}{torch.distributed.get_rank()}")
        saved = torch.load(f"{path}{torch.distributed.get_rank()}")
        result = module.load_state_dict(saved, assign=assign)
        assert not result.missing_keys and not result.unexpected_keys
        steps_as(module, other)
    module.mid.load_state_dict(model(5).mid.state_dict())
    other.mid.load_state_dict(model(5).mid.state_dict())
    steps_as(module, other)
    for state in (sharded(model(6), plan), sharded(model(6), "ddp" if plan == "fsdp" else "fsdp")):
        module.load_state_dict(state.state_dict())
        steps_as(module, model(6))
    assert all(mine is before for mine, before in zip(module.parameters(), objects, strict=True))
    assert module.head.weight is module.odd.weight


def loads_into_meta(plan: str) -> None:
    source = model()
    with torch.device("meta"):
        empty = type(source)().double()
    module = sharded(empty, plan)
    objects = list(module.parameters())
    module.load_state_dict(source.state_dict(), assign=True)
    assert all(mine is before for mine, before in zip(module.parameters(), objects, strict=True))
    steps_as(module, source)


def refuses_a_wrong_state_dict() -> None:
    source = model()
    module = sharded(source, "fsdp")
    wrong = model(3).state_dict()
    wrong["scale"] = torch.zeros(7)
    with pytest.raises(RuntimeError, match=r"size mismatch for scale: .* torch.Size\(\[7\]\)"):
        module.load_state_dict(wrong)
    del wrong["scale"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "scale"'):
        module.load_state_dict(wrong)
    steps_as(module, source)
    other = model(3)
    with torch.no_grad():
        other.scale.copy_(source.scale)
    assert module.load_state_dict(wrong, strict=False).missing_keys == ["scale"]
    steps_as(module, other)


def edits(plan: str) -> None:
    source = model()
    module = sharded(source, plan)
    steps_as(module, source)
    with torch.no_grad():
        for one in (module, source):
            one.odd.weight.mul_(2).add_(1)
            one.fused.copy_(one.fused * 3)
            one.mid.bias.zero_()
    steps_as(module, source)
    # The same layout in another object.
    with torch.no_grad():
        module.odd.bias = nn.Parameter(module.odd.bias * 2)
        source.odd.bias = nn.Parameter(source.odd.bias * 2)
    steps_as(module, source)


def functions_hold(plan: str) -> None:
    """A function that holds the model, and one that holds a parameter: the step is of the compiled module's values."""
    source: Any = model()
    before, scaled = source.forward, partial(torch.mul, source.odd.weight)
    source.forward = lambda x: before(x) * source.odd.bias.mean() + scaled(2.0).mean()
    module = sharded(source, plan)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (module, source)]
    for _ in range(3):
        steps_as(module, source)
        step(module, source, *batch())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert len(module.shardc.programs) == 1


def freezes(plan: str) -> None:
    source = model()
    module = sharded(source, plan)
    steps_as(module, source)
    for frozen in (("odd.weight", "fused"), ("fused", "mid.bias"), ()):
        for one in (module, source):
            for name, param in one.named_parameters():
                param.requires_grad_(name not in frozen)
        step(module, source, *batch())
        assert all((module.get_parameter(name).grad is None) for name in frozen)
        assert_same(module, source, grads=True)
        for one in (module, source):
            one.zero_grad()
    assert len(module.shardc.programs) == 3


def converts(plan: str) -> None:
    source = model().float()
    module = sharded(source, plan)
    step(module, source, *(x.float() for x in batch()))
    source.double(), module.double()
    for one in (module, source):
        one.zero_grad()
    steps_as(module, source)


def zero_grad_keeps_or_drops(plan: str) -> None:
    source = model()
    module = sharded(source, plan)
    ours, theirs = (torch.optim.AdamW(one.parameters(), lr=0.1) for one in (module, source))
    for keep in (True, False, False, True):
        step(module, source, *batch(2))
        assert_same(module, source, grads=True)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad(set_to_none=not keep)
        assert_same(module, source, grads=True)
    assert_same(module, source)


def initialises(plan: str) -> None:
    """New values, the same objects: an optimizer made before keeps its parameters."""
    source = model()
    module = sharded(source, plan)
    objects = list(module.parameters())

    def init(one: nn.Module) -> None:
        for held in (*one._parameters.values(), *one._buffers.values()):
            if held is not None:
                held.data.normal_()

    torch.manual_seed(5)
    module.init_weights(init)
    torch.manual_seed(5)
    with torch.no_grad():
        source.apply(init)
    assert all(mine is before for mine, before in zip(module.parameters(), objects, strict=True))
    assert module.head.weight is module.odd.weight
    steps_as(module, source)


def refuses_other_parameters() -> None:
    source = model()
    module = sharded(source, "fsdp")
    mesh, fused, head = module.shardc.spec.device_mesh, module.fused, module.head.weight
    steps_as(module, source)

    def refuses(text: str) -> None:
        with pytest.raises(LayoutError, match=text):
            module(*module.shard_inputs(*batch()))

    module.fused = nn.Parameter(source.fused.detach())
    refuses(r"parameter 'fused' was replaced by a Parameter of shape \[12, 9\] that is no DTensor")
    module.fused = nn.Parameter(fused.detach().redistribute(placements=[Replicate()]))
    refuses(r"parameter 'fused' is laid out as \[Replicate\(\)\] .* stores it as \[Shard\(dim=0\)\]")
    module.fused = nn.Parameter(DTensor.from_local(torch.zeros(2, 9), mesh, fused.placements))
    refuses(r"parameter 'fused' has shape \[4, 9\]; the module was compiled with \[12, 9\]")
    del module.fused
    refuses("parameter 'fused' is gone")
    module.fused = fused
    module.more = nn.Parameter(fused.detach())
    refuses("parameter 'more' came after the module was compiled")
    del module.more
    module.head.weight = nn.Parameter(head.detach())
    refuses("parameters 'odd.weight' and 'head.weight' were tied and are now two tensors")
    module.head.weight = head
    fused.data = fused.detach() * 2
    source.fused.data = source.fused.detach() * 2
    steps_as(module, source)


def unused_in_one_loss() -> None:
    """What the loss does not reach has no gradient, and the ranks stay together."""
    source = model()
    module = sharded(source, "fsdp", loss=lambda out, y: F.mse_loss(out, y))
    step(module, source, *batch())
    assert module.unused.weight.grad is None and module.unused.bias.grad is None
    assert module.empty.grad.shape == (0, 4) and module.scale.grad.shape == ()
    assert_same(module, source, grads=True)


@pytest.mark.slow
def test_two_ranks() -> None:
    with tempfile.TemporaryDirectory() as folder:
        both = [
            partial(check, plan)
            for plan in ("fsdp", "tp")
            for check in (
                partial(loads, path=f"{folder}/saved"),
                loads_into_meta,
                edits,
                functions_hold,
                converts,
                zero_grad_keeps_or_drops,
                initialises,
            )
        ]
        more = (partial(freezes, "fsdp"), refuses_a_wrong_state_dict, refuses_other_parameters, unused_in_one_loss)
        run_ranks(2, *both, *more)
