"""`ShardcStrategy` of Lightning, and Fabric: losses, checkpoints and clipping equal those of one process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from shardc.errors import InputError
from tests.integrations.loops import PLANS, as_torchrun, build, close, compiled, rows
from tests.ranks import run_ranks
from tests.state import assert_same

pytestmark = pytest.mark.filterwarnings("ignore")
Made = Callable[[], Any]


def dataset() -> TensorDataset:
    draws = torch.Generator().manual_seed(2)
    return TensorDataset(*(torch.randn(16, n, generator=draws, dtype=torch.float64) for n in (6, 4)))


def lightning_module(plan: str | None) -> Any:
    """One whose model is compiled under ``plan`` in configure_model; None: the plain model."""
    import lightning.pytorch as pl

    class Regression(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = build(), []

        def configure_model(self) -> None:
            if plan is not None and not hasattr(self.model, "shardc"):
                self.model = compiled(plan, self.model)

        def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return mse_loss(self.model(x), y) if plan is None else self.model(x, y)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = self.loss(*batch)
            self.log("loss", loss)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val", self.loss(*batch), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}

    return Regression()


def fit(folder: str, plan: str | None, count: int, epochs: int, checkpoint: str | None = None, **more: Any) -> Any:
    import lightning.pytorch as pl

    module = lightning_module(plan)
    quiet = {name: False for name in ("logger", "enable_progress_bar", "enable_model_summary")}
    trainer = pl.Trainer(
        max_epochs=epochs, accelerator="cpu", default_root_dir=folder, gradient_clip_val=0.1, **quiet, **more
    )
    order = None if plan else DistributedSampler(dataset(), 1, 0)  # as Lightning's own for several ranks
    loaders = DataLoader(dataset(), batch_size=count, sampler=order), DataLoader(dataset(), batch_size=count)
    trainer.fit(module, *loaders, ckpt_path=checkpoint)
    return module.losses, trainer.checkpoint_callback.best_model_path, trainer.callback_metrics["val"].item()


def trains_and_resumes(folder: str, plan: str, expected: list[Any]) -> None:
    from shardc.integrations.lightning import ShardcStrategy

    as_torchrun()
    count, made = 4 if plan == "tp" else 2, None
    for epochs, (losses, _, value) in zip((2, 4), expected, strict=True):
        ours, made, val = fit(folder, plan, count, epochs, made, strategy=ShardcStrategy(), devices=2)
        torch.testing.assert_close(torch.tensor([*ours, val]), torch.tensor([*losses, value]))
    saved = torch.load(made, weights_only=False)
    lightning_module(None).load_state_dict(saved["state_dict"])  # a plain model reads it


@pytest.mark.parametrize("plan", PLANS)
def test_a_run_and_its_checkpoint_equal_one_process(plan: str) -> None:
    pytest.importorskip("lightning")
    with tempfile.TemporaryDirectory() as folder:
        first = fit(f"{folder}/one", None, 4, 2)
        second = fit(f"{folder}/one", None, 4, 4, first[1])
        run_ranks(2, partial(trains_and_resumes, f"{folder}/two", plan, [first, second]))


def refused() -> None:
    from shardc.integrations.lightning import ShardcStrategy

    as_torchrun()
    with pytest.raises(InputError, match="has no module from shardc"):
        fit(tempfile.mkdtemp(), None, 4, 1, strategy=ShardcStrategy(), devices=2)


def refused_by_ddp() -> None:
    as_torchrun()
    with pytest.raises(Exception) as caught:  # Lightning raises another error while it ends
        fit(tempfile.mkdtemp(), "fsdp", 2, 1, strategy="ddp", devices=2)
    errors: list[Any] = [caught.value]
    while errors[-1] is not None:
        errors.append(errors[-1].__context__)
    assert any("DistributedDataParallel is given a compiled module" in str(error) for error in errors)


def test_what_is_refused() -> None:
    pytest.importorskip("lightning")
    run_ranks(2, refused, refused_by_ddp)


def with_fabric() -> None:
    from lightning.fabric import Fabric

    as_torchrun()
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    source, module = build(), compiled()
    x, y = rows()
    ours: Any = fabric.setup_optimizers(torch.optim.AdamW(module.parameters(), lr=0.1))
    theirs = torch.optim.AdamW(source.parameters(), lr=0.1)
    for _ in range(3):
        loss, expected = module(*module.shard_inputs(x, y)), mse_loss(source(x), y)
        close(loss.detach(), expected.detach())
        fabric.backward(loss)
        module.clip_grad_norm_(0.1)
        expected.backward()
        nn.utils.clip_grad_norm_(source.parameters(), 0.1)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_same(module, source)
    with pytest.raises(InputError, match="DistributedDataParallel is given a compiled module"):
        fabric.setup(module)
    dist.barrier()


def test_fabric() -> None:
    pytest.importorskip("lightning")
    run_ranks(2, with_fabric)
