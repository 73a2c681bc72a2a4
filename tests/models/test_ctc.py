"""A CTC loss is refused in a program, and taken of a compiled module's outputs instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc.errors import CaptureError
from tests.models.zoo import ZOO
from tests.ranks import run_ranks


class Recognizer(nn.Module):
    """Log probabilities of 6 labels, [frames, rows, labels]; with targets, their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 6)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        scores = F.log_softmax(self.head(x), -1)
        return scores if targets is None else loss(scores, targets)


def loss(scores: Tensor, targets: Tensor) -> Tensor:
    rows, frames = scores.shape[:2]
    return F.ctc_loss(scores.transpose(0, 1), targets, (frames,) * rows, (targets.shape[1],) * rows)


def refused(model: nn.Module, *args: Any, **kwargs: Any) -> CaptureError:
    of: Callable[..., Tensor] | None = kwargs.pop("loss", None)
    with pytest.raises(CaptureError) as caught:
        shardc.compile(model, shardc.Mesh(dp=2), shardc.fsdp("dp"), loss=of, backend="eager").lower(*args, **kwargs)
    return caught.value


def test_the_error_says_where_to_take_the_loss() -> None:
    what = "computes a CTC loss (ctc_loss), in which sizes depend on the values of lengths"
    x, targets = torch.randn(4, 10, 8), torch.randint(1, 6, (4, 3))
    assert refused(Recognizer(), x, targets).what == f"Recognizer {what}"
    assert refused(Recognizer(), x, targets, loss=loss).what == f"Recognizer {what}"
    wav2vec: hf.PreTrainedModel = ZOO["wav2vec2"].build()
    error = refused(wav2vec, **ZOO["wav2vec2"].batch())
    assert error.what == f"Wav2Vec2ForCTC {what}" and "loss_ctc.py" in str(error)
    assert "take it outside of the compiled module" in str(error)


def takes_it_outside() -> None:
    one = Recognizer().double()
    x, targets = torch.randn(4, 10, 8, dtype=torch.float64), torch.randint(1, 6, (4, 3))
    module = shardc.compile(
        one, init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), shardc.fsdp("dp"), backend="eager"
    )
    mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    loss(module(x[mine]), targets[mine]).backward()
    one(x, targets).backward()
    for name, param in one.named_parameters():
        torch.testing.assert_close(module.get_parameter(name).grad.full_tensor(), param.grad)


def test_a_loss_outside_gives_the_gradients_of_one_device() -> None:
    run_ranks(2, takes_it_outside)
