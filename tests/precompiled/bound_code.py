"""A model that calls code in many ways, and places where another start may bind other code.

Each place is (text, another text) of the source, or lines behind it.
"""

from __future__ import annotations

SOURCE = """
import functools
import math
from collections import namedtuple
from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F
from torch import nn

FACTOR = 1.5
TABLE = {"a": 2.0}
SIZES = [1.0, 2.0]


class Kind(Enum):
    SMALL = 1.0


def plain(x):
    return x * 0.5


def helper(x, by=2.0, *, power=1.0):
    return plain(x) * by**power


def make(by):
    def inner(x):
        return x * by

    return inner


def doubled(fn):
    @functools.wraps(fn)
    def wrapper(x):
        return fn(x) * 2

    return wrapper


@doubled
def decorated(x):
    return x + 1


scaled, half = make(3.0), functools.partial(helper, by=0.5)
FUNCTIONS = {"up": lambda x: x + 3, "unused": lambda x: x}


class Config:
    scale = 2.0

    def __init__(self):
        self.act, self.depth = (lambda x: x.tanh()), 3

    def get(self):
        return self.scale


CONFIG = Config()


class Meta(type):
    def twice(cls, x):
        return x * 2


class Static(metaclass=Meta):
    unit = 1.0

    @staticmethod
    def static(x):
        return x - 1

    @classmethod
    def of(cls, x):
        return x * cls.unit


class Caller:
    __slots__ = ("by",)

    def __init__(self, by):
        self.by = by

    def __call__(self, x):
        return x + self.by


CALLER = Caller(2.0)


@dataclass
class Pair:
    a: torch.Tensor
    b: float = 1.0

    def total(self):
        return self.a + self.b


Point = namedtuple("Point", "x y")


class Mixin:
    def mixed(self, x):
        return x.sin()


class Other:
    def mixed(self, x):
        return x.cos()


class Base(nn.Module):
    gain = 1.25

    def method(self, x):
        return self._inner(x) * self.gain

    def _inner(self, x):
        return x + 0.5

    @property
    def rate(self):
        return 0.9

    def unused(self):
        return 7


class Block(Mixin, Base):
    def __init__(self):
        super().__init__()
        self.linear, self.fn, self.config = nn.Linear(4, 4), (lambda x: x * 1.5), CONFIG

    def forward(self, x):
        x = self.fn(self.mixed(self.method(self.linear(x)))) * self.rate
        x = F.gelu(decorated(half(scaled(helper(x)))))
        x = CALLER(Static.of(Static.static(Static.twice(x)))) * CONFIG.get() + self.config.act(x)
        pair, point = Pair(x), Point(x, 2.0)
        x = FUNCTIONS["up"](pair.total()) * point.y * TABLE["a"] * SIZES[1] * Kind.SMALL.value
        return getattr(self, "com" + "puted")(x) * FACTOR * math.sqrt(4.0)

    def computed(self, x):
        return x + 4

    def extra_repr(self):
        return "a block"


Made = type("Made", (nn.Module,), {"forward": lambda self, x: x * 2})


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.made, self.norm = Made(), nn.LayerNorm(4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(self.made(x))


def loss(out):
    return plain(out).square().mean()
"""

# What differs -> the texts in the source, or lines behind it.
OTHER_CODE: dict[str, tuple[str, str] | str] = {
    "forward of a class": "Block.forward = lambda self, x: self.linear(x)",
    "forward of the model": "Net.forward = lambda self, x: x",
    "forward with another constant": ("x = block(x)", "x = block(x) * 2"),
    "an attribute that forward names": ("x = block(x)", "x = block.linear(x)"),
    "the order of two calls": ("self.norm(self.made(x))", "self.made(self.norm(x))"),
    "forward of a class that type() made": ("x: x * 2}", "x: x * 3}"),
    "another class of the same name": "class Block(Block):\n    def method(self, x):\n        return x",
    "a class under an if": 'if FACTOR:\n    Made = type("Made", (nn.Module,), {"forward": lambda self, x: x * 5})',
    "another mixin": ("class Block(Mixin, Base)", "class Block(Other, Base)"),
    "another order of bases": ("class Block(Mixin, Base)", "class Block(Base, Mixin)"),
    "a mixin more": ("class Block(Mixin, Base)", "class Block(Other, Mixin, Base)"),
    "a method of a base": ("return x + 0.5", "return x + 0.25"),
    "a method of a base, bound": "Base._inner = lambda self, x: x",
    "a method over that of a base": "Block.method = lambda self, x: x",
    "a method of a mixin": "Mixin.mixed = Other.mixed",
    "a property": ("return 0.9", "return 0.8"),
    "a property, bound": "Base.rate = property(lambda self: 0.7)",
    "a constant instead of a property": "Base.rate = 0.9",
    "an attribute of a class": ("gain = 1.25", "gain = 1.5"),
    "an attribute over that of a base": "Block.gain = 3.0",
    "a static method": ("return x - 1", "return x - 2"),
    "a class method": ("return x * cls.unit", "return x / cls.unit"),
    "a constant of a class method": ("unit = 1.0", "unit = 2.0"),
    "a static method in place of a class method": "Static.of = staticmethod(lambda x: x)",
    "a method of a metaclass": ("return x * 2\n\n\nclass Static", "return x * 4\n\n\nclass Static"),
    "__call__ of an object": ("return x + self.by", "return x - self.by"),
    "a value in a slot": ("CALLER = Caller(2.0)", "CALLER = Caller(2.5)"),
    "__getattr__": "Net.__getattr__ = lambda self, name: nn.Module.__getattr__(self, name)",
    "__call__ of the model": "Block.__call__ = lambda self, x: x",
    "a method that a computed name reaches": ("return x + 4", "return x + 5"),
    "a function of a module": ("return x * 0.5", "return x * 0.75"),
    "a function of a module, bound": "plain = lambda x: x",
    "a default argument": ("by=2.0, *", "by=2.5, *"),
    "a default of a keyword": ("power=1.0", "power=2.0"),
    "defaults, bound": "helper.__defaults__ = (7.0,)",
    "code, bound": "helper.__code__ = (lambda x, by=2.0, *, power=1.0: x).__code__",
    "what a function closes over": ("make(3.0)", "make(4.0)"),
    "a partial's argument": ("by=0.5)", "by=0.25)"),
    "a partial's function": ("functools.partial(helper, by", "functools.partial(lambda x, by: x * by, by"),
    "a decorator": ("return fn(x) * 2", "return fn(x) * 3"),
    "what is decorated": ("return x + 1\n", "return x + 9\n"),
    "no decorator": ("@doubled\n", ""),
    "a function in a dict": ('"up": lambda x: x + 3', '"up": lambda x: x + 4'),
    "a function that an attribute holds": ("(lambda x: x * 1.5)", "(lambda x: x * 2.5)"),
    "a function that an object holds": ("(lambda x: x.tanh())", "(lambda x: x.sin())"),
    "a method of an object": ("return self.scale\n", "return self.scale * 2\n"),
    "a method of a dataclass": ("return self.a + self.b", "return self.a - self.b"),
    "a default of a dataclass": ("b: float = 1.0", "b: float = 2.0"),
    "a field of a named tuple": ('"x y"', '"y x"'),
    "a constant": ("FACTOR = 1.5", "FACTOR = 2.5"),
    "a value in a dict": ('{"a": 2.0}', '{"a": 2.5}'),
    "a value in a list": ("[1.0, 2.0]", "[1.0, 2.5]"),
    "a value of an enum": ("SMALL = 1.0", "SMALL = 2.0"),
    "the loss": ("plain(out).square()", "plain(out).abs()"),
    "another loss of the same name": "def loss(out):\n    return out.mean()",
    "forward of a layer of torch": "nn.Linear.forward = lambda self, x: F.linear(x, self.weight) * 2",
    "forward of another layer of torch": "nn.LayerNorm.forward = lambda self, x: x",
    "a function of torch": "F.gelu = lambda x: x * x.sigmoid()",
    "a function of torch for another": "F.gelu = F.relu",
    "a function that a layer of torch calls": "F.layer_norm = lambda x, *rest: x",
    "a method of tensors": "torch.Tensor.sin = lambda self: self",
    "a function of Python": "math.sqrt = lambda x: x",
    "a builtin": "import builtins\nbefore = getattr\nbuiltins.getattr = lambda *given: before(*given)",
}

SAME_CODE: dict[str, tuple[str, str] | str] = {
    "nothing": "",
    "lines": ("import functools\n", "import functools\n\n\n\n"),
    "comments": ("return x + 0.5", "# half more\n        return x + 0.5  # so it is"),
    "a method that nothing names": ("return 7", "return 8"),
    "a method more": "Block.other = lambda self, x: x",
    "a function more": "def elsewhere(x):\n    return x * 9",
    "a constant that nothing names": "COUNT = 3",
    "a function in a dict that nothing calls": ('"unused": lambda x: x', '"unused": lambda x: x * 4'),
    "annotations": ("def plain(x)", "def plain(x: torch.Tensor) -> torch.Tensor"),
    "the order of functions": (
        "def plain(x):\n    return x * 0.5\n",
        "def before(x):\n    return x\n\n\ndef plain(x):\n    return x * 0.5\n",
    ),
    "a class that is imported before": ("class Mixin:", "class Earlier(nn.Module):\n    pass\n\n\nclass Mixin:"),
    "what forward alone would call in a class that is not in the model": (
        "def get(self):",
        "def set(self, scale):\n        self.scale = scale\n\n    def get(self):",
    ),
    "how a module is shown": ('return "a block"', 'return "a block" + ""'),
    "what a text does not change": "plain.__doc__ = 'Halves.'",
    "objects that were copied before": "import copyreg\nfor cls in (Block, nn.Linear, torch.Tensor):\n    "
    "copyreg._slotnames(cls)",
    "something was compiled by torch before": "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(2))",
}
