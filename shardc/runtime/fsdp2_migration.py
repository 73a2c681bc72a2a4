"""Methods of FSDP2 modules that a compiled module lacks, with what to write instead."""

from __future__ import annotations

_SCHEDULED = "nothing to write: the compiler schedules gathers"
_IN_BACKWARD = "nothing to write: the compiled backward decides it"
_DIVIDE = 'add Plan(reduce="sum", grad_scale=...) to the plan'
INSTEAD = {
    "set_reshard_after_forward": "to evaluate without gathers, compile the model once more under shardc.ddp(...), and "
    "load the state: evaluated.load_state_dict(module.state_dict())",
    "set_requires_gradient_sync": "run steps that reduce nothing inside of `with module.no_sync():`",
    "set_is_last_backward": _IN_BACKWARD,
    "set_reshard_after_backward": _IN_BACKWARD,
    "set_unshard_in_backward": _IN_BACKWARD,
    "set_modules_to_forward_prefetch": _SCHEDULED,
    "set_modules_to_backward_prefetch": _SCHEDULED,
    "unshard": "read or change whole parameters inside of `with module.summon_full_params():`",
    "reshard": "parameters are split again at the end of `with module.summon_full_params():`",
    "set_gradient_divide_factor": _DIVIDE,
    "set_reduce_scatter_divide_factor": _DIVIDE,
    "set_custom_all_gather": "put shardc.passes.OnTheWire into Options(pipeline=...)",
    "set_custom_reduce_scatter": 'put shardc.passes.OnTheWire(of="reduce") into Options(pipeline=...)',
    "set_all_reduce_hook": 'put shardc.passes.OnTheWire(of="reduce") into Options(pipeline=...)',
}
