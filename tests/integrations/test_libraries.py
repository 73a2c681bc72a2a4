"""Model zoos, metrics and loggers of other libraries; a test is skipped where its library is not installed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shardc
from shardc.errors import CaptureError, InputError
from tests.integrations.loops import build, check_habits, close, compiled, rows, steps
from tests.ranks import run_ranks
from tests.state import assert_same

pytestmark = pytest.mark.filterwarnings("ignore")


def assert_trains(model: nn.Module, plan: shardc.Plan, inputs: tuple[Tensor, ...], loss: Any) -> None:
    """On two simulated ranks, the loss and all gradients of ``model`` are those of one device."""
    module = shardc.compile(model, shardc.Mesh(dp=2), plan, loss=loss, backend="eager")
    run = shardc.Simulation(module)
    expected = loss(model(*inputs[:-1]), inputs[-1])
    close(run(*inputs).detach(), expected.detach())
    run.backward()
    expected.backward()
    for name, param in model.named_parameters():
        whole = run.ranks.assemble(run.grads[name], run.storages[name])
        ours, theirs = whole[tuple(slice(n) for n in param.shape)], param.grad
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=max(1e-10, 1e-7 * theirs.abs().max().item()))


# --- model zoos


@pytest.mark.parametrize("name", ["resnet10t", "vit_tiny_patch16_224", "convnext_atto", "efficientnet_lite0"])
def test_timm(name: str) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vit_tiny_patch16_224": {"img_size": 32, "depth": 2, "embed_dim": 48, "num_heads": 3},
        "convnext_atto": {"depths": (1, 1, 1, 1), "dims": (8, 16, 32, 64)},
    }
    model = timm.create_model(name, num_classes=5, **sizes.get(name, {})).double()
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    assert_trains(model, shardc.fsdp("dp"), (images, torch.tensor([0, 1, 2, 3])), cross_entropy)


def average_of_timm(model: nn.Module, loss: Any) -> list[Tensor]:
    from timm.utils import ModelEmaV3

    average, optimizer = ModelEmaV3(model, decay=0.9), torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        steps(optimizer, loss, 1)
        average.update(model)
    return [getattr(x, "full_tensor", lambda x=x: x)().detach() for x in average.module.parameters()]


def test_average_of_timm() -> None:
    pytest.importorskip("timm")
    check_habits(average_of_timm)


def unet() -> nn.Module:
    from diffusers import UNet2DModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"sample_size": 8, "layers_per_block": 1, "block_out_channels": (8, 16)}
    sizes |= {"norm_num_groups": 4, "attention_head_dim": 4, "down_block_types": ("DownBlock2D", "AttnDownBlock2D")}
    return UNet2DModel(**sizes, up_block_types=("AttnUpBlock2D", "UpBlock2D")).double()


def noise_loss(output: Any, noise: Tensor) -> Tensor:
    return mse_loss(output.sample, noise)


def trains_a_unet(folder: str) -> None:
    """Trained with the library's scheduler of noise and average, saved and read back."""
    from diffusers import DDPMScheduler, UNet2DModel
    from diffusers.training_utils import EMAModel

    source, module = unet(), compiled("fsdp", unet(), loss=noise_loss)
    noise = torch.randn(4, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    times = torch.arange(4)
    noisy = DDPMScheduler(10).add_noise(noise.flip(0), noise, times)
    averages = []
    for model, call in (
        (source, lambda: noise_loss(source(noisy, times), noise)),
        (module, lambda: module(*module.shard_inputs(noisy, times, noise))),
    ):
        optimizer, average = torch.optim.AdamW(model.parameters(), 1e-3), EMAModel(model.parameters(), 0.9)
        for _ in range(2):
            steps(optimizer, call, 1)
            average.step(model.parameters())
        averages.append([getattr(x, "full_tensor", lambda x=x: x)() for x in average.shadow_params])
    torch.testing.assert_close(*averages, rtol=1e-6, atol=1e-9)
    module.save_pretrained(folder)
    again = UNet2DModel.from_pretrained(folder, torch_dtype=torch.float64)
    torch.testing.assert_close(again(noisy, times).sample, source(noisy, times).sample, rtol=1e-6, atol=1e-9)


def test_diffusers(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    run_ranks(2, partial(trains_a_unet, str(tmp_path / "model")))


class Graph(nn.Module):
    def __init__(self, layer: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = layer(6, 8, **options), layer(8, 3, **options)
        self.double()

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        return self.last(self.first(nodes, edges).relu(), edges)


GRAPHS = {"SAGEConv": {}, "GraphConv": {}, "GCNConv": {"add_self_loops": False}, "GATConv": {"add_self_loops": False}}


@pytest.mark.parametrize("layer", GRAPHS)
def test_pyg(layer: str) -> None:
    """Nodes are split over ranks, edges are whole."""
    layers = pytest.importorskip("torch_geometric.nn")
    model = Graph(getattr(layers, layer), **GRAPHS[layer])
    nodes, edges = torch.randn(8, 6, dtype=torch.float64), torch.randint(8, (2, 20))
    plan = shardc.fsdp("dp") | shardc.Plan(inputs={"edges": (None, None)})
    assert_trains(model, plan, (nodes, edges, torch.randint(3, (8,))), cross_entropy)


def test_pyg_adds_self_loops_in_forward() -> None:
    layers = pytest.importorskip("torch_geometric.nn")
    module = shardc.compile(Graph(layers.GCNConv), shardc.Mesh(dp=2), shardc.fsdp("dp"))
    with pytest.raises(CaptureError, match="selects elements by a mask"):
        module.lower(torch.randn(8, 6).double(), torch.randint(8, (2, 20)))


def test_pyg_data_is_no_argument() -> None:
    data = pytest.importorskip("torch_geometric.data")
    module = shardc.compile(nn.Identity(), shardc.Mesh(dp=2), shardc.ddp("dp"))
    with pytest.raises(InputError, match="Data with tensors in its attribute"):
        module.shard_inputs(data.Data(x=torch.ones(4, 2)))


# --- metrics and loggers


def measures() -> None:
    """Metrics of a rank's rows are added up over ranks by the library itself."""
    from torchmetrics import MeanSquaredError, MetricCollection

    source, module = build(), compiled(loss=None)
    x, y = rows()
    mine, targets = module.shard_inputs(x), y.chunk(2)[dist.get_rank()]
    metrics = MetricCollection([MeanSquaredError()])
    metrics.update(module(mine).detach().contiguous(), targets.contiguous())
    close(metrics.compute()["MeanSquaredError"].double(), mse_loss(source(x), y).detach().float().double())


def test_torchmetrics() -> None:
    pytest.importorskip("torchmetrics")
    run_ranks(2, measures)


def writes_histograms(folder: str) -> None:
    """Each rank calls; whole tensors go to the first rank's file."""
    from torch.utils.tensorboard import SummaryWriter

    module = compiled()
    writer = SummaryWriter(folder) if dist.get_rank() == 0 else None
    for step in range(2):
        loss = module(*module.shard_inputs(*rows()))
        loss.backward()
        for name, param in module.named_parameters():
            whole, grad = param.full_tensor(), param.grad.full_tensor()
            if writer is not None:
                writer.add_histogram(name, whole, step)
                writer.add_histogram(f"{name}.grad", grad, step)
                writer.add_scalar("loss", loss.item(), step)
    if writer is not None:
        writer.close()
        assert list(Path(folder).glob("events*"))


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run_ranks(2, partial(writes_histograms, str(tmp_path)))


def watched() -> None:
    """``wandb.watch`` of gradients hooks parameters, and trains as without it."""
    import wandb

    source, module = build(), compiled()
    x, y = rows()
    mine = module.shard_inputs(x, y)
    with tempfile.TemporaryDirectory() as folder:
        run = wandb.init(mode="disabled", dir=folder)
        run.watch(module, log="gradients", log_freq=1)
        steps(torch.optim.AdamW(module.parameters(), 0.1), lambda: module(*mine))
        run.log({"loss": module(*mine).item(), "norm": module.clip_grad_norm_(1.0).item()})
        run.finish()
    steps(torch.optim.AdamW(source.parameters(), 0.1), lambda: mse_loss(source(x), y))
    assert_same(module, source)


def test_wandb() -> None:
    pytest.importorskip("wandb")
    run_ranks(2, watched)


# --- loaders


def resumes_a_loader() -> None:
    """A loader with a state goes on in the middle of an epoch."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    x, y = rows()
    module = compiled()
    data = TensorDataset(x, y)
    loader = StatefulDataLoader(data, batch_size=2)
    batches = iter(shardc.batches(loader, module))
    next(batches)
    state = loader.state_dict()
    rest = [module(*batch).item() for batch in batches]
    again = StatefulDataLoader(data, batch_size=2)
    again.load_state_dict(state)
    assert [module(*batch).item() for batch in shardc.batches(again, module)] == rest and len(rest) == 3


def test_torchdata() -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    run_ranks(2, resumes_a_loader)


def reads_a_dataset() -> None:
    """Rows of `datasets`, dealt out by a DistributedSampler; dicts stay dicts."""
    from datasets import Dataset

    x, y = rows()
    source, module = build(), compiled()
    data = Dataset.from_dict({"input": x.tolist(), "target": y.tolist()}).with_format("torch", dtype=torch.float64)
    sampler: Any = DistributedSampler(data, *shardc.data_parts(module), shuffle=False)
    losses = [module(**batch) for batch in shardc.batches(DataLoader(data, batch_size=2, sampler=sampler), module)]
    for value, start in zip(losses, (0, 4), strict=True):
        close(value.detach(), mse_loss(source(x[start : start + 4]), y[start : start + 4]).detach())


def test_datasets() -> None:
    pytest.importorskip("datasets")
    run_ranks(2, reads_a_dataset)
