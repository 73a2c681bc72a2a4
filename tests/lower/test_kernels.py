"""C++ kernels in files that they share, and the vector instructions that they may use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from threading import Event, Timer, current_thread
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor import cpu_vec_isa
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.cpp_builder import CppBuilder
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from shardc.ir.executable import FORWARD, INFERENCE, Half
from shardc.ir.mesh import Mesh
from shardc.lower import kernels, lower
from tests.lower.lowering import lowered


def many_kernels(x: Tensor, y: Tensor) -> list[Tensor]:
    """Reductions, products and whole numbers, which do not fuse into one kernel."""
    made = [torch.softmax(x + 1, -1), (x * y).sum(0), (y > 0).long().cumsum(0)]
    for turn in (torch.sin, torch.cos, torch.tanh, torch.sigmoid, torch.relu, torch.erf):
        y = torch.mm(turn(y) * 2, x)
        made.append(turn(y).amax(1))
    return [*made, y]


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The files of kernels that are compiled or loaded, from an empty cache on."""
    made: list[str] = []
    load = CppPythonBindingsCodeCache.load_async
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(
        CppPythonBindingsCodeCache,
        "load_async",
        staticmethod(lambda text, *args, **kwargs: [made.append(text), load(text, *args, **kwargs)][1]),
    )
    monkeypatch.setattr(CppPythonBindingsCodeCache, "cache", {})  # what this process has loaded
    monkeypatch.setattr("torch._inductor.codecache.LOCK_TIMEOUT", 30)  # seconds, where a lock is waited for in vain
    monkeypatch.setattr(kernels, "AT_ONCE", 3)
    return made


@pytest.mark.parametrize("threads", [1, 2])
def test_kernels_share_files_and_stay_as_they_are(
    threads: int, monkeypatch: pytest.MonkeyPatch, files: list[str]
) -> None:
    x, y = torch.randn(2, 48, 48).unbind()
    with FakeTensorMode():
        gm = make_fx(many_kernels)(torch.empty(48, 48), torch.empty(48, 48))
    with inductor_config.patch(force_disable_caches=True, compile_threads=threads):
        together = lowered(gm, INFERENCE)([x, y])
        shared = len(files)
        monkeypatch.setattr("shardc.lower.inductor.together", nullcontext)
        apart = lowered(gm, INFERENCE)([x, y])
    count = len(files) - shared
    assert count > 3 and shared == -(-count // 3)
    for ours, theirs in zip(together, apart, strict=True):
        assert torch.equal(ours, theirs)


def test_a_kernel_of_several_graphs_is_compiled_once(files: list[str], tmp_path: Path) -> None:
    def first(x: Tensor) -> list[Tensor]:
        return [torch.mm(x.sin(), x).exp()]

    def second(x: Tensor) -> list[Tensor]:
        return [torch.mm(x.cos(), x).exp()]

    def run(fn: Callable[[Tensor], list[Tensor]]) -> list[str]:
        with FakeTensorMode():
            gm = make_fx(fn)(torch.empty(48, 48))
        files.clear()
        for ours, expected in zip(lowered(gm, INFERENCE)([x]), fn(x), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
        return list(files)

    x = torch.rand(48, 48)
    (both,) = run(first)
    again, new = run(second)
    assert again == both
    assert both.count("_py(PyObject") == 2 and new.count("_py(PyObject") == 1
    for path in (tmp_path / "shardc" / "kernels").glob("*.cpp"):
        path.write_text("damaged")
    (tmp_path / "fxgraph").rename(tmp_path / "gone")
    (all_new,) = run(second)
    assert all_new.count("_py(PyObject") == 2


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_file_that_a_killed_compiler_left_is_compiled_again(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    build, killed = CppBuilder.build, list[str]()

    def empty_at_first(self: CppBuilder) -> None:
        path = self.get_target_file_path()
        if path.endswith(".main.so") and path not in killed:  # others test the compiler
            killed.append(path)
            Path(path).touch()
        else:
            build(self)

    monkeypatch.setattr(CppBuilder, "build", empty_at_first)
    x = torch.rand(48, 48)
    with FakeTensorMode():
        gm = make_fx(lambda x: [x.sin() + threads])(torch.empty(48, 48))
    with inductor_config.patch(compile_threads=threads):
        torch.testing.assert_close(lowered(gm, INFERENCE)([x]), [x.sin() + threads])
    assert len(killed) == 1


def test_kernels_of_several_graphs_are_waited_for_at_the_end(monkeypatch: pytest.MonkeyPatch, files: list[str]) -> None:
    """g++ works on a graph while the next one is lowered; then both run."""
    waited: list[int] = []
    result = kernels._Kernel.result

    def noted(self: kernels._Kernel, timeout: float | None = None) -> Any:
        waited.append(len(files))
        return result(self, timeout)

    monkeypatch.setattr(kernels._Kernel, "result", noted)
    functions = [lambda x: [torch.mm(x.sin(), x).exp()], lambda x: [torch.mm(x.tan(), x).cosh()]]
    x = torch.rand(48, 48)
    with FakeTensorMode():
        graphs = [make_fx(fn)(torch.empty(48, 48)) for fn in functions]
    halves = [Half(kind, gm, Mesh(dp=2)) for kind, gm in zip((FORWARD, INFERENCE), graphs, strict=True)]
    with inductor_config.patch(force_disable_caches=True):
        made = lower(*halves, backend="inductor")
    assert len(files) == 2 and set(waited) == {2}
    for compiled, fn in zip(made, functions, strict=True):
        torch.testing.assert_close(compiled([x]), fn(x), rtol=1e-5, atol=1e-5)


@pytest.fixture
def x86(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Any machine is one of x86, on which no environment variable speaks of vector instructions."""
    monkeypatch.setattr(cpu_vec_isa.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False, raising=False)
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    with inductor_config.patch({"cpp.simdlen": None, "cpp.vec_isa_ok": None}):
        yield


@pytest.mark.usefixtures("x86")
def test_vector_instructions_are_tested_before_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread, once, and whoever needs them waits for it."""
    started, may_end, threads = Event(), Event(), []

    def slow(self: cpu_vec_isa.VecISA, code: str) -> bool:
        threads.append(current_thread())
        started.set()
        return may_end.wait(30)

    listed, impl = cpu_vec_isa.valid_vec_isa_list, cpu_vec_isa.VecISA._VecISA__bool__impl  # type: ignore[attr-defined]
    monkeypatch.setattr(kernels, "caches", lambda: False)
    monkeypatch.setattr(kernels, "_begun", [])
    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", slow)
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["avx2"])
    for cached in (listed, impl):
        cached.cache_clear()
    try:
        kernels.begin_check()
        kernels.begin_check()
        assert started.wait(30)
        Timer(0.1, may_end.set).start()
        kernels.check_vectors()
        assert may_end.is_set() and list(map(str, listed())) == ["avx2"]
        assert len(threads) == 1 and threads[0] is not current_thread()
    finally:
        may_end.set()
        for cached in (listed, impl):
            cached.cache_clear()


HEAD = "#include <torch/csrc/inductor/cpp_prefix.h>\n"


@pytest.mark.parametrize(
    ("source", "plain"),
    [
        (HEAD + 'extern "C"  void  kernel(float* out)\n{\n    #pragma omp simd\n    out[0] = 1;\n}\n', True),
        (HEAD + 'static int n = 1;\nextern "C" void kernel(float* out) { out[0] = n; }', False),
        (HEAD + 'extern "C" void kernel(float* out)\n{\n#define N 1\n    out[0] = N;\n}', False),
        (HEAD + 'extern "C" void kernel(float* out) {}\nextern "C" void other() {}', False),
    ],
)
def test_code_that_could_clash_has_a_file_of_its_own(source: str, plain: bool) -> None:
    assert (kernels._PLAIN.fullmatch(source) is not None) == plain


@pytest.fixture(params=[False, True], ids=["plain", "bf16"])
def starts(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, x86: None
) -> Iterator[Callable[..., list[str]]]:
    """What a start tests of its processor's kinds of vector instructions: the kind ``fails`` does not work.

    With AVX512-BF16, Inductor compiles another test for ``avx512``, which is of no kind.
    """
    listed, impl = cpu_vec_isa.valid_vec_isa_list, cpu_vec_isa.VecISA._VecISA__bool__impl  # type: ignore[attr-defined]

    def forget() -> None:
        for cached in (listed, impl, cpu_vec_isa.VecAVX512.__bool__):
            cached.cache_clear()
        for kind in cpu_vec_isa.supported_vec_isa_list:
            vars(kind).pop("_is_avx512_bf16_supported", None)

    def start(*kinds: str, fails: str = "") -> list[str]:
        def check(self: cpu_vec_isa.VecISA, code: str) -> bool:
            if code == cpu_vec_isa.VecISA._avx_code:
                tested.append(str(self))
            return str(self) != fails

        tested: list[str] = []
        forget()
        monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", check)
        monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: list(kinds))
        kernels.check_vectors()
        assert str(cpu_vec_isa.pick_vec_isa()) == next(
            kind for kind in ("avx512", "avx2") if kind in {*kinds} - {fails}
        )
        return tested

    monkeypatch.setattr(kernels, "cache_folder", lambda name: tmp_path)
    monkeypatch.setattr(kernels, "caches", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: request.param, raising=False)
    yield start
    forget()


def test_vector_instructions_that_do_not_work_are_not_used(starts: Callable[..., list[str]]) -> None:
    """The first kind is tested; if that fails, Inductor tests all, and so does the next start."""
    assert [starts("avx2", "avx512", fails="avx512") for _ in range(2)] == [["avx512", "avx2"]] * 2


def test_vector_instructions_that_worked_are_not_tested_again(starts: Callable[..., list[str]]) -> None:
    """Unless the cache comes to another processor."""
    assert [starts(*kinds) for kinds in (["avx2", "avx512"],) * 2 + (["avx2"],) * 2] == [["avx512"], [], ["avx2"], []]
