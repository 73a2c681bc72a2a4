"""What CUDA's attention kernels get, under plans that split heads, lies in memory as they demand.

Their meta kernels trace on a CPU. The kernels themselves refuse operands whose last dim is not dense, and load 16 bytes
at a time, so that rows and memory have to begin at multiples of that.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.attention.varlen import varlen_attn

import shardc

aten = torch.ops.aten
ROWS, PLACES, WIDTH, HEAD = 4, 8, 64, 16
VECTOR = 16  # bytes


class Heads(nn.Module):
    """Attention by one of CUDA's kernels.

    Args:
        kernel: the op, without its prefix.
        queries, keys: numbers of heads.
        fused: one projection makes queries, keys and values, which are slices of it.
        shares: how few heads of keys get to all queries: "expanded" or "repeated".
        mask: queries of a place see some keys; it is a slice of a padded one, as torch makes it for the kernel.
    """

    def __init__(self, kernel: str, queries: int, keys: int, fused: bool, shares: str, mask: bool) -> None:
        super().__init__()
        self.kernel, self.queries, self.keys = kernel, queries, keys
        self.fused, self.shares, self.mask = fused, shares, mask
        sizes = [queries * HEAD, keys * HEAD, keys * HEAD]
        names = {"qkv": sum(sizes)} if fused else dict(zip("qkv", sizes, strict=True))
        for name, size in names.items():
            self.add_module(name, nn.Linear(WIDTH, size, dtype=torch.bfloat16))
        self.o = nn.Linear(queries * HEAD, WIDTH, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        sizes = [self.queries * HEAD, self.keys * HEAD, self.keys * HEAD]
        parts = self.qkv(x).split(sizes, -1) if self.fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (t.view(*t.shape[:2], -1, HEAD).transpose(1, 2) for t in parts)
        times = self.queries // self.keys
        if self.shares == "expanded":
            k, v = (t[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2) for t in (k, v))
        else:
            k, v = (t.repeat_interleave(times, 1) for t in (k, v))
        mask = None
        if self.mask:
            padded = x.new_zeros(ROWS, self.queries, PLACES, 16)
            mask = padded.cumsum(-1)[..., :PLACES]
        if self.kernel == "flash":
            out = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
        elif self.kernel == "efficient":
            out = aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, 0.0, mask is None)[0]
        else:
            out = aten._scaled_dot_product_cudnn_attention(q, k, v, mask, True, 0.0, mask is None)[0]
        return self.o(out.transpose(1, 2).flatten(2)).float().sum()


def unfit(x: Tensor) -> bool:
    """Whether a kernel refuses ``x``, or would read it at odd places."""
    if not x.is_floating_point() or x.ndim < 3:
        return False
    steps = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    whole = all(number * x.element_size() % VECTOR == 0 for number in (*steps, x.storage_offset()))
    return (x.shape[-1] > 1 and x.stride(-1) != 1) or not (whole or x.dtype == torch.float32)  # sums of rows


def operands(gm: fx.GraphModule) -> list[tuple[str, Tensor]]:
    """The operands of attention on one rank, with their op, as they lie when the graph runs."""
    found = []

    class Looks(fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if "attention" in str(target):
                found.extend((str(target), x) for x in args if isinstance(x, Tensor))
            return super().call_function(target, args, kwargs)

    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    with next(x.fake_mode for x in values if hasattr(x, "fake_mode")):
        Looks(gm).run(*values)
    return found


TP = shardc.tp("tp", colwise=["q", "k", "v"], rowwise=["o"])
FUSED = shardc.Plan(params={"qkv.weight": "_@tp, _", "qkv.bias": "_@tp"}) | shardc.tp("tp", rowwise=["o"])
PLANS = {
    "tp 4": ({"tp": 4}, ""),
    "tp 3, which does not divide heads": ({"tp": 3}, ""),
    "dp 2 tp 2": ({"dp": 2, "tp": 2}, "dp"),
}
CASES = {
    "one head of keys": (4, 1, False, "expanded"),
    "two heads of keys": (4, 2, False, "expanded"),
    "repeated": (4, 1, False, "repeated"),
    "slices": (4, 4, True, "expanded"),
    "slices, one head of keys": (4, 1, True, "expanded"),
    "three heads": (3, 3, False, "expanded"),
    "three heads, one of keys": (3, 1, True, "repeated"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kernel", "plan"),
    [
        ("flash", "tp 4"),
        *(
            pytest.param(kernel, plan, marks=pytest.mark.slow)
            for kernel in ("flash", "efficient", "efficient, masked", "cudnn", "cudnn, masked")
            for plan in PLANS
            if (kernel, plan) != ("flash", "tp 4")
        ),
    ],
)
def test_what_the_kernels_get(kernel: str, plan: str) -> None:
    mesh, rows = PLANS[plan]
    name, _, masked = kernel.partition(", ")
    for case, how in CASES.items():
        model = Heads(name, *how, mask=bool(masked))
        split = FUSED if model.fused else TP
        module = shardc.compile(
            model, shardc.Mesh(mesh), shardc.fsdp(rows) | split if rows else split, backend="eager"
        )  # fmt: skip
        program = module.lower(torch.randn(ROWS, PLACES, WIDTH, dtype=torch.bfloat16))
        seen = [x for half in ("forward", "backward") for x in operands(program.half(half).gm)]
        assert len(seen) >= 9, case
        assert [(op, x.shape, x.stride()) for op, x in seen if unfit(x)] == [], case


def test_what_is_unfit_is_seen() -> None:
    x = torch.zeros(2, 4, 8, 16, dtype=torch.bfloat16)
    assert not unfit(x) and not unfit(x.transpose(1, 2)) and not unfit(x[:, :1].expand(-1, 4, -1, -1))
    assert unfit(x.transpose(-1, -2)) and unfit(x[..., :12].contiguous())
    assert unfit(x.flatten()[4:964].view(4, 5, 3, 16))


class Packed(nn.Module):
    """Attention of packed sequences, whose operations torch counts by tensors, not by shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.attend = varlen_attn

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (-1, HEAD))
        return self.attend(q, q.tanh(), q.sin(), ends, ends, PLACES, PLACES)


def test_packed_sequences_are_split_by_heads() -> None:
    plan = shardc.fsdp("dp") | shardc.Plan(inputs={"ends": "..."})
    module = shardc.compile(Packed(), shardc.Mesh(dp=2), plan)
    ends = torch.arange(0, 5 * PLACES, PLACES, dtype=torch.int32)
    text = module.lower(torch.empty(4 * PLACES, WIDTH, dtype=torch.bfloat16), ends).text("collectives")
    assert "%_varlen_attn: (bf16[32,4@dp,16], f32[4@dp,32], uint64[2])" in text
