"""torch's op of `flex_attention`, which has a kernel on CUDA, computes what shardc's does; here both run on a CPU.

Without a kernel, torch's op reads the functions and no table, so tables are compared with those of its `BlockMask`.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, fx
from torch._inductor.inductor_prims import force_stride_order
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask

from shardc.capture.flex import functions_of
from shardc.custom_ops import flex_ops
from shardc.custom_ops.flex_ops import FLEX, FLEX_GRADIENT, FLEX_TABLES
from shardc.errors import ShardcWarning
from shardc.lower import flex_kernel, inductor

BATCH, HEADS, GROUPS, ROWS, COLUMNS = 2, 4, 2, 150, 270
DOCUMENT = torch.arange(BATCH * COLUMNS).view(BATCH, COLUMNS) // 100
POSITIONS: dict[str, dict[str, Tensor]] = {
    "none": {},
    "rows": {"rows": torch.arange(ROWS) + 120},
    "rows and columns": {"rows": torch.arange(ROWS) + 120, "columns": torch.arange(COLUMNS).flip(0)},
    "all": {
        "rows": torch.arange(ROWS), "columns": torch.arange(COLUMNS).roll(7), "batches": torch.tensor([1, 0]),
        "heads": torch.tensor([2, 0, 1, 3]),
    },
}  # fmt: skip


def nearer(score: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor, slope: Tensor, bias: Tensor) -> Tensor:
    return score * slope[head] + bias[head, (i - j).clamp(-9, 9) + 9]


def same_document(batch: Tensor, head: Tensor, i: Tensor, j: Tensor, document: Tensor) -> Tensor:
    return (document[batch, i] == document[batch, j]) & (i >= j)


def by_decomposition(function: object, operands: list[Tensor]) -> list[Tensor]:
    """Return the results of ``function`` by torch's op."""
    with torch.no_grad():
        gm = make_fx(function, decomposition_table=flex_kernel.KERNELS, tracing_mode="fake")(*operands)
    (call,) = [node for node in gm.graph.nodes if str(node.target).startswith("flex_attention")]
    if str(call.target) == "flex_attention_backward":  # its kernel reads the log-sum-exp as if it were contiguous
        sums = call.args[4]
        assert sums.target is force_stride_order and sums.meta["val"].is_contiguous()
    with torch.no_grad():
        return list(gm(*operands))


@pytest.mark.medium
@pytest.mark.parametrize("wanted", [[0, 1], [], [1]], ids=str)
@pytest.mark.parametrize("keys", [COLUMNS, COLUMNS - 10])
@pytest.mark.parametrize("places", POSITIONS)
def test_equals_shardcs_code(places: str, keys: int, wanted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_kernel, "takes", lambda *_: True)
    torch.manual_seed(0)
    shapes = [(BATCH, ROWS, HEADS, 16), (BATCH, COLUMNS, GROUPS, 16), (BATCH, COLUMNS, GROUPS, 20)]
    query, key, value = (torch.randn(shape, dtype=torch.float64).transpose(1, 2) for shape in shapes)
    captured = [torch.randn(HEADS, dtype=torch.float64), torch.randn(HEADS, 19, dtype=torch.float64)]
    body = functions_of(query, nearer, captured, same_document, [DOCUMENT])
    assert body is not None
    where = POSITIONS[places]
    tables = FLEX_TABLES([DOCUMENT], body, [BATCH, HEADS, ROWS, COLUMNS], keys, torch.device("cpu"), **where)

    def forward(
        q: Tensor, k: Tensor, v: Tensor, slope: Tensor, bias: Tensor, document: Tensor, *rest: Tensor
    ) -> object:
        at = dict(zip(where, rest[8:], strict=True))
        return FLEX(q, k, v, [slope, bias, document], body, 0.3, keys, visible=list(rest[:8]), **at)

    call = [query, key, value, *captured, DOCUMENT, *tables, *where.values()]
    expected = FLEX(query, key, value, [*captured, DOCUMENT], body, 0.3, keys, **where)
    for mine, other in zip(by_decomposition(forward, call), expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-9)
        assert mine.stride() == other.stride()

    grads = [torch.randn_like(expected[0]), torch.randn_like(expected[1]).masked_fill(expected[1] == -torch.inf, 0)]

    def backward(
        grad: Tensor, grad_sums: Tensor, out: Tensor, sums: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor
    ) -> object:
        *of_score, document = rest[:3]
        at = dict(zip(where, rest[11:], strict=True))
        return FLEX_GRADIENT(
            grad, q, k, v, out, sums, grad_sums if wanted else None, wanted, [*of_score, document], body, 0.3, keys,
            visible=list(rest[3:11]), **at,
        )  # fmt: skip

    expected_grads = FLEX_GRADIENT(
        grads[0], query, key, value, *expected, grads[1] if wanted else None, wanted, [*captured, DOCUMENT], body, 0.3,
        keys, **where,
    )  # fmt: skip
    # Op by op, torch returns gradients of tensors that require one only.
    leaves = [x.requires_grad_(at in wanted) for at, x in enumerate(captured)]
    operands = [*grads, *expected, query, key, value, *leaves, DOCUMENT, *tables, *where.values()]
    for mine, other in zip(by_decomposition(backward, operands), expected_grads, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)
        assert mine.stride() == other.stride()


@pytest.mark.parametrize("rows", [700, 512])
@pytest.mark.parametrize("by_batch", [True, False])
def test_tables_are_those_of_torchs_block_mask(by_batch: bool, rows: int) -> None:
    def near(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (i - j < 150 + (100 * batch if by_batch else 0))

    size = [BATCH, HEADS, rows, rows - 200 if rows % 128 else rows]
    body = functions_of(torch.empty(BATCH, HEADS, 1, 1), lambda score, *_: score, (), near, ())
    assert body is not None
    mask = create_block_mask(near, BATCH if by_batch else None, None, *size[2:], device="cpu")
    expected = [
        mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices,
        mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices,
    ]  # fmt: skip
    tables = FLEX_TABLES([], body, size, size[3], torch.device("cpu"))
    with FakeTensorMode():
        fakes = FLEX_TABLES([], body, size, size[3], torch.device("cpu"))
    for table, other, fake in zip(tables, expected, fakes, strict=True):
        assert torch.equal(table, other)
        assert (table.dtype, table.shape, table.stride()) == (
            fake.dtype,
            fake.shape,
            fake.stride(),
        ) and table.is_contiguous()
    strips = pytest.MonkeyPatch()
    with strips.context() as smaller:
        smaller.setattr(flex_ops, "SCORES", 1)
        smaller.setattr(flex_ops, "STRIP", 256)
        assert all(map(torch.equal, FLEX_TABLES([], body, size, size[3], torch.device("cpu")), expected))


def test_options_of_the_kernel_are_kept() -> None:
    body = functions_of(
        torch.empty(1, 1, 1, 1), lambda score, *_: score, (), lambda b, h, i, j: i >= j, (),
        {"BLOCK_M": 64, "OUTPUT_LOGSUMEXP": False},
    )  # fmt: skip
    assert body is not None
    options = dict(flex_ops.function_of(body).options)
    assert options == {"BLOCK_M": 64, "OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False}


@pytest.mark.parametrize("fits", [True, False])
def test_a_kernel_that_does_not_compile(fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried with less of the GPU's memory; if that fails too, a warning says so, and shardc's code runs."""
    monkeypatch.setattr(flex_kernel, "takes", lambda *_: True)
    body = functions_of(torch.empty(1, 2, 1, 1), lambda score, *_: score, (), lambda b, h, i, j: i >= j, ())
    assert body is not None
    size = [1, 2, 140, 140]

    def attention(q: Tensor, k: Tensor, v: Tensor, *tables: Tensor) -> object:
        return FLEX(q, k, v, [], body, 0.3, 140, visible=list(tables))

    tables = FLEX_TABLES([], body, size, 140, torch.device("cpu"))
    with FakeTensorMode() as mode:
        inputs = [torch.empty(1, 2, 140, 16) for _ in range(3)] + [mode.from_tensor(x) for x in tables]
    gm = make_fx(attention)(*inputs)
    tried = []

    def compiled(graph: fx.GraphModule, inputs: object, **_: object) -> object:
        kernels = [node for node in graph.graph.nodes if str(node.target) == "flex_attention"]
        # The kernel for few queries has no third result.
        assert all(user.args[1] < 2 for kernel in kernels for user in kernel.users)
        tried.append([node.args[6].get("num_stages") for node in kernels])
        if kernels and not (fits and tried[-1] == [1]):
            raise RuntimeError("out of resource: shared memory")
        return Compiled(graph)

    class Compiled:
        source_code, _fx_graph_cache_key = "", "key"

        def __init__(self, graph: fx.GraphModule) -> None:
            self.graph = graph

        def __call__(self, operands: list[Tensor]) -> object:
            return self.graph(*operands)

    monkeypatch.setattr(inductor, "compile_fx_inner", compiled)
    monkeypatch.setattr(flex_ops, "skips", lambda _: False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run, _ = inductor.lowered_for(gm, inputs, "inference")
    texts = [str(warning.message) for warning in caught if warning.category is ShardcWarning]
    assert getattr(run, "_fx_graph_cache_key", None) == ("key" if fits else None)  # the next start tries again
    assert tried == [[None], [1]] + ([] if fits else [[]])
    assert bool(texts) is not fits and all("out of resource: shared memory" in text for text in texts)
    operands = [torch.randn(1, 2, 140, 16) for _ in range(3)]
    with torch.no_grad():
        out, _ = run([*operands, *tables])
    expected = torch.nn.functional.scaled_dot_product_attention(*operands, is_causal=True, scale=0.3)
    torch.testing.assert_close(out, expected)


def test_a_failure_without_the_kernel_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        inputs = [torch.empty(4)]
    gm = make_fx(lambda x: [x + 1])(*inputs)

    def fails(*_: object, **__: object) -> object:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(inductor, "compile_fx_inner", fails)
    with warnings.catch_warnings(), pytest.raises(RuntimeError, match="no compiler"):
        warnings.simplefilter("error", ShardcWarning)
        inductor.lowered_for(gm, inputs, "inference")


@pytest.mark.parametrize(
    ("dtype", "width", "device", "takes"),
    [
        (torch.bfloat16, 64, "cuda", True),
        (torch.float32, 16, "cuda", True),
        (torch.float64, 64, "cuda", False),
        (torch.bfloat16, 8, "cuda", False),
        (torch.bfloat16, 64, "cpu", False),
    ],
)
def test_calls_that_the_kernel_takes(dtype: torch.dtype, width: int, device: str, takes: bool) -> None:
    with FakeTensorMode():
        x = torch.empty(1, 2, 8, width, dtype=dtype, device=device)
    assert flex_kernel.takes(x, x, x) is takes
