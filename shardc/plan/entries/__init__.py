"""The entries of a plan, one statement each. Each kind of entry is a class that implements everything about it."""

from shardc.plan.entries.context_parallel import Cp
from shardc.plan.entries.data_parallel import Ddp, Fsdp
from shardc.plan.entries.entry import Entry, distinct
from shardc.plan.entries.expert_parallel import Ep
from shardc.plan.entries.memory_saving import ChunkedLoss, Offload, Save
from shardc.plan.entries.microbatches import Microbatches
from shardc.plan.entries.mixed_precision import Policies, Precision
from shardc.plan.entries.pipeline_parallel import Pp
from shardc.plan.entries.raw import Activation, Param, Port, Prefetch, Setting
from shardc.plan.entries.tensor_parallel import Tp

__all__ = [
    "Activation", "ChunkedLoss", "Cp", "Ddp", "Entry", "Ep", "Fsdp", "Microbatches", "Offload", "Param", "Policies",
    "Port", "Pp", "Precision", "Prefetch", "Save", "Setting", "Tp", "distinct",
]  # fmt: skip
