"""A saved program from a stranger: none of it runs, and nothing outside of its folder is read."""

from __future__ import annotations

import json
import os
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree

import shardc
from shardc.errors import PrecompiledError
from shardc.precompiled.record import spec_from_json, spec_to_json
from tests.semantics.forged import Change, forged, saved, use, with_line


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("saved") / "program")


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that an exploit makes; without a dot in its path, which names in fx may not have."""
    path = Path(f"/tmp/shardc_exploit_{os.getpid()}")
    path.unlink(missing_ok=True)
    yield path
    path.unlink(missing_ok=True)


def test_as_it_was_saved_it_runs(folder: Path, tmp_path: Path) -> None:
    again = forged(folder, tmp_path / "again", lambda record, folder: None)
    assert torch.equal(use(again), use(folder))


def enum_of(field: str) -> Change:
    """The structure of the outputs, or of the arguments, as torch's own reader takes it: with an enum of a module."""
    enum = {"__enum__": True, "fqn": "evil:Colour", "name": "RED"}
    inner = json.dumps([enum])
    text = json.dumps([1, {"type": "builtins.dict", "context": inner, "children_spec": [
        {"type": None, "context": None, "children_spec": []}]}])  # fmt: skip

    def change(record: dict[str, Any], folder: Path) -> None:
        if field == "output_spec":
            record["output_spec"] = text
        else:
            record["key"]["call"]["spec"] = text

    return change


@pytest.mark.parametrize("field", ["output_spec", "call"])
def test_no_module_is_imported(
    field: str, folder: Path, tmp_path: Path, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass Colour: RED = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    error: Exception | None = None
    try:
        use(forged(folder, tmp_path / "forged", enum_of(field)))
    except Exception as raised:
        error = raised
    assert not mark.exists() and "evil" not in sys.modules, "it was imported"
    assert isinstance(error, PrecompiledError)


@pytest.mark.parametrize(
    "name",
    [
        'c")\ropen({mark!r}, "w")\rdef g(self):\r    return ("',  # at load: fx indents what follows a line feed only
        'c"), open({mark!r}, "w"), ("',
        "__class__",
        "forward",
        "graph",
        "a.__class__",
        "import",
        "x" * 300,
        "",
    ],
)
def test_a_constant_s_name_is_no_code(name: str, folder: Path, tmp_path: Path, mark: Path) -> None:
    target = json.dumps(name.replace("{mark!r}", repr(str(mark))))
    to = forged(folder, tmp_path / "forged", with_line(f"%bad: f32[2] = constant({target}, [1.0, 2.0])"))
    error: Exception | None = None
    try:
        use(to)
    except Exception as raised:
        error = raised
    assert not mark.exists(), "it ran"
    assert isinstance(error, PrecompiledError) and "expected the name of the constant" in str(error)


CALLS = {
    "a file is mapped": 'from_file("{file}", False, 4)',
    "an op of TorchScript": 'aten.save(1, "{file}")',
    "memory of another tensor": "set_.source_Tensor(%x, %x)",
    "in place": "add_.Tensor(%x, %x)",
    "no result": '_print("hello")',
    "a namespace of nobody": "quantized.add(%x, %x)",
    "code of a local_map": "shardc_region.call([%x], 0)",
    "no such op": "nothing_of_this_name(%x)",
    "a marker": "all_gather(%x, axis=dp)",
    "a group of somebody else": '_c10d_functional.all_reduce(%x, "sum", "default")',
    "an argument that it has not": "relu(%x, evil=1)",
    "text where none may be": 'div.Tensor_mode(%x, %x, rounding_mode="/etc/passwd")',
}


@pytest.mark.parametrize("what", CALLS)
def test_only_tensor_ops_are_called(what: str, folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"0123456789abcdef")
    first = next(line for line in (folder / "inference.txt").read_text().splitlines() if line.startswith("  input "))
    x = first.split("%", 1)[1].split(":")[0]
    call = CALLS[what].replace("{file}", str(secret)).replace("%x", f"%{x}")
    with pytest.raises(PrecompiledError, match="cannot be read: "):
        shardc.load(forged(folder, tmp_path / "forged", with_line(f"%bad: f32[4] = {call}")))


def rename(half: str, to: str) -> Change:
    def change(record: dict[str, Any], folder: Path) -> None:
        record["halves"][to] = record["halves"].pop(half)

    return change


FOLDERS: dict[str, Change] = {
    "a half of another folder": rename("inference", "../outside/inference"),
    "one more half": lambda record, folder: record["halves"].update({"../x": record["halves"]["inference"]}),
    "no hashes": lambda record, folder: record.update(files={}),
    "not all hashes": lambda record, folder: record["files"].pop("backward.txt"),
    "a file of another folder": lambda record, folder: record["files"].update({"../../secret": "0" * 64}),
    "an absolute file": lambda record, folder: record["files"].update({"/etc/passwd": "0" * 64}),
    "artifacts of another name": lambda record, folder: record["files"].update({"inductor.bin.pickle": "0" * 64}),
    "no inference": lambda record, folder: record["halves"].pop("inference"),
}


@pytest.mark.parametrize("what", FOLDERS)
def test_only_files_of_the_record_are_read(what: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "inference.txt").write_bytes((folder / "inference.txt").read_bytes())
    with pytest.raises(PrecompiledError, match=r"program\.json"):
        shardc.load(forged(folder, tmp_path / "forged", FOLDERS[what]))


@pytest.mark.parametrize("name", ["inference.txt", "program.json"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_plain_files_are_read(name: str, kind: str, folder: Path, tmp_path: Path) -> None:
    to = forged(folder, tmp_path / "forged", lambda record, folder: None)
    (to / name).rename(tmp_path / name)
    {
        "link": lambda: (to / name).symlink_to(tmp_path / name),
        "pipe": lambda: os.mkfifo(to / name),
        "folder": (to / name).mkdir,
    }[kind]()
    with pytest.raises(PrecompiledError, match="plain file"):
        shardc.load(to)


def test_pickles_are_read_only_of_those_whom_one_trusts(folder: Path, tmp_path: Path, mark: Path) -> None:
    def change(record: dict[str, Any], folder: Path) -> None:
        (folder / "inductor.bin").write_bytes(b"cos\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR.")
        record["files"]["inductor.bin"] = ""

    use(forged(folder, tmp_path / "forged", change))
    assert not mark.exists()


# --- the structure of arguments and results


class Pair(NamedTuple):
    a: Any
    b: Any


class Known(NamedTuple):
    a: Any


class Stranger(tuple[Any]):
    """As a named tuple, with code of its own that making one runs."""

    _fields = ("a",)

    def __new__(cls, *given: Any) -> Stranger:
        raise AssertionError(given)


@dataclass
class Output:
    loss: Any
    logits: Any = None


pytree.register_dataclass(Output)
pytree._register_namedtuple(Pair, serialized_type_name="tests.Pair")

STRUCTURES: dict[str, Callable[[], Any]] = {
    "leaf": lambda: 0,
    "none": lambda: None,
    "nested": lambda: {"a": [1, (2, {"b": 3})], 4: (), None: []},
    "ordered": lambda: OrderedDict(b=1, a=(2,)),
    "named tuple": lambda: Pair(1, [2]),
    "named tuple that nobody registered": lambda: Known([1]),
    "dataclass": lambda: [Output(1), Output(2, {"x": 3})],
    "a result of torch": lambda: torch.max(torch.rand(3, 3), 0),
}


@pytest.mark.parametrize("what", STRUCTURES)
def test_structures_come_back(what: str) -> None:
    _, spec = pytree.tree_flatten(STRUCTURES[what]())
    text = json.dumps(spec_to_json(spec, "the outputs"))
    back = spec_from_json(json.loads(text), "the outputs")
    assert back == spec and hash(back) == hash(spec)


def test_a_class_that_nobody_registered_is_refused() -> None:
    with pytest.raises(PrecompiledError, match="the structure of the outputs cannot be saved: it has a .*Stranger"):
        spec_to_json(pytree.TreeSpec(namedtuple, Stranger, [pytree.tree_flatten(0)[1]]), "the outputs")
    for name in (
        "os._wrap_close",
        "subprocess.Popen",
        "tests.semantics.test_untrusted_programs.Stranger",
        "torch.Tensor",
    ):
        with pytest.raises(PrecompiledError, match="has not registered with pytree"):
            spec_from_json({"node": name, "context": None, "children": ["*"]}, "the outputs")
    deep: Any = "*"
    for _ in range(10_000):
        deep = {"list": [deep]}
    with pytest.raises(PrecompiledError, match="no structure"):
        spec_from_json(deep, "the outputs")
