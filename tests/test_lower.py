"""What Inductor emits: collectives in the schedule's order, and nothing released that is on its way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from threading import Event, Timer, current_thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from filelock import FileLock
from torch import Tensor, fx
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor import cpu_vec_isa
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardc.runtime.groups  # noqa: F401  (implements the collectives)
from shardc.errors import VerifyError
from shardc.ir.emitted import check_order, collective_at, of_graph, of_source, uses_of
from shardc.ir.executable import FORWARD, INFERENCE, Compiled, Half
from shardc.ir.flops import is_dense
from shardc.ir.mesh import Mesh
from shardc.lower import kernels, lower, shared
from shardc.lower.inductor import _decomposed, lowered_for

aten, c10d, direct = torch.ops.aten, torch.ops._c10d_functional, torch.ops.shardc
GROUP = "shardc:dp"


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """Inductor asks for the group; nothing is sent."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    assert dist.group.WORLD is not None
    _register_process_group(GROUP, dist.group.WORLD)  # type: ignore[arg-type]
    yield
    _unregister_process_group(GROUP)  # type: ignore[arg-type]
    dist.destroy_process_group()


def late_waits(x: Tensor, y: Tensor) -> list[Tensor]:
    """Three collectives of values that nothing else reads, waited for in another order behind two products."""
    (summed,) = direct.all_reduce_coalesced([x + 1], "sum", GROUP)
    moved = direct.permute_ranks(x + 2, [1, 0], GROUP)
    native = c10d.all_gather_into_tensor(x + 3, 2, GROUP)
    between = torch.mm(torch.mm(y, y), y)
    return [c10d.wait_tensor(native), c10d.wait_tensor(moved), c10d.wait_tensor(summed), between]


def lowered(gm: fx.GraphModule, phase: str) -> Compiled:
    return lower(Half(phase, gm, Mesh(dp=2)), backend="inductor")[0]


def emitted(inference: bool) -> tuple[fx.GraphModule, str]:
    with FakeTensorMode():
        x, y = torch.empty(64, 64), torch.empty(64, 64)
    gm = make_fx(late_waits)(x, y)
    # A cache could give the code of another version.
    with inductor_config.patch(force_disable_caches=True):
        return gm, lowered(gm, INFERENCE if inference else FORWARD).source_code


def low(x: Tensor, w: Tensor, image: Tensor, kernel: Tensor, q: Tensor) -> list[Tensor]:
    """Products, a convolution and attention with their gradients, in the dtype of what is given."""
    mixed = torch.addmm(torch.mm(x, w), x, w) + torch.mm(w.t(), x.t()).t()
    seen = aten.convolution.default(image, kernel, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    around = aten.convolution_backward.default(
        seen, image, kernel, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
    )
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(q, q * 0.5, q, 0.0, True)
    back = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(q, q, q * 0.5, q, out, lse, 0.0, True)
    return [mixed, torch.bmm(q[0], q[0].mT), seen, *around[:2], out, *back]


@pytest.mark.parametrize("slow", [pytest.param(True, marks=pytest.mark.slow), False])
def test_products_of_few_bits_run_in_float32_where_the_cpu_lacks_them(
    slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardc.lower.few_bits.slow_dtypes", lambda: frozenset([torch.bfloat16] if slow else []))
    generator = torch.Generator().manual_seed(0)
    shapes = [(16, 8), (8, 16), (2, 4, 8, 8), (6, 4, 3, 3), (2, 4, 8, 16)]
    given = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in given]
    gm = make_fx(low)(*fakes)
    ran = [node for node in _decomposed(gm, fakes).graph.nodes if is_dense(node.target)]
    assert {node.args[0].meta["val"].dtype for node in ran} == {torch.float32 if slow else torch.bfloat16}
    assert len(ran) == 8
    expected = low(*(x.double() for x in given))
    with inductor_config.patch(force_disable_caches=True):
        made = lowered(gm, INFERENCE)(given)
    for ours, theirs in zip(made, expected, strict=True):
        assert ours.dtype == torch.bfloat16
        assert ((ours - theirs).abs().max() / theirs.abs().max()).item() < 2**-6


def test_results_have_the_strides_that_they_were_traced_with() -> None:
    """Inductor computes convolutions with channels last; what the backward half saves of them it is compiled for."""

    def convolved(x: Tensor, weight: Tensor) -> list[Tensor]:
        y = torch.ops.aten.convolution.default(x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        return [y, y.relu()]

    with FakeTensorMode():
        gm = make_fx(convolved)(torch.empty(2, 8, 8, 8), torch.empty(16, 8, 3, 3))
    x, weight = torch.randn(2, 8, 8, 8), torch.randn(16, 8, 3, 3)
    with inductor_config.patch(force_disable_caches=True):
        made = lowered(gm, FORWARD)([x, weight])
    for result, expected in zip(made, convolved(x, weight), strict=True):
        assert result.stride() == expected.stride()
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("inference", [False, True])
def test_order_and_waits_are_kept(inference: bool) -> None:
    gm, source = emitted(inference)
    assert of_source(source) == of_graph(gm.graph)
    assert of_source(source) == [
        f"all_reduce_coalesced({GROUP})", f"permute_ranks({GROUP})", f"all_gather_into_tensor({GROUP})",
    ]  # fmt: skip
    lines = source.splitlines()
    products = [at for at, line in enumerate(lines) if "extern_kernels.mm(" in line]
    waits = [at for at, line in enumerate(lines) if "wait_tensor.default(" in line]
    assert len(products) == 2 and len(waits) == 3
    assert max(products) < min(waits), "a wait was moved in front of the compute that it should be hidden by"


@pytest.mark.parametrize("inference", [False, True])
def test_what_is_on_its_way_is_not_released(inference: bool) -> None:
    """Memory that Inductor takes for free is written over, perhaps before it was sent."""
    lines = emitted(inference)[1].splitlines()
    starts = [re.search(r"torch\.ops\.shardc\.\w+\.default\(\[?(buf\d+)", line) for line in lines]
    sent = [found.group(1) for found in starts if found]
    first_wait = next(at for at, line in enumerate(lines) if "wait_tensor.default(" in line)
    assert len(sent) == 2
    for name in sent:
        released = [line for line in lines[:first_wait] if re.search(rf"\bdel {name}\b", line)]
        assert not released, f"{name} is on its way: {released}"


def calls(x: Tensor, y: Tensor, z: Tensor) -> list[Tensor]:
    """Collectives in messages, in planned memory; one is not waited for, one was started elsewhere."""
    first, second = direct.all_gather_into_tensor_coalesced([x, y], 2, GROUP, [0, 1, 2])
    (summed,) = direct.all_reduce_coalesced([y], "sum", GROUP, [3])
    return [second, c10d.wait_tensor(first), c10d.wait_tensor(z), c10d.wait_tensor(summed)]


def test_calls_alone_are_not_given_to_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their code says of memory what Inductor's would, and what is sent is in use until what comes was waited for."""
    with FakeTensorMode():
        gm = make_fx(calls)(*(torch.empty(4, 4) for _ in range(3)))
    with inductor_config.patch(force_disable_caches=True):
        theirs = uses_of(lowered_for(gm, [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")], FORWARD)[1])
    monkeypatch.setattr("shardc.lower.lowered", None)
    source = lowered(gm, FORWARD).source_code
    assert of_source(source) == of_graph(gm.graph)
    ours = uses_of(source)
    assert (ours.results, ours.wires, set(ours.waits)) == (theirs.results, theirs.wires, set(theirs.waits))
    assert ours.results == [{1}, {0}, {-3}, {3}] and set(ours.spans) == {0, 1, 2, 3}
    at = {line.strip(): number for number, line in enumerate(source.splitlines())}
    first, _, summed = (number for line, number in at.items() if "wait_tensor" in line)
    assert first < at["del arg0"] and summed < at["del arg1"], source


def test_another_order_is_an_error() -> None:
    gm, source = emitted(inference=False)
    for old, new, said in (
        ("torch.ops.shardc.permute_ranks", "torch.ops.shardc.all_gather", r"starts all_gather\(.* as collective 1"),
        (f"'{GROUP}'", "'shardc:tp'", r"starts all_reduce_coalesced\(shardc:tp\) as collective 0"),
    ):
        with pytest.raises(VerifyError, match=said):
            check_order(gm.graph, source.replace(old, new))
    with pytest.raises(VerifyError, match="nothing more as collective 0"):
        check_order(gm.graph, "")


def test_lines_tell_their_collective() -> None:
    """The waits stand in another order than the starts; an op that is neither is in no collective."""
    _, source = emitted(False)
    lines = source.splitlines()
    found = [collective_at(lines, at + 1) for at, line in enumerate(lines) if "wait_tensor.default(" in line]
    assert found == [2, 1, 0]
    starts = [at + 1 for at, line in enumerate(lines) if of_source(line)]
    assert [collective_at(lines, at) for at in starts] == [0, 1, 2]
    (product,) = {collective_at(lines, at + 1) for at, line in enumerate(lines) if "extern_kernels.mm(" in line}
    assert product is None


@pytest.fixture
def first_of_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The first of two ranks, with an empty cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(shared.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(shared.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(shared.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(shared, "_POLL", 0.0)
    with inductor_config.patch(force_disable_caches=False, fx_graph_cache=True):
        yield


@pytest.mark.usefixtures("first_of_two")
def test_what_no_rank_has_made_comes_first() -> None:
    """What another has made may still be with g++, and is there in the end."""
    with FakeTensorMode():
        made, other, third = (make_fx(op)(torch.empty(4)) for op in (torch.sin, torch.cos, torch.tan))
    graphs, order = dict.fromkeys((made, other, third), FORWARD), list[fx.GraphModule]()
    shared.in_turns({made: FORWARD}, lambda gm, kind: kind)
    shared.in_turns(graphs, lambda gm, kind: order.append(gm))
    assert order == [other, third, made]


@pytest.mark.usefixtures("first_of_two")
def test_nobody_waits_for_a_graph_that_cannot_be_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one rank compiled and could not leave in the cache, another compiles too, while others have it in work."""
    with FakeTensorMode():
        gm = make_fx(lambda x: x + 1)(torch.empty(4))
    waited: list[float] = []

    def compiled(gm: fx.GraphModule, kind: str) -> str:
        counters["inductor"]["fxgraph_cache_bypass"] += 1
        return kind

    def other_is_done(seconds: float) -> None:
        waited.append(seconds)
        lock.release()

    monkeypatch.setattr(shared.time, "sleep", other_is_done)
    lock = FileLock(shared.cache_folder("locks") / f"{shared.name_of(gm, FORWARD)}.lock")
    lock.acquire()
    assert shared.in_turns({gm: FORWARD}, compiled) == {gm: FORWARD} and len(waited) == 1
    lock.acquire()
    assert shared.in_turns({gm: FORWARD}, compiled) == {gm: FORWARD} and len(waited) == 1
    lock.release()


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
    monkeypatch.setattr(cpu_vec_isa.platform, "machine", lambda: "x86_64")
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


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., list[str]]]:
    """What a start tests of its processor's kinds of vector instructions: the kind ``fails`` does not work."""
    listed, impl = cpu_vec_isa.valid_vec_isa_list, cpu_vec_isa.VecISA._VecISA__bool__impl  # type: ignore[attr-defined]

    def forget() -> None:
        for cached in (listed, impl, cpu_vec_isa.VecAVX512.__bool__):
            cached.cache_clear()

    def start(*kinds: str, fails: str = "") -> list[str]:
        def check(self: cpu_vec_isa.VecISA, code: str) -> bool:
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
    monkeypatch.setattr(cpu_vec_isa.platform, "machine", lambda: "x86_64")
    yield start
    forget()


def test_vector_instructions_that_do_not_work_are_not_used(starts: Callable[..., list[str]]) -> None:
    """The first kind is tested; if that fails, Inductor tests all, and so does the next start."""
    assert [starts("avx2", "avx512", fails="avx512") for _ in range(2)] == [["avx512", "avx2"]] * 2


def test_vector_instructions_that_worked_are_not_tested_again(starts: Callable[..., list[str]]) -> None:
    """Unless the cache comes to another processor."""
    assert [starts(*kinds) for kinds in (["avx2", "avx512"],) * 2 + (["avx2"],) * 2] == [["avx512"], [], ["avx2"], []]
