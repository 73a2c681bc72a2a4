"""The graph after every pass, as text: intent that a reader can check. One folder a pass, one file a case."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardc
from examples.models import gpt2, llama
from shardc.cost.model import CostModel, Measured
from tests import golden


class MLP(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up = nn.Linear(8, width)
        self.down = nn.Linear(width, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)))


def mlp(mesh: dict[str, int], plan: shardc.Plan, width: int = 32, rows: int = 16, **options: Any) -> shardc.Program:
    module = shardc.compile(MLP(width), shardc.Mesh(mesh), plan, loss=F.mse_loss, options=shardc.Options(**options))
    return module.lower(torch.empty(rows, 8), torch.empty(rows, 8))


def without_loss() -> shardc.Program:
    return shardc.compile(MLP(), shardc.Mesh(dp=2), shardc.fsdp("dp")).lower(torch.empty(16, 8))


def decoder(source: object, mesh: dict[str, int], plan: shardc.Plan, **said: Any) -> shardc.Program:
    """One block, at sizes at which every activation is worth splitting."""
    if source is llama:
        model = llama.Llama(llama.LlamaConfig(layers=1))
    else:
        model = gpt2.GPT2(gpt2.GPT2Config(layers=1))
    tokens = torch.empty(8, 16, dtype=torch.int64)
    options = shardc.Options(**said)
    return shardc.compile(model, shardc.Mesh(mesh), plan, loss=llama.loss, options=options).lower(tokens, tokens)


@shardc.experts
def squared(rows: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return F.relu(rows @ up).square() @ down


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.experts = nn.ParameterDict({"up": torch.empty(4, 8, 16), "down": torch.empty(4, 16, 8)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, chosen = self.router(x).softmax(-1).topk(2)
        return squared(x, chosen, scores, self.experts["up"], self.experts["down"])


def mixture(way: str, **options: object) -> shardc.Program:
    plan = shardc.fsdp("ep") | shardc.ep("ep", "experts", dispatch=way, **options)
    module = shardc.compile(Mixture(), shardc.Mesh(ep=2), plan, loss=F.mse_loss)
    return module.lower(torch.empty(16, 8), torch.empty(16, 8))


class CausalConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, padding=2, groups=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = F.pad(x, (0, 0, 1, -1))
        return self.conv((x + before).mT)[..., : x.shape[1]].mT


def causal_convolution() -> shardc.Program:
    plan = shardc.cp("cp", order="contiguous")
    x = torch.empty(2, 8, 4)
    return shardc.compile(CausalConvolution(), shardc.Mesh(cp=2), plan, loss=F.mse_loss).lower(x, x)


# A backend on which all-reduces are slow.
SLOW = CostModel(
    kinds=tuple(
        Measured(kind, 2, 1e-4 if kind == "all_reduce" else 1e-6, 1e8 if kind == "all_reduce" else 1e10)
        for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    )
)
FLOAT8 = shardc.precision(param=torch.bfloat16, matmul="float8", modules="layers.*.mlp")
TP = shardc.tp("tp", colwise=["up"], rowwise=["down"])
CASES: dict[str, Callable[[], shardc.Program]] = {
    "mlp_fsdp_tp": lambda: mlp({"dp": 2, "tp": 2}, shardc.fsdp("dp") | TP),
    "mlp_fsdp_kept": lambda: mlp({"dp": 2}, shardc.fsdp("dp", level=2)),
    "mlp_fsdp_part": lambda: mlp({"dp": 4}, shardc.fsdp("dp", reshard_after_forward=2)),
    "mlp_fsdp_uneven": lambda: mlp({"dp": 4}, shardc.fsdp("dp"), width=30),
    "mlp_uneven_batch": lambda: mlp({"dp": 2}, shardc.ddp("dp"), rows=5),
    "mlp_fsdp_bf16": lambda: mlp(
        {"dp": 2}, shardc.fsdp("dp") | shardc.precision(param=torch.bfloat16, reduce=torch.float32), rows=8
    ),
    "llama_float8": lambda: decoder(
        llama, {"dp": 2, "tp": 2}, shardc.fsdp("dp") | llama.llama_tp("tp", sequence=True) | FLOAT8
    ),
    "llama_chunked": lambda: decoder(llama, {"tp": 2}, llama.llama_tp("tp") | shardc.chunked_loss(2)),
    "mlp_offload": lambda: mlp(
        {"dp": 2}, shardc.fsdp("dp") | shardc.offload(["up.*", "down.weight"]) | shardc.precision(param=torch.bfloat16)
    ),
    "mlp_saved": lambda: mlp({"dp": 2}, shardc.fsdp("dp") | shardc.save("", on="host")),
    "mlp_hsdp": lambda: mlp({"rep": 2, "dp": 2}, shardc.hsdp(shard="dp", replicate="rep")),
    "mlp_slow_all_reduce": lambda: mlp({"dp": 2}, shardc.ddp("dp"), cost=SLOW, bucket_size=0),
    "mlp_without_loss": without_loss,
    "mlp_direct": lambda: mlp({"dp": 2}, shardc.fsdp("dp"), p2p_collectives=True),
    "mixture_send": lambda: mixture("send"),
    "mixture_gather": lambda: mixture("gather"),
    "mixture_blocks": lambda: mixture("bounded", capacity=1.5, chunks=2),
    "llama_ring": lambda: decoder(llama, {"cp": 2}, shardc.cp("cp", method="ring")),
    "causal_convolution": lambda: causal_convolution(),
    "llama_pieces": lambda: decoder(llama, {"tp": 2}, llama.llama_tp("tp", sequence=True), decompose=2),
    "llama_tp": lambda: decoder(llama, {"tp": 2}, llama.llama_tp("tp")),
    "llama_tp_sp": lambda: decoder(llama, {"tp": 2}, llama.llama_tp("tp", sequence=True)),
    "llama_fsdp": lambda: decoder(llama, {"dp": 2}, shardc.fsdp("dp")),
    "gpt2_tp": lambda: decoder(gpt2, {"tp": 2}, gpt2.gpt2_tp("tp")),
}
SHOWN = {
    "mlp_fsdp_tp": [
        "capture", "canonicalize", "seed", "pad", "propagate", "objective", "precision", "reshard", "simplify",
        "collectives", "localize", "offload", "hoist_grad_epilogue", "partition", "bucket", "algorithms", "schedule",
        "plan_memory",
        "partition.backward", "bucket.backward", "algorithms.backward", "schedule.backward",
    ],
    "mlp_fsdp_kept": ["partition", "partition.backward"],
    "mlp_fsdp_part": ["keep_part", "partition", "skip_regather", "skip_regather.backward"],
    "mlp_fsdp_uneven": ["seed", "collectives"],
    "mlp_uneven_batch": ["pad"],
    "mlp_fsdp_bf16": ["precision", "collectives", "hoist_grad_epilogue"],
    "llama_float8": ["float8", "simplify"],
    "llama_chunked": ["chunk_loss"],
    "mlp_offload": ["offload", "schedule", "schedule.backward"],
    "mlp_saved": ["offload_saved", "offload_saved.backward", "schedule.backward"],
    "mlp_hsdp": ["collectives"],
    "mlp_slow_all_reduce": ["algorithms.backward"],
    "mlp_without_loss": ["objective"],
    "mlp_direct": ["plan_memory"],
    "mixture_send": ["experts", "propagate", "localize"],
    "mixture_gather": ["reshard", "localize"],
    "mixture_blocks": ["localize", "schedule", "schedule.backward"],
    "llama_ring": ["attention", "propagate", "localize"],
    "causal_convolution": ["windows", "localize"],
    "llama_pieces": ["decompose"],
    "llama_tp": ["collectives"],
    "llama_tp_sp": ["reshard", "simplify", "collectives"],
    "llama_fsdp": ["schedule", "schedule.backward"],
    "gpt2_tp": ["collectives"],
}  # fmt: skip


@lru_cache(maxsize=1)
def program(case: str) -> shardc.Program:
    return CASES[case]()


@pytest.mark.parametrize(("case", "stage"), [(case, stage) for case in CASES for stage in SHOWN[case]])
def test_text(case: str, stage: str) -> None:
    """The graph before and after each pass."""
    name, _, half = stage.partition(".")
    before, after = before_of(case, stage), program(case).text(stage)
    text = after if before is None else golden.change(program(case).text(before), after)
    golden.check(text, f"{name}/{case}{'_' + half if half else ''}")


def before_of(case: str, stage: str) -> str | None:
    """The stage that the pass of ``stage`` gets; the cut gets one graph for both halves."""
    name, dot, half = stage.partition(".")
    names = ["capture", *program(case).pipeline.names]
    at = names.index(name)
    return None if not at else names[at - 1] if name == "partition" else f"{names[at - 1]}{dot}{half}"


# Where a pass that has nothing to do in the first case has something to do.
DOES = {
    "experts": "mixture_send",
    "attention": "llama_ring",
    "windows": "causal_convolution",
    "decompose": "llama_pieces",
    "float8": "llama_float8",
    "chunk_loss": "llama_chunked",
    "pad": "mlp_uneven_batch",
    "objective": "mlp_without_loss",
    "precision": "mlp_fsdp_bf16",
    "simplify": "llama_tp_sp",
    "keep_part": "mlp_fsdp_part",
    "skip_regather": "mlp_fsdp_part",
    "offload": "mlp_offload",
    "offload_saved": "mlp_saved",
    "algorithms.backward": "mlp_slow_all_reduce",
    "plan_memory": "mlp_direct",
}


@pytest.mark.slow
def test_without_any_one_pass_a_golden_falls() -> None:
    """For each pass a graph is shown that is another than that of the stage before."""
    for name in program("mlp_fsdp_tp").pipeline.names:
        stage = next((stage for stage in DOES if stage.partition(".")[0] == name), name)
        case = DOES.get(stage, "mlp_fsdp_tp")
        assert stage in SHOWN[case]
        before = before_of(case, stage)
        assert before is not None and program(case).text(stage) != program(case).text(before), stage


def collectives(case: str, phase: str, scope: str = "") -> list[str]:
    """``kind(axis)`` of each collective in one phase that stands for a value of a module under ``scope``."""
    out = []
    section = ""
    for line in program(case).text("collectives").splitlines():
        if not line.startswith(" "):
            section = line.rstrip(":")
            continue
        name, _, rest = line.strip().partition(": ")
        op = rest.partition("= ")[2]
        kind = op.partition("(")[0]
        if section == phase and kind in ("all_gather", "all_reduce", "reduce_scatter", "all_to_all") and scope in name:
            out.append(f"{kind}({op.partition('axis=')[2].rstrip(')').partition(', op')[0]})")
    return out


def test_tensor_parallel_block_has_two_all_reduces_each_way() -> None:
    text = program("llama_tp").text("collectives")
    assert collectives("llama_tp", "forward", "layers.0") == ["all_reduce(tp)"] * 2
    # One more of each is the embedding's, and that of the head's input gradient; the loss reduces over the vocabulary.
    big = [line for line in text.splitlines() if "f32[8,16,64] = all_reduce" in line]
    assert len(big) == 3 + 3
    assert "all_gather" not in text and "reduce_scatter" not in text


def test_sequence_parallel_block_has_the_matching_gathers_and_scatters() -> None:
    assert (
        sorted(collectives("llama_tp_sp", "forward", "layers.0")) == ["all_gather(tp)"] * 2 + ["reduce_scatter(tp)"] * 2
    )
    lines = program("llama_tp_sp").text("collectives").splitlines()
    backward = lines[lines.index("backward:") :]
    moved = [line for line in backward if "[128,64] = all_gather" in line or "[8,16@tp,64] = reduce_scatter" in line]
    # Two and two for the block, one scatter for the head's input; norms' weights are reduced besides.
    assert len(moved) == 2 + 2 + 1


def test_fused_qkv_splits_over_heads_without_a_gather() -> None:
    text = program("gpt2_tp").text("collectives")
    assert "f32[(3 64@tp),64]" in text.replace("(3 192@tp)", "(3 64@tp)") and "all_gather" not in text
    assert "all_to_all" not in text


def test_fsdp_gathers_each_parameter_once_a_direction_and_scatters_it_once() -> None:
    done = program("llama_fsdp")
    count = len(list(llama.Llama(llama.LlamaConfig(layers=1)).parameters()))
    lines = done.text("collectives").splitlines()
    assert sum(" = all_gather(" in line for line in lines) == count
    assert sum(" = reduce_scatter(" in line for line in lines) == count
    regathered = [line for line in done.text("partition.backward").splitlines() if "all_gather_into_tensor(" in line]
    # What the backward does not read (norm-free embedding table) is not gathered for it.
    assert len(regathered) <= count and len(set(regathered)) == len(regathered)
    kept = program("mlp_fsdp_kept").text("partition.backward")
    assert "all_gather" not in kept
