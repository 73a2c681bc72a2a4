"""The shape of the project: who imports whom, how long files are, and that the README's code and commands are real."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "shardc"
SOURCES = sorted(PACKAGE.rglob("*.py"))
ENTRY = {
    "__init__",
    "__main__",
    "api",
    "search",
    "build",
    "checks",
    "cli",
    "fold",
    "joint",
    "precompiled",
    "program",
    "stage_cut",
    "step_cut",
}  # what ties the stages together may import any of them
ALLOWED = {
    "errors": set(),
    "validate": {"errors"},  # which any of them may import
    "_compat": {"errors"},
    "logs": {"errors"},
    "solver": {"errors"},
    "ir": {"errors", "_compat"},
    "custom_ops": {"errors", "ir", "_compat"},
    "verify": {"errors", "ir"},
    "rules": {"errors", "ir", "custom_ops", "_compat"},
    "plan": {"errors", "ir", "_compat"},
    "cost": {"errors", "ir", "custom_ops", "_compat"},
    "report": {"errors", "ir", "custom_ops", "cost", "dynamic", "passes", "plan", "program", "_compat"},
    "capture": {"errors", "ir", "custom_ops", "_compat", "logs"},
    "lower": {"errors", "ir", "custom_ops", "verify", "_compat", "logs"},
    "passes": {"errors", "ir", "custom_ops", "verify", "rules", "plan", "cost", "solver", "_compat", "logs"},
    "runtime": {"errors", "ir", "custom_ops", "_compat", "logs"},
    "optim": {"errors", "runtime", "_compat"},
    "train": {"errors", "runtime", "_compat"},
    "batches": {"errors", "ir", "plan", "runtime", "_compat"},
    "links": {"errors", "cost", "runtime"},
    "launch": {"errors", "ir"},
    "integrations": {"errors", "batches", "runtime", "_compat"},
    "dynamic": {"errors", "ir", "capture", "passes", "program", "_compat"},
    "debug": {
        "errors",
        "ir",
        "verify",
        "capture",
        "rules",
        "plan",
        "cost",
        "report",
        "passes",
        "runtime",
        "program",
        "_compat",
    },
}
NEAR_TORCH = {"_compat", "capture", "lower", "runtime"}
# From the ground up: each imports only from floors below its own (docs/design.md, section 7).
FLOORS = (
    {"errors"},
    {"_compat", "solver", "validate"},
    {"ir", "logs"},
    {"custom_ops", "verify"},
    {"capture", "cost", "lower", "plan", "rules", "runtime"},
    {"batches"},
    {"integrations", "launch", "links", "optim", "passes", "train"},
    {"joint", "precompiled"},
    {"step_cut"},
    {"stage_cut"},
    {"program"},
    {"dynamic", "fold"},
    {"build", "report"},
    {"debug", "search"},
    {"checks"},
    {"api"},
    {"__init__"},
    {"cli"},
    {"__main__"},
)


def unit(path: Path) -> str:
    """The part of the package that a file belongs to: its folder, or its own name."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    """The dotted names that a file imports, wherever in it: ``from a import b`` gives ``a.b``."""
    here = ("shardc", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(here[: len(here) - node.level + 1]) if node.level else ""
            prefix = ".".join(part for part in (base, node.module) if part)
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


def fenced(language: str, path: Path) -> list[str]:
    """The code blocks of one language in a Markdown file."""
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def run(*arguments: str | Path) -> str:
    """What Python prints when run with ``arguments`` in the project's root."""
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_each_unit_imports_only_what_it_may() -> None:
    known = set(ALLOWED) | ENTRY
    wrong = []
    for path in SOURCES:
        owner = unit(path)
        assert owner in known, f"{path} belongs to no unit with import rules"
        for name in imported(path):
            parts = name.split(".")
            if parts[0] != "shardc" or owner in ENTRY:
                continue
            target = parts[1] if len(parts) > 1 else "__init__"
            if target != owner and target not in {*ALLOWED[owner], "validate"}:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


@cache
def arrows() -> set[tuple[str, str]]:
    """(importer, imported) of the package's files, as ``"ir/layout"``, imports for type checkers included."""
    files = {path.relative_to(PACKAGE).with_suffix("").as_posix() for path in SOURCES}

    def file_of(name: str) -> str:
        """The file of ``shardc.a.b``, which is a module, or a name in the module or folder ``shardc.a``."""
        parts = name.split(".")[1:]
        candidates = ("/".join(parts), "/".join((*parts, "__init__")))
        found = [
            each for each in (*candidates, "/".join(parts[:-1]), "/".join((*parts[:-1], "__init__"))) if each in files
        ]
        return found[0]

    return {
        (path.relative_to(PACKAGE).with_suffix("").as_posix(), file_of(name))
        for path in SOURCES
        for name in imported(path)
        if name.split(".")[0] == "shardc"
    }


def test_no_import_runs_upwards() -> None:
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    wrong = []
    for importer, target in sorted(arrows()):
        above, below = importer.split("/")[0], target.split("/")[0]
        if above != below and floor[above] <= floor[below]:
            wrong.append(f"{importer} (floor {floor[above]}) imports {target} (floor {floor[below]})")
    assert wrong == []


def test_only_what_looks_imports_reports() -> None:
    """What compiles and runs a model depends on no report; `shardc.compile` hands the classes with reports down."""
    looks = {"report", "debug", "cli"}
    pairs = {tuple(name.split("/")[0] for name in pair) for pair in arrows()}
    importers = {importer for importer, target in pairs if target in looks} - looks
    assert importers == {"__init__", "__main__", "api", "search"}


def test_no_imports_form_a_circle() -> None:
    """In each folder: between its files and the folders in it."""
    wrong = []
    for folder in sorted({path.parent for path in SOURCES}):
        prefix = "" if folder == PACKAGE else f"{folder.relative_to(PACKAGE).as_posix()}/"
        needs: dict[str, set[str]] = {}
        for pair in arrows():
            if all(name.startswith(prefix) for name in pair):
                importer, target = (name.removeprefix(prefix).split("/")[0] for name in pair)
                if importer != target:
                    needs.setdefault(importer, set()).add(target)
        try:
            TopologicalSorter(needs).prepare()
        except CycleError as error:
            wrong.append(f"{prefix}: {' is imported by '.join(error.args[1])}")
    assert wrong == []


def test_private_torch_stays_near_torch() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in SOURCES
        if unit(path) not in NEAR_TORCH
        for name in imported(path)
        if name.startswith("torch.") and any(part.startswith("_") for part in name.split("."))
    ]
    assert wrong == []


@pytest.mark.parametrize(("folder", "limit"), [("shardc", 600), ("tests", 500), ("examples/models", 250)])
def test_files_stay_short(folder: str, limit: int) -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py")}
    assert lengths, f"no Python file under {folder}"
    assert {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n > limit} == {}


def test_no_assert_changes_anything() -> None:
    """Python leaves them out under -O."""
    changing = {
        "add",
        "append",
        "clear",
        "discard",
        "extend",
        "insert",
        "next",
        "pop",
        "remove",
        "setdefault",
        "update",
    }
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert)
        for part in ast.walk(node.test)
        if isinstance(part, ast.NamedExpr)
        or isinstance(part, ast.Call)
        and {getattr(part.func, "attr", None), getattr(part.func, "id", None)} & changing
    ]
    assert wrong == []


def test_examples_are_under_80_lines() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "examples").glob("*.py")}
    assert "train_decoder.py" in lengths
    assert lengths.pop("train.py") < 250  # the one that people copy: it imports no other
    assert {name: n for name, n in lengths.items() if n >= 80} == {}


def test_no_file_is_named_after_nothing() -> None:
    vague = {"utils.py", "helpers.py", "common.py", "misc.py"}
    assert [path for path in (*SOURCES, *(ROOT / "examples").rglob("*.py")) if path.name in vague] == []


def test_readme_program_prints_what_the_readme_shows(tmp_path: Path) -> None:
    readme = ROOT / "README.md"
    program, shown = fenced("python", readme)[0], fenced("text", readme)[0]
    script = tmp_path / "readme.py"
    script.write_text(program)
    printed = run(script).rstrip() + "\n"
    if os.environ.get("SHARDC_UPDATE_GOLDEN") == "1":
        readme.write_text(readme.read_text().replace(shown, printed))
    else:
        assert printed == shown


def test_readme_training_script_trains_on_two_ranks(tmp_path: Path) -> None:
    script = tmp_path / "first.py"
    script.write_text(fenced("python", ROOT / "README.md")[1])
    printed = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script)
    losses = [float(line.split("loss")[1]) for line in printed.splitlines() if line.startswith("epoch")]
    assert len(losses) == 3 and losses[2] < 0.5 < losses[0]


def test_readme_commands_are_real() -> None:
    """The dump runs; the example takes its flags; make knows its targets."""
    commands = [line for block in fenced("sh", ROOT / "README.md") for line in block.splitlines()]
    python = [shlex.split(line)[1:] for line in commands if line.startswith(".venv/bin/python ")]
    dump, example = (next(args for args in python if word in args) for word in ("dump", "examples/train_decoder.py"))
    assert run(*dump).startswith("mesh dp=2 tp=2\n")
    assert run(*example, "--help").startswith("usage: train_decoder.py")
    assert len(commands) == len(python) + sum(line.startswith("make ") for line in commands)


def test_readme_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    asked = set(re.findall(r"\bmake ([a-z-]+)", (ROOT / "README.md").read_text()))
    assert {"demo", "test", "test-long"} <= asked <= targets


def test_demo_is_the_decoder_example() -> None:
    recipe = subprocess.run(["make", "--dry-run", "demo"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "examples/train_decoder.py --plan fsdp --nproc 2" in recipe


def test_what_took_seconds_is_a_test() -> None:
    """A name that no test has any more would leave a test that has another name among the quick ones."""
    seconds = json.loads((ROOT / "tests/seconds.json").read_text())
    for name in seconds:
        file, _, test = name.partition("::")
        found = re.sub(r"\[.*", "", test, flags=re.DOTALL).rpartition("::")[2]
        is_there = f"def {found}(" in (ROOT / file).read_text() if file.startswith("tests/") else (ROOT / file).exists()
        assert is_there, f"{name}: run `make seconds`"
    assert list(seconds) == sorted(seconds) and min(seconds.values()) >= 1
