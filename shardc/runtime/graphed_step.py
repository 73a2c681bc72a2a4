"""`GraphedStep`: a training step that is recorded, and repeated for later batches of the same shapes.

Values in the memory that a recorded step reads may change between two repeats: parameters, buffers, the optimizer's
state, the batch, learning rates and the keys of random numbers. The last three are copied to where the step reads them.
Everything else that it was recorded with (`GraphedStep._key_and_program`, `GraphedStep._state_relied_on`) is compared
before each repeat. If that has changed, the step runs without a recording and is recorded again.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardc._compat import PyTree, pytree
from shardc.errors import InputError, ShardcWarning
from shardc.ir import graph as ir
from shardc.ir.executable import FORWARD, Executable
from shardc.runtime.cuda_graphs import CudaGraphs, Recorder, address, hooked, host_read
from shardc.runtime.module import ShardedModule, known_program

WARM = 3  # times that a step runs before it is recorded
MOST = 8  # recorded steps at a time, for batches of different shapes
_OFF = "leave cuda_graph out"
Result = tuple[Tensor, Tensor | None]  # the loss, and the norm of the gradients


@dataclass
class _Recorded:
    """A recorded step of one program: the tensors from which it reads its inputs, and the function that repeats it.

    Args:
        program: the program of its call.
        inputs: tensors from which it reads a batch.
        rates: scalar tensors from which it reads the learning rate of each parameter group.
        keys: tensors from which it reads the keys of random numbers.
        repeat: runs it again; returns its result.
    """

    program: Executable
    inputs: list[Tensor]
    rates: list[Tensor]
    keys: list[Tensor]
    repeat: Callable[[], Result]


class GraphedStep:
    """Runs training steps of a module as CUDA graphs. The first steps with arguments of a kind run as they are; later
    ones repeat a recorded step.

    Args:
        module: the compiled module.
        optimizer: of its parameters.
        update: runs one step, without the scheduler.
        recorder: records steps.
    """

    def __init__(
        self,
        module: ShardedModule,
        optimizer: torch.optim.Optimizer,
        update: Callable[..., Result],
        recorder: Recorder,
    ) -> None:
        self._state, self._optimizer, self._update, self._recorder = module.shardc, optimizer, update, recorder
        self._recorded: dict[Hashable, _Recorded] = {}  # by the key of the call
        self._ran: Counter[Hashable] = Counter()  # key of a call -> steps that ran without a recording
        self._relied_on: list[object] = []  # result of `_state_relied_on` at the last step
        self._warned: set[str] = set()

    def __call__(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> Result:
        """Runs one step, or repeats a recorded one. Returns (loss, norm of the gradients or None) as new tensors, which
        later steps do not change.
        """
        self._make_capturable()
        call = self._key_and_program(args, kwargs)
        relied_on = self._state_relied_on()
        if relied_on != self._relied_on:  # recordings would use other memory, or other options of the optimizer
            self._recorded.clear()
            self._ran.clear()
            self._relied_on = relied_on
        if call is None:
            return self._run_unrecorded(args, kwargs)
        key, program = call
        recorded = self._recorded.get(key)
        if recorded is not None and recorded.program is program:
            self._copy_inputs(recorded, args, kwargs)
        # Recorded steps keep memory, so their number is limited.
        elif self._ran[key] < WARM or len(self._recorded) >= MOST:
            self._ran[key] += 1
            return self._run_unrecorded(args, kwargs)
        else:
            recorded = self._recorded[key] = self._record(program, args, kwargs)
        # Also of a new recording, as recording runs no kernels.
        loss, norm = recorded.repeat()
        self._count_writes()
        return loss.clone(), None if norm is None else norm.clone()

    def _run_unrecorded(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> Result:
        """Runs one training step without recording it. Raises InputError, before anything changes, if the step's
        program has an op that cannot be recorded.
        """
        self._state.admits = _check_program  # called with the step's program before it runs
        try:
            with warnings.catch_warnings():
                # Of torch, about a capturable optimizer.
                warnings.filterwarnings("ignore", message=".*step\\(\\) is running without CUDA graph capture")
                return self._recorder.warm(lambda: self._update(*args, **kwargs))
        finally:
            self._state.admits = None

    def _record(self, program: Executable, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> _Recorded:
        """Records the step of a batch, without running it, and returns it as `_Recorded`. Raises InputError if it
        cannot be recorded.
        """
        runner = self._state.cache.runner(program)
        # Copies, at addresses from which each repeat reads its batch, keys and learning rates.
        leaves, structure = pytree.tree_flatten((args, kwargs))
        copies = [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]
        inputs = [x for x in copies if isinstance(x, Tensor)]
        copied_args, copied_kwargs = pytree.tree_unflatten(copies, structure)
        takes = runner.half(FORWARD).takes
        keys = [runner.draw(port.example.device) for port in takes if port.role.kind == "key"]
        lrs = [torch.as_tensor(group["lr"], dtype=torch.float32) for group in self._optimizer.param_groups]
        rates = [lr.detach().to(self._state.device, copy=True).reshape(()) for lr in lrs]

        def step() -> Result:
            # A recording can neither compare inputs between ranks, for which the host waits, nor draw keys.
            self._state.turns.paused, runner.keys = True, list(keys)
            try:
                with self._rates_from(rates):
                    return self._update(*copied_args, **copied_kwargs)
            finally:
                self._state.turns.paused, runner.keys = False, []

        try:
            repeat = self._recorder.record(step)
        except Exception as error:
            for x in self._state.params.snapshot.parameters.values():
                x.grad = None  # of kernels that have not run
            raise InputError(
                f"the step cannot be recorded as a CUDA graph: {type(error).__name__}: {str(error).splitlines()[0]}",
                fix=f"look for what waits for the device (a custom op that reads values on the host), or {_OFF}",
            ) from error
        return _Recorded(program, inputs, rates, keys, repeat)

    def _copy_inputs(self, recorded: _Recorded, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> None:
        """Copies what changes from step to step to the tensors that a recorded step reads: the batch, the optimizer's
        learning rates and new random keys.
        """
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        with torch.no_grad():
            for place, x in zip(recorded.inputs, tensors, strict=True):
                place.copy_(x)
            for rate, group in zip(recorded.rates, self._optimizer.param_groups, strict=True):
                lr = group["lr"]  # a number, or a tensor of one element
                rate.fill_(lr.reshape(()) if isinstance(lr, Tensor) else lr)
            runner = self._state.cache.runner(recorded.program)
            for key in recorded.keys:
                key.copy_(runner.draw(key.device))

    @contextmanager
    def _rates_from(self, rates: list[Tensor]) -> Iterator[None]:
        """Context manager in which the optimizer reads its learning rates from ``rates``."""
        groups = self._optimizer.param_groups
        before = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        try:
            yield
        finally:
            for group, value in zip(groups, before, strict=True):
                group["lr"] = value

    def _count_writes(self) -> None:
        """Increments the version counters of parameters and buffers, as repeating a recorded step writes them unseen
        by autograd.
        """
        snapshot = self._state.params.snapshot
        params = [x for x in snapshot.parameters.values() if x.requires_grad]
        torch.autograd.graph.increment_version([*dict.fromkeys((*params, *snapshot.buffers.values()))])

    def _make_capturable(self) -> None:
        """If the recorder requires it, makes the optimizer ``capturable`` and moves its step counts to the device."""
        if not self._recorder.capturable:
            return
        self._optimizer.defaults["capturable"] = True
        for group in self._optimizer.param_groups:
            if not group["capturable"]:
                group["capturable"] = True
                for param in group["params"]:
                    state = self._optimizer.state.get(param, {})
                    for name, x in state.items():
                        # A scalar on the host: torch's ``step``.
                        if isinstance(x, Tensor) and x.ndim == 0 and x.device != self._state.device:
                            state[name] = x.to(self._state.device, torch.float32)

    def _key_and_program(
        self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> tuple[Hashable, Executable] | None:
        """Returns (key, program) for a call whose step can be repeated from a recording. Returns None for other
        calls, such as one that accumulates gradients.

        A step depends on the key and on the state that `_state_relied_on` returns, and on nothing else.
        """
        state = self._state
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        # `around`: the user's wrapper of forward, whose Python code a repeat would leave out.
        if state.around is not None or torch.is_anomaly_enabled() or any(x.requires_grad for x in tensors):
            return None
        # Gradients that stay local, or local sums of earlier steps.
        if state.params.sync.unreduced() or state.params.sync.sums or self._has_hooks():
            return None
        with torch.enable_grad():  # as the update is called
            entry = known_program(state, args, kwargs)
        # A recorded step sets each gradient, and does not add to one that is there.
        if entry is None or any(x.grad is not None for x in state.params.snapshot.parameters.values()):
            return None
        key, program = entry
        # The batch is copied to tensors of the same strides, device and, for DTensors, layout.
        return (key, *((x.stride(), x.device, getattr(x, "_spec", None)) for x in tensors)), program

    def _has_hooks(self) -> bool:
        """Whether the optimizer or a parameter's gradient has Python hooks, which a recorded step would not call.
        Warns once of each.
        """
        name = hooked(self._state.params.current_snapshot().parameters)  # a parameter with a hook on its gradient
        of_optimizer = any(getattr(self._optimizer, f"_optimizer_step_{when}_hooks", ()) for when in ("pre", "post"))
        what = "the optimizer" if of_optimizer else "" if name is None else f"parameter {name!r}"
        if what and what not in self._warned:
            self._warned.add(what)
            warnings.warn(
                ShardcWarning(f"a CUDA graph would leave out a hook of {what}: steps run without one"), stacklevel=2
            )
        return bool(what)

    def _state_relied_on(self) -> list[object]:
        """Returns the state that recorded steps rely on: the addresses of tensors, and the optimizer's options. If it
        changes, steps are recorded anew.

        Learning rates are not among these. The module's snapshot is: keys of calls are valid for one snapshot.
        """
        snapshot = self._state.params.current_snapshot()
        places = [address(x) for x in (*snapshot.parameters.values(), *snapshot.buffers.values())]
        relied_on: list[object] = [snapshot, places]
        for group in self._optimizer.param_groups:
            relied_on += [
                (name, address(x) if isinstance(x, Tensor) else x) for name, x in group.items() if name not in _CHANGING
            ]
            for param in group["params"]:
                state = self._optimizer.state.get(param, {})
                addresses = (address(x) if isinstance(x, Tensor) else (name, x) for name, x in state.items())
                relied_on += [id(param), *addresses]
        return relied_on


_CHANGING = ("params", "lr", "initial_lr")  # options of a group that are not compared; its parameters are, one by one


def _check_program(program: Executable) -> None:
    """Raises InputError if a step of ``program`` cannot be a CUDA graph: it has stages or microbatches, or an op for
    which the host waits.
    """
    # `count` is 0 if the plan has no such setting.
    for setting, count in (("pp", program.stage_ranks), ("microbatches", program.microbatches - 1)):
        if count:
            raise InputError(
                "a step in pipeline stages or microbatches is not recorded as a CUDA graph: its loop runs on the host",
                plan_entry=str(program.key.plan.entry_of(setting) or ""),
                fix=f"leave {setting}() out of the plan, or {_OFF}",
            )
    read = host_read(program)
    if read is not None:
        info = ir.info(read.node)
        where = f" of module {info.origin.module!r}" if info.origin.module else ""
        raise InputError(
            f"%{info.name}{where} cannot be in a CUDA graph: {read.why}",
            source=info.origin.source or None,
            fix=f"{read.fix}, or {_OFF}",
        )


def recorder_of(module: ShardedModule, optimizer: torch.optim.Optimizer) -> Recorder:
    """Returns the object (a `Recorder`) that records the module's training steps as CUDA graphs and repeats them.

    Raises:
        InputError: they cannot be recorded: by the device, a dynamic size, the optimizer, or what the host keeps.
    """
    state = module.shardc
    if state.device.type != "cuda":
        raise InputError(
            f"cuda_graph=True, and the module is on {state.device.type!r}, which has no CUDA graphs", fix=_OFF
        )
    check_recordable(module, optimizer)
    if not all("capturable" in group for group in optimizer.param_groups):
        kind = type(optimizer).__name__.removeprefix("Sharded")
        raise InputError(
            f"{kind} has no option capturable: its step cannot be part of a CUDA graph",
            fix=f"use one that has it (AdamW, Adam, NAdam, RAdam, RMSprop, Adamax, Adadelta, ASGD, Rprop), or {_OFF}",
        )
    wrapped = hasattr(optimizer, "_selects")  # shardc's wrapper of an optimizer, which updates local tensors
    for group in optimizer.param_groups if isinstance(optimizer, _RATE_ON_HOST) else ():
        # If `foreach` is not given, torch uses it for plain tensors only.
        default = wrapped or not any(isinstance(param, DTensor) for param in group["params"])
        uses_foreach = default if group["foreach"] is None else group["foreach"]
        if not uses_foreach:
            raise InputError(
                f"{type(optimizer).__name__} without foreach reads its learning rate on the host",
                fix=f"pass foreach=True, or {_OFF}",
            )
    return CudaGraphs(state.device)


_RATE_ON_HOST = (torch.optim.RMSprop, torch.optim.Adadelta)  # unless they update all parameters in one call


def check_recordable(module: ShardedModule, optimizer: torch.optim.Optimizer) -> None:
    """Raises InputError if steps of a module cannot be recorded, whatever the device and the program."""
    state = module.shardc
    if state.spec.groups is None:
        return  # the first step raises, for other reasons
    entries = {name: home.entry for name, home in state.spec.homes.items() if home.entry}
    if entries:
        name, entry = next(iter(entries.items()))
        raise InputError(
            f"parameter {name!r} is kept on the host, and a CUDA graph cannot wait for its copies",
            plan_entry=entry,
            fix=f"leave offload() out of the plan, or {_OFF}",
        )
    if dynamic := state.cache.build.dynamic.names:
        raise InputError(
            f"sizes of {', '.join(sorted(map(str, dynamic)))} are dynamic, and a CUDA graph has fixed sizes",
            fix=f"leave dynamic= out (each of a few sizes gets a graph of its own), or {_OFF}",
        )
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise InputError("differentiable=True cannot be part of a CUDA graph", fix=f"leave it out, or {_OFF}")
    selects = getattr(optimizer, "_selects", None)
    names = {id(param): name for name, param in module.named_parameters()}
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        # `selects`: whether the parameter is updated whole, as Muon's matrices are.
        if selects is not None and isinstance(param, DTensor) and selects(names[id(param)], param):
            raise InputError(
                f"the optimizer updates {names[id(param)]!r} whole, on a rank that the host chooses",
                fix=f"use an optimizer that updates each element by itself, or {_OFF}",
            )
