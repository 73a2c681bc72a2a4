"""What a plan says, one statement an entry; each kind of entry is a class that knows all that it says."""

from shardc.plan.entries.data_parallel import Ddp, Fsdp
from shardc.plan.entries.entry import Entry, distinct
from shardc.plan.entries.experts import WAYS, Ep
from shardc.plan.entries.offload import Offload
from shardc.plan.entries.precision import Policies, Precision
from shardc.plan.entries.prefetch import Prefetch
from shardc.plan.entries.raw import Activation, Param, Port, Setting
from shardc.plan.entries.recompute import Recompute
from shardc.plan.entries.sequence import METHODS, Cp
from shardc.plan.entries.tensor_parallel import STYLES, Tp

__all__ = [
    "Activation", "Cp", "Ddp", "Entry", "Ep", "Fsdp", "Offload", "Param", "Policies", "Port", "Precision", "Prefetch",
    "METHODS", "Recompute", "STYLES", "Setting", "Tp", "WAYS", "distinct",
]  # fmt: skip
