"""Names of the model's own win over those of a compiled module, and its own initialisation runs shard by shard."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc import Mesh
from shardc.errors import InitError, InputError, LayoutError
from shardc.runtime.namespace import Namespace
from tests.ranks import run_ranks

NAMES = sorted(Namespace.short_names())


def compiled(model: nn.Module, **options: Any) -> Any:
    return shardc.compile(model, Mesh(dp=2), shardc.fsdp("dp"), backend="eager", **options)


def by_attribute(model: nn.Module, name: str) -> Any:
    setattr(model, name, "mine")
    return lambda module: getattr(module, name) == "mine"


def by_method(model: nn.Module, name: str) -> Any:
    model.__class__ = type("WithMethod", (type(model),), {name: lambda self, *args: ("mine", args)})
    return lambda module: getattr(module, name)(1) == ("mine", (1,))


def by_property(model: nn.Module, name: str) -> Any:
    model.__class__ = type("WithProperty", (type(model),), {name: property(lambda self: "mine")})
    return lambda module: getattr(module, name) == "mine"


def by_parameter(model: nn.Module, name: str) -> Any:
    model.register_parameter(name, nn.Parameter(torch.ones(4)))
    return lambda module: isinstance(getattr(module, name), nn.Parameter) and name in dict(module.named_parameters())


def by_buffer(model: nn.Module, name: str) -> Any:
    model.register_buffer(name, torch.ones(4))
    return lambda module: torch.equal(getattr(module, name), torch.ones(4))


def by_submodule(model: nn.Module, name: str) -> Any:
    model.add_module(name, nn.Linear(4, 4))
    return lambda module: type(getattr(module, name)) is nn.Linear


KINDS: list[Callable[[nn.Module, str], Any]] = [
    by_attribute, by_method, by_property, by_parameter, by_buffer, by_submodule,
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("container", [False, True])
def test_a_name_of_the_model_is_the_models(kind: Any, container: bool) -> None:
    for taken in (NAMES[::2], NAMES[1::2]):
        model = nn.Sequential(nn.Linear(4, 4)) if container else nn.Linear(4, 4)
        checks = {name: kind(model, name) for name in taken}
        module = compiled(model)
        for name in NAMES:
            if name not in taken:
                assert getattr(module, name) == getattr(module.shardc, name)
            elif not (kind is by_method and name == "init_weights"):  # which runs on ranks only
                assert checks[name](module), name
            assert callable(getattr(module.shardc, name)) and name in dir(module)
    assert module.shardc.lower(torch.empty(4, 4)).text()


def test_a_name_that_is_there_and_fails_is_not_free() -> None:
    class Late(nn.Linear):
        @property
        def memory(self) -> Tensor:
            return self.not_there  # type: ignore[return-value]

    with pytest.raises(AttributeError, match="memory"):
        compiled(Late(4, 4)).memory  # noqa: B018


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_attribute_shardc_is_refused(kind: Any) -> None:
    model = nn.Linear(4, 4)
    kind(model, "shardc")
    with pytest.raises(InputError, match="has an attribute 'shardc'"):
        compiled(model)


def test_a_getattr_of_the_models_own_goes_first() -> None:
    class Delegates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.inner.memory = "the inner one's"  # type: ignore[assignment]

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inner"), name)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    module = compiled(Delegates())
    assert module.memory == "the inner one's" and module.lower(torch.empty(4, 4)).text()
    shardc.Simulation(module)(torch.ones(4, 4), grad=False)


class Overrides(nn.Module):
    """Has its own of what torch defines on modules."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def zero_grad(self, also: str = "") -> None:  # type: ignore[override]
        self.seen.append(f"zero_grad {also}")
        super().zero_grad()

    def load_state_dict(self, state_dict: Any, prefix: str = "") -> Any:  # type: ignore[override]
        self.seen.append("load_state_dict")
        return super().load_state_dict({key.removeprefix(prefix): value for key, value in state_dict.items()})

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append("state_dict")
        return super().state_dict(*args, **kwargs)

    def share_memory(self) -> Any:
        self.seen.append("share_memory")
        return super().share_memory()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.seen.append("_apply")
        return super()._apply(fn, recurse)


def overrides() -> None:
    torch.manual_seed(0)
    model = Overrides()
    module = on_ranks(model)
    with module.no_sync():
        module(torch.ones(2, 4)).sum().backward()
    module.zero_grad("all")
    assert module.seen == ["zero_grad all"] and not module.shardc.params.sync.unreduced()
    module.shardc.params.sync.refuse("what is held back")
    values = {f"old.{key}": torch.full_like(x, 2.0) for key, x in model.linear.state_dict(prefix="linear.").items()}
    module.load_state_dict(values, prefix="old.")
    assert module.seen[1:] == ["load_state_dict"] and torch.equal(
        module.shardc.full_state_dict()["linear.weight"], torch.full((4, 4), 2.0)
    )
    with pytest.raises(RuntimeError, match="size mismatch"):
        module.load_state_dict({"linear.weight": torch.ones(3, 4), "linear.bias": torch.ones(4)})
    with pytest.raises(InputError, match="cannot share its memory"):
        module.share_memory()
    module.double()
    assert module.seen[-2:] == ["share_memory", "_apply"]
    module(torch.ones(2, 4).double()).sum().backward()


def on_ranks(model: nn.Module) -> Any:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return shardc.compile(model, mesh, shardc.fsdp("dp", threshold=0), backend="eager")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def init_weights(self, std: float) -> None:
        nn.init.trunc_normal_(self.linear.weight, std=std)
        nn.init.zeros_(self.linear.bias)


class Net(nn.Module):
    """With several ways to reach a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.memory = Block(), nn.Linear(6, 5)
        self.w, self.u = nn.Parameter(torch.ones(7, 6)), nn.Parameter(torch.ones(5))
        self.register_buffer("scale", torch.ones(5))
        self.register_buffer("table", torch.zeros(3), persistent=False)
        self.listed = [self.w]
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.memory(self.block.linear(x)) * self.scale + self.w.sum() * self.u + self.table.sum()

    def init_weights(self, std: float = 0.02, *, buffer_device: Any = None) -> Net:
        self.block.init_weights(std)
        self.memory.reset_parameters()
        self.listed[0].data.normal_()  # type: ignore[union-attr]
        self.u.data = torch.full((5,), 3.0)
        with torch.device(buffer_device or "cpu"):
            self.table = torch.arange(3.0)
        nn.init.uniform_(self.scale)  # type: ignore[arg-type]
        self.calls += 1
        self.w.decays = False  # type: ignore[attr-defined]
        return self

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)

    def initialize(self) -> None:
        self.u = nn.Parameter(torch.arange(5.0), requires_grad=False)
        with torch.no_grad():
            self.w[2:4].normal_()

    def reset_parameters(self) -> None:
        for param in self.parameters():
            param.detach().uniform_()

    def reset_buffers(self) -> None:
        self.table = torch.ones(3)  # type: ignore[assignment]

    def reset(self) -> None:
        self.u.data = torch.ones(4)


INITIALISES: dict[str, Callable[[Any], Any]] = {
    "init_weights": lambda model: model.init_weights(),
    "init_weights with arguments": lambda model: model.init_weights(0.3, buffer_device="cpu"),
    "_init_weights of each module": lambda model: model.apply(model._init_weights),
    "_init_weights of one module": lambda model: model._init_weights(model.memory),
    "initialize": lambda model: model.initialize(),
    "reset_parameters": lambda model: model.reset_parameters(),
    "reset_buffers": lambda model: model.reset_buffers(),
}


def initialises() -> None:
    for name, call in INITIALISES.items():
        for meta in (False, True):
            torch.manual_seed(1)
            alone = Net()
            if meta and not name.startswith("init_weights"):
                continue  # they leave some parameters without values
            module = on_ranks(meta_net() if meta else copy.deepcopy(alone))
            objects = list(module.parameters())
            torch.manual_seed(2)
            result = call(module)
            torch.manual_seed(2)
            assert (call(alone) is alone) == (result is module), name
            for key, value in module.shardc.full_state_dict().items():
                assert torch.equal(value, alone.state_dict()[key]), (name, key)
            assert torch.equal(module.table, alone.table) and module.calls == alone.calls
            assert [p.requires_grad for p in module.parameters()] == [p.requires_grad for p in alone.parameters()]
            assert vars(module.w).get("decays") == vars(alone.w).get("decays")
            assert all(mine is before for mine, before in zip(module.parameters(), objects, strict=True))
            x = torch.linspace(-1, 1, 16).view(4, 4)
            mine, whole = module(module.shardc.shard_inputs(x)), alone(x)
            torch.testing.assert_close(mine, whole.chunk(2)[module.shardc.spec.rank])
            mine.sum().backward()


def meta_net() -> Net:
    with torch.device("meta"):
        return Net()


def raises() -> None:
    module = on_ranks(Net())
    before = module.shardc.full_state_dict()
    with pytest.raises(InitError, match=r"\.data = cannot initialise 'u' \(\[5\]\) by a tensor of shape \[4\]"):
        module.reset()
    assert all(torch.equal(x, before[key]) for key, x in module.shardc.full_state_dict().items())
    module.u.data = torch.ones(5)
    assert torch.equal(module.u.full_tensor(), torch.ones(5))
    with pytest.raises(LayoutError, match=r"one of shape torch.Size\(\[4\]\)"):
        module.u.data = torch.ones(4)


@pytest.mark.parametrize("check", [overrides, initialises, raises], ids=lambda check: check.__name__)
def test_on_ranks(check: Callable[[], None]) -> None:
    run_ranks(2, check)
