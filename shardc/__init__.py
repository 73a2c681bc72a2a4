"""shardc: a sharding compiler for PyTorch."""

import os as _os

from shardc.ir.gc_control import outgrown as _outgrown

with _outgrown():  # garbage collections would take a quarter of the time of these imports
    from shardc import logs as _logs
    from shardc import optim
    from shardc.api import compile, shard
    from shardc.batches import batches, data_parts
    from shardc.custom_ops import region as local
    from shardc.custom_ops.expert_markers import experts
    from shardc.custom_ops.region import local_map
    from shardc.errors import ShardcError, ShardcWarning
    from shardc.ir.layout import Layout
    from shardc.ir.mesh import Mesh
    from shardc.launch import mesh
    from shardc.links import measure_links
    from shardc.passes.options import Options
    from shardc.plan import (
        Plan,
        chunked_loss,
        cp,
        ddp,
        ep,
        fsdp,
        hsdp,
        hsdp_plan,
        microbatches,
        offload,
        per_rank,
        pp,
        precision,
        recompute,
        save,
        tp,
    )
    from shardc.precompiled import load
    from shardc.report.inspected import InspectedProgram as Program
    from shardc.rules import register_rule
    from shardc.runtime.methods import expert_tokens, register_forward_method
    from shardc.runtime.sim.training import Simulation
    from shardc.search.request import auto, find_plan
    from shardc.search.result import SearchResult
    from shardc.train import train_step, value_and_grad

_logs.configure(_os.environ.get("SHARDC_LOGS", ""))

__version__ = "0.2.0"

__all__ = [
    "Layout",
    "Mesh",
    "Options",
    "Plan",
    "Program",
    "SearchResult",
    "ShardcError",
    "ShardcWarning",
    "Simulation",
    "auto",
    "batches",
    "chunked_loss",
    "compile",
    "ddp",
    "cp",
    "data_parts",
    "ep",
    "expert_tokens",
    "experts",
    "find_plan",
    "fsdp",
    "hsdp",
    "hsdp_plan",
    "load",
    "local",
    "local_map",
    "measure_links",
    "mesh",
    "microbatches",
    "offload",
    "optim",
    "per_rank",
    "pp",
    "precision",
    "recompute",
    "register_forward_method",
    "register_rule",
    "save",
    "shard",
    "tp",
    "train_step",
    "value_and_grad",
]


def __getattr__(name: str) -> object:
    """Raise AttributeError for a name that the package does not have; of an earlier version's name, it says the new."""
    if name == "Found":
        raise AttributeError("shardc.Found is called shardc.SearchResult now")
    raise AttributeError(f"module 'shardc' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names of the package. Submodules, whose names become attributes when they are imported, are
    left out.
    """
    return sorted([*__all__, "__version__"])
