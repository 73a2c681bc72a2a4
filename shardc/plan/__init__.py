"""Plans: frozen, composable values that give the layouts of a model's tensors on a mesh."""

from shardc.plan.constructors import chunked_loss as chunked_loss
from shardc.plan.constructors import cp as cp
from shardc.plan.constructors import ddp as ddp
from shardc.plan.constructors import ep as ep
from shardc.plan.constructors import fsdp as fsdp
from shardc.plan.constructors import hsdp as hsdp
from shardc.plan.constructors import microbatches as microbatches
from shardc.plan.constructors import offload as offload
from shardc.plan.constructors import pp as pp
from shardc.plan.constructors import precision as precision
from shardc.plan.constructors import recompute as recompute
from shardc.plan.constructors import save as save
from shardc.plan.constructors import tp as tp
from shardc.plan.expression import parse_plan as parse_plan
from shardc.plan.from_hsdp import hsdp_plan as hsdp_plan
from shardc.plan.layout_spec import per_rank as per_rank
from shardc.plan.ports import ActivationPin as ActivationPin
from shardc.plan.ports import batch_axes as batch_axes
from shardc.plan.ports import resolve_activations as resolve_activations
from shardc.plan.ports import resolve_inputs as resolve_inputs
from shardc.plan.ports import resolve_outputs as resolve_outputs
from shardc.plan.resolve import ParamPlan as ParamPlan
from shardc.plan.resolve import resolve_params as resolve_params
from shardc.plan.value import Plan as Plan
