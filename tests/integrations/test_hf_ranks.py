"""Models of ``transformers`` on ranks with unequally many labels: loss, states and gradients of one device."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardc
from tests.models.zoo import ZOO, Batch, in_float64
from tests.ranks import device_mesh, run_ranks

CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def mine(batch: Batch) -> Batch:
    """This rank's rows."""
    return {name: x.chunk(dist.get_world_size())[dist.get_rank()] for name, x in batch.items()}


def trains(name: str) -> None:
    one = ZOO[name].build()
    plan = shardc.fsdp("dp", level=3, threshold=0)
    module = shardc.compile(copy.deepcopy(one), device_mesh(shardc.Mesh(dp=2)), plan, backend="eager")
    torch.manual_seed(1)
    batch = ZOO[name].batch()
    counts = [int((x != -100).sum()) for x in batch["labels"].chunk(2)]
    assert counts[0] != counts[1]
    with in_float64():
        theirs = one(**batch, output_hidden_states=True)
        ours = module(**mine(batch), output_hidden_states=True)
        torch.testing.assert_close(ours.loss, theirs.loss, **CLOSE)
        shown: list[Any] = [key for key in theirs if "hidden_states" in key]
        assert shown == [key for key in ours if "hidden_states" in key] and shown
        for key in shown:
            for x, y in zip(ours[key], theirs[key], strict=True):
                torch.testing.assert_close(x, mine({"": y})[""], **CLOSE)
        theirs.loss.backward()
        ours.loss.backward()
    largest = max(p.grad.abs().max().item() for p in one.parameters() if p.grad is not None)
    for key, p in one.named_parameters():
        grad = module.get_parameter(key).grad
        assert (grad is None) == (p.grad is None), key
        if p.grad is not None:
            torch.testing.assert_close(grad.full_tensor(), p.grad, rtol=1e-9, atol=1e-10 * largest)


@pytest.mark.slow
def test_ranks_with_unequally_many_labels() -> None:
    run_ranks(2, *(partial(trains, name) for name in ("llama", "electra", "t5")))
