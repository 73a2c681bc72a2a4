"""Compiles several C++ kernels of a graph as one file, since g++ does most of its work per file.

Inductor gives each kernel a file and a g++ of its own, each of which reads the same headers and instantiates the same
templates: on a 2-core AMD EPYC five kernels took 4.3 s in five files and 1.1 s in one. Code, flags and calls stay the
same. A kernel of several graphs is compiled with the first of them: an index beside Inductor's cache names its file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from functools import cache, partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from threading import Thread, current_thread, get_ident
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from filelock import FileLock
from torch._inductor import config, cpu_vec_isa
from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._inductor.codecache import CodeCacheFuture, CppPythonBindingsCodeCache, write_atomic

from shardc.lower.compile_lock import cache_folder, caches

AT_ONCE = 8  # kernels of a file; several files are compiled side by side
_PLAIN = re.compile(r'\s*(#include [^\n]*)\s*extern "C"\s+void\s+kernel(\((?:(?!\n\s*#(?!pragma)|extern "C").)*)', re.S)
_begun: list[Thread] = []  # the thread that tests vector instructions, once it is started
Load = Callable[[], ModuleType]
Loads = dict[str, Load]  # file name -> returns the compiled module
_CALL, _TABLE = "static PyObject* {}_py", "static PyMethodDef"


class _Kernel(CodeCacheFuture):
    """Future of a C++ kernel that is compiled in one file with other kernels, to save runs of the compiler.

    Args:
        argtypes: C++ types of its arguments.
        include: the first line of its code.
        code: the rest of its code, from its arguments on.
    """

    def __init__(self, argtypes: Sequence[str], include: str, code: str) -> None:
        self.argtypes, self.include, self.code = argtypes, include, code
        self.load: Load | None = None  # returns the module with the kernel
        self.name = ""

    def result(self, timeout: float | None = None) -> Any:
        """Return the compiled function, once the compiler is done; ``timeout``, of torch's signature, is ignored."""
        assert self.load is not None, "the graph that has it was not waited for"
        return getattr(self.load(), self.name)


_Scopes = list[tuple[dict[str, object], dict[str, _Kernel]]]
_deferred: ContextVar[_Scopes | None] = ContextVar("_deferred", default=None)  # graphs that `at_end` waits for


@contextmanager
def together() -> Iterator[None]:
    """Context manager in which the C++ kernels of each graph are compiled, or loaded, as one file. Applies to graphs
    of this thread only.
    """
    alone, wait, thread = AsyncCompile.cpp_pybinding, AsyncCompile.wait, get_ident()

    def defer_kernel(self: AsyncCompile, argtypes: list[str], source_code: str) -> object:
        plain = _PLAIN.fullmatch(source_code) if get_ident() == thread else None
        return alone(self, argtypes, source_code) if plain is None else _Kernel(argtypes, *plain.groups())

    def wait_for_kernels(self: AsyncCompile, scope: dict[str, object]) -> None:
        kernels = {name: value for name, value in scope.items() if isinstance(value, _Kernel)}
        loads: Loads = {}
        left = iter([kernel for kernel in kernels.values() if not _take_cached(kernel, loads, self)])
        while some := list(islice(left, AT_ONCE)):
            _compile_in_one_file(some, self)
        if (graphs := _deferred.get()) is not None:
            graphs.append((scope, kernels))
            scope.update(dict.fromkeys(kernels))  # Inductor would wait for them
        else:
            _define_kernels(scope, kernels)
        wait(self, scope)

    if not _template_has_parts():
        yield
        return
    with (
        patch.object(AsyncCompile, "cpp_pybinding", defer_kernel),
        patch.object(AsyncCompile, "wait", wait_for_kernels),
    ):
        yield


@contextmanager
def at_end() -> Iterator[None]:
    """Context manager around the lowering of several graphs. Their C++ kernels compile in the background while later
    graphs are lowered; the exit waits for them.

    The graphs cannot run inside the block.
    """
    graphs: _Scopes = []
    token = _deferred.set(graphs)
    try:
        yield
    finally:
        _deferred.reset(token)
    for scope, kernels in graphs:
        _define_kernels(scope, kernels)


def _define_kernels(scope: dict[str, object], kernels: dict[str, _Kernel]) -> None:
    """Makes compiled ``kernels`` known to a graph's generated code, by setting them in its globals ``scope``."""
    scope.update({name: kernel.result() for name, kernel in kernels.items()})


def _take_cached(kernel: _Kernel, loads: Loads, by: AsyncCompile) -> bool:
    """Load the C++ function ``kernel`` from a file compiled for an earlier graph. Return whether there is one.
    ``loads`` has the files that are loaded or being loaded.
    """
    if not caches():
        return False
    with suppress(OSError, ValueError):  # nothing is there, or it is damaged
        file, name = _cache_entry(kernel).read_text().split()
        if file not in loads and _hash(text := (cache_folder("kernels") / file).read_text()) == Path(file).stem:
            loads[file] = _begin_loading(text, by)
        kernel.load, kernel.name = loads.get(file), name
    return kernel.load is not None


def _compile_in_one_file(kernels: Sequence[_Kernel], by: AsyncCompile) -> None:
    """Write ``kernels`` to one C++ file, and start to compile it in the background."""
    lines = list(dict.fromkeys(kernel.include for kernel in kernels))
    for at, kernel in enumerate(kernels):
        kernel.name = f"kernel_{at}"
        lines.append(f'extern "C" void {kernel.name}{kernel.code}')
    text = "\n".join([*lines, _bindings(kernels)])
    load = _begin_loading(text, by)
    for kernel in kernels:
        kernel.load = load
    if caches():
        file = cache_folder("kernels") / f"{_hash(text)}.cpp"
        write_atomic(str(file), text)
        for kernel in kernels:
            write_atomic(str(_cache_entry(kernel)), f"{file.name} {kernel.name}")


def _begin_loading(text: str, by: AsyncCompile) -> Load:
    """Start to compile the C++ source ``text``, unless it is cached. Return a function that waits for the compiled
    module and returns it.
    """
    # `load_async` submits while it holds the lock that the work takes. With one thread, that would wait for itself.
    submit = by.submit if get_compile_threads() > 1 else None
    return partial(_load_or_recompile, CppPythonBindingsCodeCache.load_async(text, submit_fn=submit))


def _load_or_recompile(load: Load) -> ModuleType:
    """Return the module of compiled kernels that ``load`` loads. If its file is broken, as after a killed compiler,
    it is compiled again.
    """
    try:
        return load()
    except ImportError as error:
        if not error.path:
            raise
        with FileLock(f"{error.path}.lock"):
            try:
                return load()  # another rank has compiled it in the meantime
            except ImportError:
                Path(error.path).unlink(missing_ok=True)
                return load()


def _cache_entry(kernel: _Kernel) -> Path:
    """Return the path of the cache entry of ``kernel``: a small file that names the C++ file in which the kernel is
    compiled.
    """
    return cache_folder("kernels") / _hash(torch.__version__, *kernel.argtypes, kernel.include, kernel.code)


def _hash(*texts: str) -> str:
    """Return a hash of ``texts``, by which generated code is found in a cache."""
    return sha256("\n".join(texts).encode()).hexdigest()


def _bindings(kernels: Sequence[_Kernel]) -> str:
    """Return the C++ source of one Python module with all ``kernels``, derived from Inductor's template for a single
    kernel.
    """
    texts = [_binding(kernel) for kernel in kernels]
    calls = [
        text[text.index(_CALL.format(kernel.name)) : text.index(_TABLE)]
        for kernel, text in zip(kernels, texts, strict=True)
    ]
    first = kernels[0].name
    head, rest = texts[0].split(calls[0])
    rows = "".join(f'{{"{kernel.name}", {kernel.name}_py, METH_VARARGS, ""}},\n' for kernel in kernels)
    table = rest.replace(f'{{"{first}", {first}_py, METH_VARARGS, ""}},', rows)
    return head + "".join(calls) + table.replace(f"PyInit_{first}", "PyInit_kernel")


def _binding(kernel: _Kernel) -> str:
    """Return the C++ source of Inductor's Python bindings for ``kernel`` alone."""
    of = CppPythonBindingsCodeCache
    arguments = ", ".join(
        f"parse_arg<{kind.replace('const ', '')}>(args, {at})" for at, kind in enumerate(kernel.argtypes)
    )
    return of.suffix_template.format(
        arg_len=len(kernel.argtypes),
        call_entry_func=of.call_entry_function.format(arguments).replace("kernel(", f"{kernel.name}(", 1),
        entry_func=kernel.name,
        extra_parse_arg=of.extra_parse_arg.format(array_len=-1),
    )


@cache
def _template_has_parts() -> bool:
    """Return whether Inductor's C++ template has the snippets that shardc replaces, once each."""
    kernel = _Kernel([], "", "")
    kernel.name = "kernel_0"
    text = _binding(kernel)
    parts = (_CALL.format(kernel.name), _TABLE, '{"kernel_0", kernel_0_py, METH_VARARGS, ""},', "PyInit_kernel_0")
    return all(text.count(part) == 1 for part in parts)


def begin_check() -> None:
    """Start in the background to test with g++ which vector instructions this CPU has (`check_vectors`), as that
    takes seconds.
    """
    if _begun or _vectors_are_known():
        return
    thread = Thread(target=copy_context().run, args=(_try_check,), name="vector instructions", daemon=True)
    _begun.append(thread)
    thread.start()


def check_vectors() -> None:
    """Find the vector instructions that Inductor can use on this machine.

    Inductor would compile and run a test for each kind that the processor has (AVX2, AVX-512 and so on), and then use
    one. Here only that kind is tested, once per machine. If its test fails, Inductor tests all.
    """
    if _begun and _begun[0] is not current_thread():
        _begun[0].join()
    if _vectors_are_known():
        return
    listed = cpu_vec_isa.valid_vec_isa_list
    with config.patch({"cpp.vec_isa_ok": True}):
        kinds = listed()
    picked = cpu_vec_isa.pick_vec_isa()
    if picked not in kinds:
        return
    passed = cache_folder("vectors") / _hash(
        torch.__file__, cpu_vec_isa._get_isa_dry_compile_fingerprint(picked.build_arch_flags()), *map(str, kinds)
    )
    if caches() and passed.exists():
        picked.check_build = lambda code: True  # type: ignore[method-assign]
    works = cpu_vec_isa.VecISA.__bool__(picked)  # tested now, once
    vars(picked).pop("check_build", None)
    if works:
        passed.touch()
    else:
        listed.cache_clear()
        for kind in kinds:
            getattr(type(kind).__bool__, "cache_clear", lambda: None)()


def _vectors_are_known() -> bool:
    """Whether the vector instructions to compile for are known in this process."""
    return config.cpp.vec_isa_ok is not None or cpu_vec_isa.valid_vec_isa_list.cache_info().currsize > 0


def _try_check() -> None:
    """Runs `check_vectors` in a background thread. An error is dropped here: the thread that needs the result runs it
    again, and raises.
    """
    with suppress(Exception):  # the thread that needs it tries again, and raises
        check_vectors()
