"""Code of one's own in a sharded model: an op with a rule, and a region that communicates by itself.

    python examples/custom_code.py

``scaled_rows`` is an op that the compiler knows nothing of; one line of notation says how it may be split. The region
computes a softmax over classes that are split over ``tp`` the way one would by hand: a maximum and a sum go from rank
to rank, the scores themselves never do.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import shardc
from shardc import local


@torch.library.custom_op("example::scaled_rows", mutates_args=())
def scaled_rows(x: Tensor, by: Tensor) -> Tensor:
    """Row i of ``x`` times ``by[i]``."""
    return x * by[:, None]


scaled_rows.register_fake(lambda x, by: torch.empty_like(x))
scaled_rows.register_autograd(
    lambda ctx, grad: (scaled_rows(grad, ctx.saved_tensors[1]), (grad * ctx.saved_tensors[0]).sum(1)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
# Rows and columns may be split; a pending sum of either operand goes through, for the op is linear in each.
shardc.register_rule("example::scaled_rows", "i j, i -> i j", linear="0|1")


def entropy_of_shards(scores: Tensor) -> Tensor:
    """The entropy of softmax(scores) by row, for a block of the classes on each rank."""
    shift = local.all_gather(scores.detach().amax(1, keepdim=True), "tp", dim=1).amax(1, keepdim=True)
    weights = (scores - shift).exp()
    total = local.all_reduce(weights.sum(1), "tp")
    return total.log() - local.all_reduce((weights * (scores - shift)).sum(1), "tp") / total


entropy = shardc.local_map(entropy_of_shards, in_layouts="@dp, @tp", out_layouts="@dp")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.classes, self.gate = nn.Linear(16, 32), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return entropy(torch.ops.example.scaled_rows(self.classes(x), self.gate(x)[:, 0])).mean()


def gradients(mesh: shardc.Mesh) -> dict[str, Tensor]:
    """The gradients of one step on ``mesh``, in simulation."""
    torch.manual_seed(0)
    model, x = Model().double(), torch.randn(8, 16, dtype=torch.float64)
    plan = shardc.fsdp("dp", threshold=0) | shardc.tp("tp", colwise=["classes"])
    sim = shardc.Simulation(shardc.compile(model, mesh, plan))
    sim(x)
    sim.backward()
    model(x).backward()  # as it is, on one device
    for name, param in model.named_parameters():
        torch.testing.assert_close(sim.grad(name), param.grad, rtol=1e-9, atol=1e-12)
    return {name: sim.grad(name) for name, _ in model.named_parameters()}


if __name__ == "__main__":
    for name, grad in gradients(shardc.Mesh(dp=2, tp=2)).items():
        print(f"{name:16} gradient of norm {grad.norm():.6f} on 2x2 ranks, as on one device")
