"""The page on accelerators names every function of the package that asks what kind of device or backend there is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "accelerators.md").read_text()
KINDS = {"cpu", "cuda", "xpu", "mps", "gloo", "nccl"}
ASKS = {"get_device_module", "pin_memory", "is_pinned", "is_cuda", "is_cpu", "cuda", "accelerator"}


def asks(node: ast.AST) -> bool:
    """Whether a node compares something with the name of a kind, or asks torch for what one kind has."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        return any(isinstance(side, ast.Constant) and side.value in KINDS for side in sides)
    return isinstance(node, ast.Attribute) and node.attr in ASKS and not (
        isinstance(node.value, ast.Name) and node.value.id == "self"
    )  # fmt: skip


def asking(tree: ast.AST, within: tuple[str, ...] = ()) -> Iterator[str]:
    """The functions that ask, by their qualified names."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield from asking(child, (*within, child.name))
            continue
        if asks(child):
            yield ".".join(within)
        yield from asking(child, within)


def in_package() -> set[str]:
    found = set()
    for path in (ROOT / "shardc").rglob("*.py"):
        place = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        found |= {f"{place}.{name}" for name in asking(ast.parse(path.read_text()))}
    return found


def test_asking_is_found() -> None:
    """A comparison, a module of one kind, a method of a class; not a field that is called like one."""
    text = """
class A:
    def pins(self): return self.pin_memory
    def asks(self, x): return x.device.type != "cpu"
def module(x): return torch.cuda.Stream()
def other(x): return x == "cpus"
"""
    assert list(asking(ast.parse(text))) == ["A.asks", "module"]


def test_the_page_names_every_place_that_asks() -> None:
    listed = re.findall(r"^\| `(shardc\.[\w.]+)` \|", PAGE, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) == in_package()
