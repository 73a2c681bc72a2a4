"""Tensors with a class of their own: one that changes nothing passes, any other is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import shardc
from shardc.errors import CaptureError, InputError

X = torch.rand(4, 4, dtype=torch.float64)
TWO = torch.ones(2, dtype=torch.float64)


class Doubled(Tensor):
    """Its products are doubled, as those of a quantised weight are scaled."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            with torch._C.DisableTorchFunctionSubclass():
                return F.linear(args[0], args[1] * 2, *args[2:])
        return super().__torch_function__(func, types, args, kwargs or {})


class Renamed(Tensor):
    def __add__(self, other: Any) -> Any:
        return super().__mul__(other)


class Plain(Tensor):
    """Overrides nothing."""

    def halved(self) -> Tensor:
        return self / 2


class Marked(nn.Parameter):
    """As libraries mark parameters."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    scale = 3.0


def marked(x: Tensor) -> nn.Parameter:
    made = nn.Parameter(x)
    made.scale = 3.0  # type: ignore[attr-defined]
    return made


class Net(nn.Module):
    """Holds a tensor as a parameter, a buffer or an attribute."""

    def __init__(self, weight: Any = nn.Parameter, buffer: Any = TWO, attribute: Any = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2, bias=False).double()
        self.linear.weight = weight(self.linear.weight.detach())
        self.register_buffer("offset", buffer)
        self.factor = attribute

    def forward(self, x: Tensor) -> Tensor:
        factor: Any = self.factor[0] if isinstance(self.factor, list) else self.factor
        return self.linear(x) * getattr(self.linear.weight, "scale", 1.0) * factor + self.offset


def compiled(model: nn.Module) -> Any:
    return shardc.compile(model, shardc.Mesh(dp=2), shardc.fsdp("dp"), backend="eager")


HARMLESS: dict[str, Callable[[], nn.Module]] = {
    "a parameter with an attribute": lambda: Net(marked),
    "a parameter of a class that says nothing": lambda: Net(lambda x: nn.Parameter(x.as_subclass(Plain))),
    "a parameter of a class without torch functions": lambda: Net(
        lambda x: torch.Tensor._make_subclass(Marked, x, True)
    ),
    "a buffer of a class that says nothing": lambda: Net(buffer=TWO.as_subclass(Plain)),
    "nn.Buffer": lambda: Net(buffer=nn.Buffer(TWO.clone())),
    "an attribute of a class that says nothing": lambda: Net(attribute=TWO.as_subclass(Plain)),
}


@pytest.mark.parametrize("what", HARMLESS)
def test_a_class_that_overrides_nothing_passes(what: str) -> None:
    model = HARMLESS[what]()
    got = shardc.Simulation(compiled(model))(X)
    torch.testing.assert_close(got, model(X).detach().as_subclass(Tensor), rtol=1e-9, atol=1e-9)


def test_an_input_of_a_class_that_overrides_nothing_passes() -> None:
    model = Net()
    torch.testing.assert_close(shardc.Simulation(compiled(model))(X.as_subclass(Plain)), model(X).detach())


def test_attributes_of_parameters_are_kept() -> None:
    module = compiled(Net(marked))
    assert module.linear.weight.scale == 3.0


OTHERS: dict[str, Any] = {
    "__torch_function__": TWO.as_subclass(Doubled),
    "__add__": TWO.as_subclass(Renamed),
    "TwoTensor, which holds its values in other tensors": TwoTensor(TWO, TWO.clone()),
    "MaskedTensor": torch.masked.masked_tensor(TWO, torch.tensor([True, False])),
    "sparse_coo": TWO.to_sparse(),
    "sparse_csr": torch.eye(2, dtype=torch.float64).to_sparse_csr(),
    "mkldnn": TWO.float().to_mkldnn(),
    "quantised, of torch.qint8": torch.quantize_per_tensor(TWO.float(), 0.1, 0, torch.qint8),
    "nested": torch.nested.nested_tensor([TWO, TWO[:1]]),
    "a nested": torch.nested.nested_tensor([TWO, TWO[:1]], layout=torch.jagged),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_any_other_is_refused_by_name_at_compile(kind: str) -> None:
    held = [("buffer 'offset'", Net(buffer=OTHERS[kind]))] if not kind.startswith("TwoTensor") else []
    for name, model in (
        *held,  # buffers of wrapper subclasses pass: see test_wrapper_subclasses.py
        ("attribute 'factor'", Net(attribute=OTHERS[kind])),
        ("attribute 'factor'", Net(attribute=[OTHERS[kind]])),
    ):
        with pytest.raises(InputError, match=f"{name} is .*{kind}(.|\n)*fix: put in its place .*model"):
            compiled(model)


@pytest.mark.parametrize("kind", OTHERS)
def test_any_other_is_refused_as_an_input(kind: str) -> None:
    module = compiled(Net())
    for call in (module.lower, shardc.Simulation(module)):
        with pytest.raises(InputError, match=f"input 'x' is .*{kind}(.|\n)*fix: pass "):
            call(OTHERS[kind])


@pytest.mark.parametrize(
    "make",
    [lambda x: nn.Parameter(x.as_subclass(Doubled)), lambda x: nn.Parameter(TwoTensor(x, x)),
     lambda x: nn.Parameter(x.to_sparse())],
    ids=["function", "wrapper", "sparse"],
)  # fmt: skip
def test_a_parameter_of_another_class_is_refused(make: Any) -> None:
    with pytest.raises(InputError, match=r"parameter 'linear\.weight' is "):
        compiled(Net(make))


def test_a_tensor_that_forward_reaches_in_another_way_is_refused() -> None:
    foreign = TWO.as_subclass(Doubled)

    class Reads(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + foreign

    with pytest.raises(CaptureError, match=r"foreign|graph"):
        compiled(Reads()).lower(X)


def test_a_question_for_the_class_is_refused() -> None:
    class Asks(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y * 2 if isinstance(self.linear.weight, Marked) else y

    class Calls(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (2 if hasattr(self.linear.weight, "halved") else 1)

    with pytest.raises(CaptureError, match="forward asks for halved"):
        compiled(Calls(lambda x: nn.Parameter(x.as_subclass(Plain)))).lower(X)
    model = Asks(lambda x: torch.Tensor._make_subclass(Marked, x, True))
    with pytest.raises(CaptureError, match=r"forward asks for Marked; 'linear\.weight' is a Marked"):
        compiled(model).lower(X)


def test_tensors_of_transforms_are_refused() -> None:
    run = shardc.Simulation(compiled(Net()))
    for call in (lambda: torch.func.vmap(run)(X[None]), lambda: torch.func.grad(lambda x: run(x).sum())(X)):
        with pytest.raises(InputError, match=re.escape("a tensor inside of a transform of torch.func")):
            call()
    with torch.autograd.forward_ad.dual_level(), pytest.raises(InputError, match="dual tensor"):
        run(torch.autograd.forward_ad.make_dual(X, X))
