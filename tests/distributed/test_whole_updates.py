"""`shardc.optim.wrap` of optimizers that look at whole matrices: updates and states of the class on whole tensors."""

from __future__ import annotations

import tempfile
from copy import deepcopy
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

import shardc
from shardc.errors import InputError, MeshError
from shardc.ir.mesh import Mesh
from shardc.runtime.owned import Owned
from tests.distributed.test_checkpoint import trained
from tests.pipeline.programs import blocks
from tests.ranks import device_mesh, run_ranks
from tests.state import Net, batch, close

DP, TP, GRID = Mesh(dp=2), Mesh(tp=2), Mesh(dp=2, tp=2)
SPLIT = shardc.tp("tp", colwise=["mid"], rowwise=["back"]) | shardc.Plan(params={"fused": "(3 4@tp), _"})
PLANS: dict[str, tuple[Mesh, Any]] = {
    "fsdp": (DP, shardc.fsdp("dp")),
    "level 2": (DP, shardc.fsdp("dp", level=2)),
    "ddp": (DP, shardc.ddp("dp")),
    "tp": (TP, SPLIT),
    "fsdp and tp": (GRID, shardc.fsdp("dp") | SPLIT),
    "hsdp": (Mesh(replicas=2, dp=2), shardc.hsdp("replicas", "dp")),
    "stages": (Mesh(pp=2), shardc.pp("pp", microbatches=4)),
    "fsdp in stages": (Mesh(dp=2, pp=2), shardc.fsdp("dp") | shardc.pp("pp", microbatches=4)),
}


class Thin(Net):
    """With a matrix of one element, which a rank has none of."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.point = nn.Parameter(torch.randn(1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.point.expand(9, 9)


class Shampoo(torch.optim.Optimizer):
    """Whole matrices, a list of tensors of other shapes in the state, a number there, and one in the group."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "calls": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["calls"] += 1
            for param in (p for p in group["params"] if p.grad is not None):
                state = self.state[param]
                if not state:
                    state |= {"count": 0, "sides": [torch.eye(n, dtype=param.dtype) * 1e-2 for n in param.shape]}
                    state["sum"] = torch.zeros((), dtype=torch.float64)
                state["count"] += 1
                state["sum"] += param.grad.square().sum() / group["calls"]
                update = param.grad
                for dim in range(param.dim()):
                    rows = param.grad.transpose(0, dim).flatten(1) if param.dim() > 1 else param.grad[:, None]
                    state["sides"][dim] = state["sides"][dim] + rows @ rows.T
                    values, vectors = torch.linalg.eigh(state["sides"][dim])
                    root = vectors @ torch.diag(values ** (-0.5 / param.dim())) @ vectors.T
                    update = torch.tensordot(root, update.transpose(0, dim), 1).transpose(0, dim)
                param.add_(update, alpha=-group["lr"] / state["count"])


class Lamb(torch.optim.AdamW):
    """The step of AdamW, scaled by the norms of parameter and step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = [p.clone() for p in params]
        super().step()
        for param, old in zip(params, before, strict=True):
            change, size = param - old, old.norm()
            param.copy_(old + change * torch.where(size > 0, size, 1.0) / change.norm().clamp(min=1e-12) * 0.01)


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Muon": (torch.optim.Muon, {"lr": 0.05, "momentum": 0.9}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.05}),
    "Adafactor foreach": (torch.optim.Adafactor, {"lr": 0.05, "foreach": True}),
    "Shampoo": (Shampoo, {"whole": True}),
    "Lamb": (Lamb, {"lr": 0.05, "weight_decay": 0.1, "whole": True}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 0.05, "fused": True, "whole": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "whole": lambda name, param: param.dim() == 2}),
}


def compiled(plan: str, source: nn.Module | None = None) -> Any:
    mesh, described = PLANS[plan]
    loss = nn.functional.mse_loss
    return shardc.compile(source or Thin().double(), device_mesh(mesh), described, loss=loss, backend="eager")


def params_for(cls: Any, module: nn.Module) -> list[Any]:
    """The module's parameters that are not empty; for Muon, its matrices."""
    return [p for p in module.parameters() if p.numel() and (p.dim() == 2 or cls is not torch.optim.Muon)]


def wrapped(kind: str, module: Any, **more: Any) -> Any:
    cls, options = OPTIMIZERS[kind]
    return shardc.optim.wrap(cls, module, params_for(cls, module), **options, **more)


class OnWholes:
    """The plain optimizer on whole copies of parameters, with the whole gradients that the module has."""

    def __init__(self, kind: str, module: Any) -> None:
        cls, options = OPTIMIZERS[kind]
        self.exact = kind == "Muon"  # of others, kernels may round the last elements of a vector in another way
        self.params = params_for(cls, module)
        self.copies = [nn.Parameter(p.full_tensor().detach().clone()) for p in self.params]
        self.plain = cls(self.copies, **{key: x for key, x in options.items() if key != "whole"})

    def step(self) -> None:
        for copy, param in zip(self.copies, self.params, strict=True):
            copy.grad = None if param.grad is None else param.grad.full_tensor().clone()
        self.plain.step()

    def check(self, what: str = "") -> None:
        for copy, param in zip(self.copies, self.params, strict=True):
            mine, named = param.full_tensor(), f"{what}: a parameter of shape {list(param.shape)}"
            if self.exact:
                assert torch.equal(mine, copy), named
            torch.testing.assert_close(mine, copy.detach(), rtol=1e-12, atol=1e-15, msg=lambda text: f"{named}: {text}")  # noqa: B023

    def check_state(self, optimizer: Any) -> None:
        """The optimizer's state dict is the plain one's, on all ranks, and no rank has more than its parts."""
        mine, right = optimizer.state_dict(), self.plain.state_dict()
        assert mine["state"].keys() == right["state"].keys()
        flat, structure = torch.utils._pytree.tree_flatten(mine["state"])
        theirs, same = torch.utils._pytree.tree_flatten(right["state"])
        assert structure == same
        for x, y in zip(flat, theirs, strict=True):
            if isinstance(y, Tensor):
                if isinstance(x, DTensor) and any(isinstance(at, Owned) for at in x.placements):
                    here = torch.tensor(int(x._local_tensor.numel() > 0))
                    assert x._local_tensor.numel() in (0, y.numel())
                    dist.all_reduce(here)
                    assert here == dist.get_world_size() // prod(
                        x.device_mesh.size(at) for at, p in enumerate(x.placements) if isinstance(p, Owned)
                    )
                assert x.shape == y.shape and x.dtype == y.dtype
                torch.testing.assert_close(x.full_tensor() if isinstance(x, DTensor) else x, y, rtol=1e-12, atol=1e-15)
            else:
                assert x == y
        options = [{k: x for k, x in g.items() if k != "fused"} for g in right["param_groups"]]
        assert [{k: x for k, x in g.items() if k != "fused"} for g in mine["param_groups"]] == options


def train(module: Any, optimizer: Any, theirs: OnWholes, first: int = 0, steps: int = 3) -> None:
    for at in range(first, first + steps):
        module(*module.shard_inputs(*batch(at))).backward()
        theirs.step()
        optimizer.step()
        theirs.check(f"step {at}")
        optimizer.zero_grad()


def updates_on_stages(plan: str) -> None:
    """Parameters of a stage are whole where it is, or have owners inside of it."""
    case = blocks()
    module = compiled(plan, case.model)
    optimizer, theirs = wrapped("Shampoo", module), OnWholes("Shampoo", module)
    for at in range(2):
        module(*module.shard_inputs(*case.args)).backward()
        theirs.step()
        optimizer.step()
        theirs.check(f"step {at}")
        optimizer.zero_grad()
    theirs.check_state(optimizer)


def updates_are_those_of_wholes(plan: str, kind: str) -> None:
    module = compiled(plan)
    optimizer, theirs = wrapped(kind, module), OnWholes(kind, module)
    train(module, optimizer, theirs)
    theirs.check_state(optimizer)


def as_they_are(plan: str) -> None:
    """Torch's Muon on DTensors: its products and norms in bfloat16 are those of one device."""
    module = compiled(plan)
    theirs = OnWholes("Muon", module)
    train(module, torch.optim.Muon(theirs.params, **OPTIMIZERS["Muon"][1]), theirs)
    grads = [param.detach().bfloat16() for param in module.parameters()]
    wholes = [grad.full_tensor() for grad in grads]
    for mine, right in zip(torch._foreach_norm(grads), torch._foreach_norm(wholes), strict=True):
        assert mine.dtype == torch.bfloat16 and mine.full_tensor() == right


def resumes_elsewhere() -> None:
    """Checkpoints of DCP go on under another plan; so do state dicts of one device, and whole ones are those of it."""
    for kind in ("Muon", "Shampoo"):
        shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(shared)
        module = compiled("fsdp", trained())
        optimizer, theirs = wrapped(kind, module), OnWholes(kind, module)
        train(module, optimizer, theirs)
        names = {id(param): name for name, param in module.named_parameters()}
        plain = deepcopy(theirs.plain.state_dict())
        full = get_optimizer_state_dict(module, optimizer, options=StateDictOptions(full_state_dict=True))
        for at, param in enumerate(theirs.params):
            mine, right = full["state"].get(names[id(param)], {}), plain["state"].get(at, {})
            torch.testing.assert_close(mine, right, rtol=0, atol=0)
        dcp.save({"optimizer": get_optimizer_state_dict(module, optimizer)}, checkpoint_id=shared[0])
        values = module.full_state_dict()
        for plan in ("tp", "ddp", "fsdp"):
            module = compiled(plan, trained(7))
            module.load_state_dict(values)
            optimizer, theirs.params = wrapped(kind, module), params_for(OPTIMIZERS[kind][0], module)
            state = {"optimizer": get_optimizer_state_dict(module, optimizer)}
            dcp.load(state, checkpoint_id=shared[0])
            set_optimizer_state_dict(module, optimizer, state["optimizer"])
            rewind(theirs, plain)
            theirs.check_state(optimizer)
            train(module, optimizer, theirs, 3)
            # Without a checkpoint: the state dict of one device.
            module.load_state_dict(values)
            optimizer = wrapped(kind, module)
            rewind(theirs, plain)
            optimizer.load_state_dict(deepcopy(plain))
            train(module, optimizer, theirs, 3)
            theirs.check_state(optimizer)


class Fails(torch.optim.SGD):
    """Fails on the rank that updates ``mid.weight``."""

    def step(self, closure: Any = None) -> None:
        super().step()
        if any(p.shape == (12, 9) and not p.sum().isfinite() for group in self.param_groups for p in group["params"]):
            raise ValueError("a matrix is not finite")


def others_hear_of_it() -> None:
    """A rank that calls `state_dict` alone raises at once, and the error of an owner is raised on all ranks."""
    module = compiled("fsdp")
    optimizer = wrapped("Muon", module)
    module(*module.shard_inputs(*batch())).backward()
    optimizer.step()
    if dist.get_rank() == 0:
        with pytest.raises(MeshError, match=r"Muon.state_dict\(\) is for all ranks of the mesh. Rank 0"):
            optimizer.state_dict()
    dist.barrier()
    optimizer.step()
    optimizer.state_dict()
    optimizer = shardc.optim.wrap(Fails, module, lr=float("inf"), whole=True)
    with pytest.raises((ValueError, MeshError), match="a matrix is not finite"):
        optimizer.step()


def rewind(theirs: OnWholes, state: dict[str, Any]) -> None:
    """Sets the copies to the module's parameters, and the plain optimizer's state to ``state``."""
    with torch.no_grad():
        for copy, param in zip(theirs.copies, theirs.params, strict=True):
            copy.copy_(param.full_tensor())
    theirs.plain.load_state_dict(deepcopy(state))


def goes_on_in_other_kinds() -> None:
    """The state of whole parameters loads into optimizers of shards and of DTensors, and theirs into one of wholes."""
    module = compiled("fsdp")
    params = list(module.parameters())
    whole = shardc.optim.wrap(torch.optim.AdamW, module, lr=0.05, whole=True)
    others = [shardc.optim.wrap(torch.optim.AdamW, module, lr=0.05), torch.optim.AdamW(params, lr=0.05)]
    for at in range(4):
        module(*module.shard_inputs(*batch(at))).backward()
        start = [param.detach().clone() for param in params]
        before = deepcopy(whole.state_dict())
        whole.step()
        ends = [param.full_tensor() for param in params]
        for other in others:
            other.load_state_dict(deepcopy(before))
            with torch.no_grad():
                for param, value in zip(params, start, strict=True):
                    param.copy_(value)
            other.step()
            for param, end in zip(params, ends, strict=True):
                close(param.full_tensor(), end)
            whole.load_state_dict(deepcopy(other.state_dict()))
        module.zero_grad()


def steps_survive_changes() -> None:
    """Schedules, a group that comes, a closure, clipping, scaled gradients, parameters without any, changed values."""
    module = compiled("fsdp")
    module.fused.requires_grad_(False)
    frozen, first, *others = params_for(torch.optim.Muon, module)
    assert frozen is module.fused and others[-1] is not frozen
    options: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}
    optimizer = shardc.optim.wrap(torch.optim.Muon, module, [first], **options)
    theirs = OnWholes("Muon", module)
    theirs.plain = torch.optim.Muon(theirs.copies[1:2], **options)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (optimizer, theirs.plain)]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for at in range(6):
        if at == 2:
            optimizer.add_param_group({"params": [*others, frozen], "lr": 0.01})
            theirs.plain.add_param_group({"params": [*theirs.copies[2:], theirs.copies[0]], "lr": 0.01})
        if at == 3:
            with torch.no_grad():
                for param, copy in zip(theirs.params, theirs.copies, strict=True):
                    param.mul_(0.5)
                    copy.mul_(0.5)
        scaler.scale(module(*module.shard_inputs(*batch(at)))).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(module.parameters(), 0.5)
        theirs.step()
        if at == 4:
            assert optimizer.step(lambda: 3.0) == 3.0
        else:
            scaler.step(optimizer)
        scaler.update()
        theirs.check(f"step {at}")
        for schedule in schedules:
            schedule.step()
        optimizer.zero_grad(set_to_none=at % 2 == 0)
    assert module.fused.grad is None and module.unused.weight not in optimizer.state
    theirs.check_state(optimizer)


class Opaque(torch.optim.SGD):
    """Its state has an object that no other rank can have."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["basis"] = [object()]


class Common(torch.optim.SGD):
    """Its rate depends on all gradients."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["total"] = sum(float(p.grad.sum()) for p in group["params"] if p.grad is not None)


def what_cannot_be_is_refused() -> None:
    module = compiled("fsdp")
    module(*module.shard_inputs(*batch())).backward()
    with pytest.raises(InputError, match="LBFGS takes all parameters for one vector"):
        shardc.optim.wrap(torch.optim.LBFGS, module, whole=True)
    with pytest.raises(InputError, match="SparseAdam takes sparse gradients, and a compiled module has dense ones"):
        shardc.optim.wrap(torch.optim.SparseAdam, module)
    with pytest.raises(RuntimeError, match="consider Adam instead"):
        torch.optim.SparseAdam(module.parameters()).step()
    with pytest.raises(InputError, match="pass whole=True if it updates each parameter from that parameter's own"):
        shardc.optim.wrap(Shampoo, module)
    with pytest.raises(InputError, match="whole selects none of the optimizer's 12 parameters"):
        shardc.optim.wrap(Shampoo, module, whole=lambda name, param: "none" in name)
    with pytest.raises(InputError, match=r"a parameter of shape \[3, 3\] is none of the module's"):
        shardc.optim.wrap(torch.optim.Muon, module, [nn.Parameter(torch.ones(3, 3))])
    optimizer = shardc.optim.wrap(torch.optim.Muon, module, [module.mid.weight])
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 3))]})
    with pytest.raises(InputError, match=r"a parameter of shape \[3, 3\] is none of the module's"):
        optimizer.step()
    optimizer = shardc.optim.wrap(Common, module, lr=0.1, whole=True)
    with pytest.raises(InputError, match="Common has set 'total' of a group to different values on different ranks"):
        optimizer.step()
    optimizer = shardc.optim.wrap(Opaque, module, lr=0.1, whole=True)
    optimizer.step()
    with pytest.raises(InputError, match="state 'basis' of parameter 'fused' has a value of class object, which only"):
        optimizer.state_dict()


def test_muon_on_two_ranks() -> None:
    checks = [partial(as_they_are, "fsdp"), what_cannot_be_is_refused, others_hear_of_it]
    run_ranks(2, partial(updates_are_those_of_wholes, "fsdp", "Muon"), *checks)


@pytest.mark.slow
def test_two_ranks() -> None:
    checks = [partial(updates_are_those_of_wholes, plan, kind) for plan in ("fsdp", "tp") for kind in OPTIMIZERS]
    checks += [partial(updates_are_those_of_wholes, plan, "Shampoo") for plan in ("level 2", "ddp")]
    checks += [partial(as_they_are, "tp"), partial(updates_on_stages, "stages")]
    run_ranks(2, *checks, resumes_elsewhere, goes_on_in_other_kinds, steps_survive_changes)


@pytest.mark.slow
def test_four_ranks() -> None:
    plans = ("fsdp and tp", "hsdp")
    checks = [partial(updates_are_those_of_wholes, plan, kind) for plan in plans for kind in ("Muon", "Shampoo")]
    run_ranks(4, *checks, partial(updates_on_stages, "fsdp in stages"))
