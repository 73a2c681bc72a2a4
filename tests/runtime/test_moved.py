"""A parameter that was moved elsewhere after it was compiled: an error that names it, before anything is computed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardc
from shardc.errors import LayoutError
from shardc.runtime import parameter_checks
from shardc.runtime.host import ParamLocation


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def compiled() -> shardc.ShardedModule:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    return shardc.compile(model, mesh, shardc.fsdp("dp"), backend="eager")


def test_a_module_on_meta_has_no_values() -> None:
    module, x = compiled(), torch.ones(2, 6)
    module(x)
    module.to("meta")
    with pytest.raises(LayoutError, match=r"parameter \'0\.weight\' is on meta and has no values") as error:
        module(x)
    assert error.value.fix == "give it some: module.init_weights(...) or module.load_state_dict(...)"


def test_one_parameter_elsewhere_is_named() -> None:
    """Parameters that are on a CPU while the program runs on another device."""
    module = compiled()
    state = module.shardc
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    found = dict(module.named_parameters())
    homes = {name: ParamLocation(gpu if name == "1.weight" else cpu, "", False) for name in found}
    with pytest.raises(LayoutError, match=r"parameter \'1\.weight\' was moved to cpu; the program runs on cuda"):
        parameter_checks.check(found, state.params.contracts, state.spec.device_mesh, homes)
    parameter_checks.check(
        found, state.params.contracts, state.spec.device_mesh, {name: ParamLocation(cpu, "", False) for name in found}
    )
