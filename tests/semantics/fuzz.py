"""Mutations of a saved program, loaded in a process that notes what it opens, imports and runs.

    python -m tests.semantics.fuzz FOLDER SCRATCH SEED COUNT

prints what went wrong, a line each, and nothing where all is well.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from types import CodeType
from typing import Any, get_args

import shardc
from shardc.errors import PrecompiledError
from shardc.ir.text import dump
from shardc.precompiled.record import Record
from shardc.validate import _hints
from tests.semantics.forged import sign

SECONDS, BYTES = 20.0, 256 << 20  # that one load may take, on a machine that is busy; of Python's own memory
RUN = (
    "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "subprocess.Popen", "socket.connect",
    "socket.bind", "ctypes.dlopen", "os.remove", "os.rename", "os.mkdir", "shutil.rmtree", "pickle.find_class",
)  # fmt: skip
ODD: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2**31, 2**63, 10**40, -(10**40), 1.5, 1e308, "", "x", "../../../etc/passwd",
    "/etc/passwd", "\0", "\r\n", "é", "shardc:dp", "a" * 10_000, [], {}, [[]], [0] * 1000, {"a": 1}, "float32", "onnx",
    "cuda", "meta", "torch.Tensor", "os.system", "__import__('os')", "constant", "*", {"list": ["*"]},
    {"node": "os._wrap_close", "context": None, "children": []}, float("inf"), float("nan"),
)  # fmt: skip
WORDS = [
    "from_file", "set_.source_Tensor", "aten.save", "as_strided", "constant", "all_gather", "f32", "i64", "[", "]", "(",
    ")", "{sum:dp}", "@dp", "%", "#", "|", "None", "inf", "nan", "-", "9" * 30, "9" * 6000, "((((", "\\", "\0", "x=",
    "axis=dp", "shardc:dp", "__class__", "mesh dp=999999999", "outputs:", "forward:", "comm:", "no layouts", "cuda:0",
    "<host>",
]  # fmt: skip


class Guards:
    """What this process does while a program is loaded."""

    def __init__(self) -> None:
        self.inside: Path | None = None
        self.seen: list[str] = []
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.inside is None:
            return
        if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            path, mode = str(arguments[0]), arguments[1]
            writes = isinstance(mode, str) and set(mode) & set("wax+")
            # What errors and fx show of the package's own source.
            known = path.endswith(".py") or path.startswith("<")
            if writes or not (known or Path(os.path.abspath(path)).is_relative_to(self.inside)):
                self.seen.append(f"open {path!r} {mode}")
        elif event in ("import", "compile", "exec"):
            found = arguments[1] if event == "compile" else getattr(arguments[0], "co_filename", "")
            if event == "import" or not str(found).startswith("<eval_with_key>"):
                self.seen.append(f"{event} {str(arguments)[:200]}")
            elif event == "exec" and isinstance(arguments[0], CodeType) and (odd := _odd_names(arguments[0])):
                self.seen.append(f"generated code uses {odd}")
        elif event in RUN:
            self.seen.append(f"{event} {str(arguments)[:200]}")

    def check(self, folder: Path) -> None:
        """Raises where it does not see what it is for."""
        self.inside = folder
        Path("/etc/passwd").read_bytes()
        (folder / "file").write_bytes(b"")
        exec(compile("1", "a file", "exec"))
        exec(compile("open", "<eval_with_key>", "exec"))
        self.inside = None
        kinds = [seen.split(" ")[0] for seen in self.seen]
        assert kinds == ["open", "open", "compile", "exec", "generated"], self.seen
        (folder / "file").unlink()


def _odd_names(code: CodeType) -> list[str]:
    """Names in fx's code that no graph has; the code of its functions too."""
    inner = [one for const in code.co_consts if isinstance(const, CodeType) for one in _odd_names(const)]
    return inner + [name for name in code.co_names if name.startswith("__") or name in ("open", "exec", "eval", "os")]


def mutated(original: Path, to: Path, choose: random.Random) -> str:
    """A mutated copy; returns what was done."""
    shutil.copytree(original, to)
    done = []
    for _ in range(choose.randint(1, 3)):
        kind = choose.choice([in_json, in_json, in_json, in_text, in_text, in_text, in_bytes, files])
        done.append(f"{kind.__name__}({kind(to, choose)})")
    path = to / "program.json"
    if choose.random() < 0.8 and path.is_file() and not path.is_symlink():
        try:
            record = json.loads(path.read_text())
            sign(record, to)
            path.write_text(json.dumps(record))
        except (ValueError, TypeError, KeyError, AttributeError, OSError, RecursionError):
            done.append("unsigned")
    return "; ".join(done)


def in_json(to: Path, choose: random.Random) -> str:
    """One value of the record becomes another, or goes, or a key changes."""
    path = to / "program.json"
    if not path.is_file() or path.is_symlink():  # a pipe would be waited for
        return "none"
    try:
        record = json.loads(path.read_text())
    except (ValueError, OSError, RecursionError):
        return "none"
    places = list(_places(record))
    if not places:
        return "empty"
    owner, key = choose.choice(places)
    what = choose.randrange(6)
    if what == 0 and isinstance(owner, dict):
        owner[choose.choice(["x", "../x", "__class__", "torch", "", "node"])] = owner.pop(key)
    elif what == 1:
        del owner[key]
    elif what == 2:
        other, at = choose.choice(places)
        owner[key] = other[at]
    elif what == 3:
        deep: Any = choose.choice(ODD)
        for _ in range(choose.choice([3, 300])):
            deep = [deep] if choose.random() < 0.5 else {"list": [deep]}
        owner[key] = deep
    else:
        owner[key] = choose.choice(ODD)
    try:
        path.write_text(json.dumps(record))
    except (ValueError, RecursionError):
        path.write_text("[" * 100_000)
    return f"{key!r} {what}"


def _places(value: Any, deepest: int = 12) -> Iterator[tuple[Any, Any]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in pairs:
        yield value, key
        if deepest:
            yield from _places(one, deepest - 1)


def in_text(to: Path, choose: random.Random) -> str:
    """One word of a graph becomes another, or a line is dropped, doubled, moved or cut."""
    path = choose.choice(sorted(to.glob("*.txt")) or [to / "program.json"])
    if not path.is_file() or path.is_symlink():
        return "none"
    lines = path.read_text(errors="replace").splitlines() or [""]
    at, what = choose.randrange(len(lines)), choose.randrange(7)
    if what == 0:
        del lines[at]
    elif what == 1:
        lines.insert(at, lines[choose.randrange(len(lines))])
    elif what == 2:
        lines[at] = lines[at][: choose.randrange(len(lines[at]) + 1)]
    elif what == 3:
        lines[at] = lines[at].replace(choose.choice("0123456789"), choose.choice(["9" * 25, "0", "-1", ""]))
    else:
        parts = lines[at].split(" ")
        parts[choose.randrange(len(parts))] = choose.choice([*WORDS, *lines[choose.randrange(len(lines))].split()])
        lines[at] = " ".join(parts)
    path.write_text("\n".join(lines) + "\n", errors="replace")
    return f"{path.name} {at} {what}"


def in_bytes(to: Path, choose: random.Random) -> str:
    """Bytes of a file are changed, cut off or added."""
    path = choose.choice(sorted(one for one in to.iterdir() if one.is_file() and not one.is_symlink()) or [to / "x"])
    data = bytearray(path.read_bytes()) if path.exists() else bytearray(b"x")
    what = choose.randrange(3)
    if what == 0 and data:
        for _ in range(choose.randint(1, 8)):
            data[choose.randrange(len(data))] = choose.randrange(256)
    elif what == 1:
        del data[choose.randrange(len(data) + 1) :]
    else:
        data += choose.randbytes(choose.choice([1, 1000]))
    path.write_bytes(data)
    return f"{path.name} {what}"


def files(to: Path, choose: random.Random) -> str:
    """A file is gone, another's, a link, a pipe or a folder."""
    present = sorted(one for one in to.iterdir() if one.is_file() and not one.is_symlink())
    if not present:
        return "none"
    path, other, what = choose.choice(present), choose.choice(present), choose.randrange(5)
    data = other.read_bytes()
    path.unlink()
    if what == 1:
        path.write_bytes(data)
    elif what == 2:
        path.symlink_to(choose.choice(["/etc/passwd", "/dev/zero", str(to), "nowhere", f"../{to.name}/{other.name}"]))
    elif what == 3:
        os.mkfifo(path)
    elif what == 4:
        path.mkdir()
    return f"{path.name} {what}"


def attempt(folder: Path, watch: Guards) -> tuple[str | None, bool]:
    """What is wrong with the way in which ``folder`` is loaded, or None; and whether it was."""
    tracemalloc.reset_peak()
    start, loaded, wrong = time.thread_time(), False, None
    watch.seen.clear()
    watch.inside = folder
    try:
        program = shardc.load(folder)
        loaded = True
        halves = [half for half in (program.forward, program.backward, program.inference) if half is not None]
        for half in halves:
            dump(half, program.mesh)
        program.certificate().text()
    except PrecompiledError as error:
        if len(str(error)) > 20_000 or not str(error).strip():
            wrong = f"an error of {len(str(error))} characters"
    except BaseException as error:
        wrong = f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        watch.inside = None
    if watch.seen:
        wrong = "; ".join(watch.seen[:3])
    if (took := time.thread_time() - start) > SECONDS:
        wrong = f"{took:.0f} s"
    if (peak := tracemalloc.get_traced_memory()[1]) > BYTES:
        wrong = f"{peak >> 20} MiB"
    return wrong, loaded


def read_annotations(kind: Any) -> None:
    """Those of ``kind`` and of all that it is made of: Python evaluates them when they are first looked at."""
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        for hint in _hints(kind).values():
            read_annotations(hint)
    for part in get_args(kind):
        read_annotations(part)


def main(folder: str, scratch: str, seed: str, count: str) -> None:
    shardc.load(folder)  # what is imported late is there
    read_annotations(Record)
    watch, loads = Guards(), 0
    watch.check(Path(scratch))
    tracemalloc.start()
    for number in range(int(count)):
        choose = random.Random(f"{seed} {number}")
        to = Path(scratch) / f"m{number}"
        done = mutated(Path(folder), to, choose)
        wrong, loaded = attempt(to, watch)
        loads += loaded
        if wrong is not None:
            print(f"{number}: {wrong} after {done}")
        shutil.rmtree(to)
    if not 0 < loads < int(count):
        print(f"{loads} of {count} were loaded")


if __name__ == "__main__":
    main(*sys.argv[1:])
