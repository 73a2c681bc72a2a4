"""Replaces, during a trace, functions, layers and caches that cannot be traced or sharded as they are.

- Key-value caches of ``transformers`` are registered as pytrees, so that their tensors are inputs and outputs. A
  program does not change a cache that is passed in; the cache that it returns has the added keys and values.
- Layers: `traceable_layers`.
- Functions of torch: an embedding bag is one kernel over all bags; some functions check values; torch decomposes some
  wrongly. The functions here have the same results and gradients.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from itertools import combinations as index_combinations
from math import log, pi
from types import MethodType
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._dynamo._trace_wrapped_higher_order_op import ModIndex
from torch._dynamo.exc import Unsupported
from torch._dynamo.trace_rules import get_tensor_method, get_torch_obj_rule_map
from torch._dynamo.variables import ConstantVariable, TorchInGraphFunctionVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.misc import AutogradFunctionVariable, GetAttrVariable
from torch._higher_order_ops.scan import scan_op
from torch._higher_order_ops.while_loop import while_loop_op
from torch.autograd import forward_ad
from torch.fx.traceback import annotate
from torch.nn import _reduction as _Reduction
from torch.nn.modules import transformer
from torch.nn.modules.adaptive import _ASMoutput
from torch.nn.modules.batchnorm import _BatchNorm

from shardc._compat import PyTree
from shardc.capture import checkpoints, decompositions, in_place_ops, markers, raises, side_effects, written_out
from shardc.capture.annotate import CHUNK_ROWS
from shardc.capture.queried_states import Args, Kwargs, Translator
from shardc.validate import torch_name

_call_method = GetAttrVariable.call_method


def _call_attribute(self: GetAttrVariable, tx: Translator, name: str, args: Args, kwargs: Kwargs) -> VariableTracker:
    """Traces a call of method ``name`` on an attribute of a torch class. If the attribute is a string, which Dynamo
    refuses, the call is evaluated.
    """
    # ``self.obj`` is the torch function or class, ``self.name`` the attribute.
    text = getattr(self.obj.value, self.name, None) if isinstance(self.obj, TorchInGraphFunctionVariable) else None
    if isinstance(text, str):
        return ConstantVariable.create(text).call_method(tx, name, args, kwargs)
    return _call_method(self, tx, name, args, kwargs)


_make_dual = forward_ad.make_dual


def _dual(tensor: Tensor, tangent: Tensor, *, level: int | None = None) -> Tensor:
    """Replaces `torch.autograd.forward_ad.make_dual` in a trace: makes the dual tensor from a copy of ``tensor``. (The
    tangent of a fake view would get another device.)
    """
    return _make_dual(tensor.clone(memory_format=torch.contiguous_format), tangent, level=level)


_call_apply = AutogradFunctionVariable.call_apply
_LOOPS = (scan_op, while_loop_op)


def _apply(self: AutogradFunctionVariable, tx: Translator, args: Args, kwargs: Kwargs) -> VariableTracker:
    """Traces a call of an autograd.Function with its own gradient, and returns Dynamo's variable of the result. Raises
    Unsupported inside of a transform of ``torch.func``.

    There Dynamo traces its forward alone. It does so too where no argument requires a gradient: a first carry of a loop
    may require none, while later ones do.
    """
    # Lookups of flex_attention's functions are a ModIndex, whose gradient is that of their ops.
    if self.fn_cls is not ModIndex and torch._C._functorch.peek_interpreter_stack() is not None:
        raise Unsupported(f"an autograd.Function within torch.func, {self.fn_cls.__name__}")
    # In a loop, arguments are treated as requiring gradients while Dynamo traces the call.
    is_loop = any(target in _LOOPS for _, target in tx.output.current_tracer.source_fn_stack)
    tensors: Any = (x.realize() for x in (*args, *kwargs.values()) if x.is_tensor()) if is_loop else ()
    lifted = [x for x in tensors if x.requires_grad is False and x.dtype.is_floating_point]
    for x in lifted:
        x.requires_grad = True
    try:
        return _call_apply(self, tx, args, kwargs)
    finally:
        for x in lifted:
            x.requires_grad = False


OTHER_FORMS: tuple[tuple[object, str, object], ...] = (
    (GetAttrVariable, "call_method", _call_attribute),
    (AutogradFunctionVariable, "call_apply", _apply),
    (forward_ad, "make_dual", _dual),
)


_BASES = ("Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin", "DummyLayer")
_registered: dict[str, type] = {}
T = TypeVar("T")
Context = list[Any]  # [names of attributes that may hold tensors, {name: value} of the others]


def register_caches() -> None:
    """Registers the cache classes of ``transformers``, and those of cache layers, as pytree nodes. Only classes that
    are imported already are registered.
    """
    module = sys.modules.get("transformers.cache_utils")
    for base in (getattr(module, name) for name in _BASES if hasattr(module, name)):
        for kind in raises.subclasses(base):
            _registered[f"{kind.__module__}.{kind.__qualname__}"] = kind
            if kind not in pytree.SUPPORTED_NODES:
                unflatten = partial(_unflatten, kind)
                pytree.register_pytree_node(kind, _flatten, unflatten, flatten_with_keys_fn=_flatten_with_keys)


def _flatten(cache: object) -> tuple[list[PyTree], Context]:
    """Flatten a cache for pytree: return (values of the attributes that may hold tensors, [names of these, name -> JSON
    form of each other attribute]).
    """
    kinds = (Tensor, dict, list, tuple)
    attributes = {name: value for name, value in vars(cache).items() if isinstance(value, kinds) or is_cache(value)}
    others = {name: _to_json(value) for name, value in vars(cache).items() if name not in attributes}
    return list(attributes.values()), [list(attributes), others]


def _flatten_with_keys(cache: object) -> tuple[list[tuple[pytree.KeyEntry, PyTree]], Context]:
    """Flatten a cache for pytree with keys: return ([(attribute key, its value)], context), where the context is that
    of `_flatten`.
    """
    values, context = _flatten(cache)
    return [(pytree.GetAttrKey(name), value) for name, value in zip(context[0], values, strict=True)], context


def _unflatten(kind: type[T], values: Iterable[PyTree], context: Context) -> T:
    """Make a cache of class ``kind`` from what `_flatten` returned: the ``values`` and the ``context``."""
    cache = kind.__new__(kind)
    for name, value in zip(context[0], values, strict=True):
        setattr(cache, name, value)
    for name, value in context[1].items():
        setattr(cache, name, _from_json(value))
    return cache


def is_cache(value: object) -> bool:
    """Return whether ``value`` is a key-value cache of ``transformers``, or a layer of one, that `register_caches` has
    registered.
    """
    return type(value) in _registered.values()


def _to_json(value: object) -> object:
    """Return a dtype, device or class in JSON form: ``{"dtype": name}``, ``{"device": name}`` or ``{"class": name}``.
    Return other values as they are.
    """
    if isinstance(value, torch.dtype):
        return {"dtype": torch_name(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, type):
        return {"class": f"{value.__module__}.{value.__qualname__}"}
    return value


def _from_json(value: object) -> object:
    """Undo `_to_json`: return the dtype, device or class that ``value`` names. Return other values as they are."""
    if not isinstance(value, dict):
        return value
    ((kind, name),) = value.items()
    return getattr(torch, name) if kind == "dtype" else torch.device(name) if kind == "device" else _registered[name]


@contextmanager
def traceable_layers(root: nn.Module) -> Iterator[None]:
    """Context manager in which those layers of ``root`` that cannot be traced are replaced by equivalent ones.

    - Cumulative averages of a batch norm (``momentum=None``) weigh a batch by a counter, used as a tensor, not as a
      number.
    - `nn.SyncBatchNorm` would call collectives: a program computes on the global batch, so it becomes a batch norm.
    - A recurrent layer has a second list of its parameters: it is rebuilt from the traced ones.
    - An `nn.AdaptiveLogSoftmaxWithLoss` picks the rows of each cluster by their targets. Here it computes all clusters
      for all rows.
    - The composable ``checkpoint(module)`` becomes a call of `torch.utils.checkpoint.checkpoint`.
    - Models of ``transformers`` record hidden states and attentions by hooks, which the first call that asks for some
      installs, under a lock that cannot be traced. A hook does nothing in a call that asks for none. Speech models mark
      a tensor inside as requiring a gradient, for the library's own checkpoints.
    """
    modules, library = list(root.modules()), sys.modules.get("transformers.utils.output_capturing")
    with ExitStack() as stack:
        if library is not None:
            # Patched first, so that hooks installed below are gone afterwards.
            for module in modules:
                without_grad = {"_requires_grad": False} if "_requires_grad" in vars(module) else {}
                new_attributes = {"_forward_hooks": OrderedDict(module._forward_hooks), **without_grad}
                stack.enter_context(patch.dict(vars(module), new_attributes))
            for module in modules:
                if library._CAN_RECORD_REGISTRY.get(module):
                    library.maybe_install_capturing_hooks(module)
        for module in modules:
            if isinstance(module, nn.RNNBase):
                stack.enter_context(patch.dict(vars(module)))  # restores what the next line sets
                module._init_flat_weights()
            elif composed := checkpoints.composed(module):
                stack.enter_context(patch.dict(vars(module), composed))
            elif "forward" not in vars(module) and (forward := _other_forward(module)):
                stack.enter_context(patch.dict(vars(module), forward=MethodType(forward, module)))
        yield


def _other_forward(module: nn.Module) -> Callable[..., PyTree] | None:
    """Return the function that replaces ``module.forward`` in a trace; None if the module's own forward can be
    traced.
    """
    # A subclass with a forward of its own is left as it is.
    if type(module).forward is nn.AdaptiveLogSoftmaxWithLoss.forward:
        return _adaptive_log_softmax
    if not isinstance(module, _BatchNorm):
        return None
    if module.training and module.track_running_stats and module.momentum is None and module.running_mean is not None:
        return _cumulative
    return _BatchNorm.forward if isinstance(module, nn.SyncBatchNorm) else None


def _adaptive_log_softmax(self: nn.AdaptiveLogSoftmaxWithLoss, input_: Tensor, target_: Tensor) -> PyTree:
    """Forward of an adaptive softmax that computes the log-probabilities of all classes for all rows."""
    if target_.dim() > 1 or input_.shape[:-1] != target_.shape:
        return nn.AdaptiveLogSoftmaxWithLoss.forward(self, input_, target_)  # which raises
    output = self.log_prob(torch.atleast_2d(input_)).gather(1, target_.view(-1, 1)).view(target_.shape)
    return _ASMoutput(output, -output.mean())


def _cumulative(self: _BatchNorm, input: Tensor) -> Tensor:
    """Forward of a batch norm with cumulative averages (``momentum=None``). The counter of batches stays a tensor, so
    that it can be traced.
    """
    self._check_input_dim(input)
    count, mean, var = self.num_batches_tracked, self.running_mean, self.running_var
    assert count is not None and mean is not None and var is not None
    # With momentum 1.0, the batch norm replaces these by the mean and variance of the batch.
    batch_mean, batch_var = torch.zeros_like(mean), torch.zeros_like(var)
    out = F.batch_norm(input, batch_mean, batch_var, self.weight, self.bias, True, 1.0, self.eps)
    with torch.no_grad():
        count.add_(1)
        mean.add_((batch_mean - mean) / count)
        var.add_((batch_var - var) / count)
    return out


try:
    from torch.nn.modules import linear_cross_entropy
except ImportError:
    linear_cross_entropy = None  # type: ignore[assignment]

_embedding_bag, _bags, _combinations = F.embedding_bag, torch.embedding_bag, torch.combinations
_bincount = torch.bincount
_MODES = ("sum", "mean", "max")


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Computes `F.embedding_bag` by lookups and a reduction, which can be split over bags and table rows, if all bags
    have the same size (rows of ``input``). Bags of other sizes, and options such as ``max_norm`` and ``sparse``, are
    left to torch.
    """
    equal_bags = input.dim() == 2 and not input.is_nested and input.shape[1] > 0
    plain_options = offsets is None and max_norm is None and not sparse and not scale_grad_by_freq
    if not equal_bags or not plain_options or mode not in _MODES:
        return _embedding_bag(
            input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights,
            include_last_offset, padding_idx,
        )  # fmt: skip
    if per_sample_weights is not None and (mode != "sum" or per_sample_weights.shape != input.shape):
        raise ValueError(f"per_sample_weights {tuple(per_sample_weights.shape)} go with mode 'sum' and {input.shape}")
    rows = F.embedding(input, weight)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if padding_idx is None:
        return rows.sum(1) if mode == "sum" else rows.mean(1) if mode == "mean" else rows.max(1).values
    # [bags, indices, 1]: rows that count in no reduction; a bag of these alone gives zeros.
    is_padding = (input == padding_idx % weight.shape[0]).unsqueeze(-1)
    if mode == "max":
        return rows.masked_fill(is_padding, float("-inf")).max(1).values.masked_fill(is_padding.all(1), 0.0)
    total = rows.masked_fill(is_padding, 0.0).sum(1)
    return total if mode == "sum" else total / is_padding.logical_not().sum(1).clamp(min=1)


def bags(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes `torch.embedding_bag` by lookups and an ``index_add`` (for a maximum, a scatter). Bags of any sizes
    start at ``offsets``. Sparse gradients, ``scale_grad_by_freq`` and indices of several dims are left to torch.
    """
    if sparse or scale_grad_by_freq or indices.dim() != 1:
        return _bags(
            weight, indices, offsets, scale_grad_by_freq, mode, sparse, per_sample_weights, include_last_offset,
            padding_idx,
        )  # fmt: skip
    starts = offsets[:-1] if include_last_offset else offsets
    positions = torch.arange(indices.shape[0], device=indices.device, dtype=starts.dtype)
    # The bag of an index is the last one that starts at it or before.
    bag = torch.searchsorted(starts, positions, right=True) - 1
    rows = F.embedding(indices, weight)
    counted = torch.ones_like(indices, dtype=torch.bool)  # indices that are no padding
    if padding_idx is not None:
        counted = indices != padding_idx % weight.shape[0]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(1)
    sizes = torch.zeros(starts.shape[0], dtype=rows.dtype, device=rows.device).index_add(0, bag, counted.to(rows.dtype))
    shape = (starts.shape[0], weight.shape[1])
    if _MODES[mode] == "max":
        rows = rows.masked_fill(~counted.unsqueeze(1), float("-inf"))
        empty = torch.full(shape, float("-inf"), dtype=rows.dtype, device=rows.device)
        out = empty.scatter_reduce(0, bag.unsqueeze(1).expand(rows.shape), rows, "amax")
        out = out.masked_fill((sizes == 0).unsqueeze(1), 0.0)
    else:
        rows = rows.masked_fill(~counted.unsqueeze(1), 0.0)
        out = torch.zeros(shape, dtype=rows.dtype, device=rows.device).index_add(0, bag, rows)
        out = out / sizes.clamp(min=1).unsqueeze(1) if _MODES[mode] == "mean" else out
    return out, bag, sizes.to(indices.dtype), bag  # the last in place of the indices of maxima, which are not computed


def cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """Computes `torch.cov` without its check that the weights do not sum to zero. A clamp keeps the divisor from being
    negative.
    """
    rows = input.view(1, -1) if input.dim() < 2 else input  # [variables, observations]
    weights = aweights if fweights is None else fweights if aweights is None else fweights * aweights
    total = rows.shape[1] if weights is None else weights.sum()
    centered = rows - ((rows if weights is None else rows * weights).sum(1) / total).unsqueeze(1)
    product = centered.mm((centered if weights is None else centered * weights).t().conj())
    ddof = correction if weights is None or aweights is None else correction * (weights * aweights).sum() / total
    free = total - ddof  # degrees of freedom
    return (product / (free.clamp(min=0) if isinstance(free, Tensor) else max(free, 0))).squeeze()


def corrcoef(input: Tensor) -> Tensor:
    """Computes `torch.corrcoef` by the `cov` of this file, which can be traced."""
    c = cov(input)
    if c.dim() == 0:
        return c / c  # 1, or nan if the only variable is constant
    deviation = (c.diag().real if c.is_complex() else c.diag()).sqrt()
    c = c / deviation.view(-1, 1) / deviation.view(1, -1)
    return torch.complex(c.real.clamp(-1, 1), c.imag.clamp(-1, 1)) if c.is_complex() else c.clamp(-1, 1)


def combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    """Computes `torch.combinations` by a constant index of all combinations, so that no shape depends on values."""
    if input.dim() != 1 or r < 1:
        return _combinations(input, r, with_replacement)
    repeats = r - 1 if with_replacement else 0  # with replacement: choose among r - 1 more places, then shift
    indices = list(index_combinations(range(input.shape[0] + repeats), r))
    places = torch.tensor(indices, device=input.device, dtype=torch.int64).view(-1, r)
    return input[places - torch.arange(r, device=input.device) if repeats else places]


def bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Computes `torch.bincount` by a ``scatter_add`` into ``minlength`` bins; calls torch's if ``minlength`` is 0. A
    value of ``minlength`` or more raises an error when the op runs.
    """
    if minlength < 1 or input.dim() != 1:
        return _bincount(input, weights, minlength)
    # torch's result is int64, float32 for weights in float32, else float64.
    added = torch.ones_like(input, dtype=torch.int64) if weights is None else weights.detach()
    added = added.double() if weights is not None and weights.dtype != torch.float32 else added
    return added.new_zeros(minlength).scatter_add(0, input.long(), added)


def chunked_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, weight: Tensor | None,
    reduction: str, ignore_index: int, label_smoothing: float, rows: int, *_: object,
) -> tuple[Tensor, None, None, None]:  # fmt: skip
    """Computes torch's loss of a linear layer and cross-entropy by ops that have sharding rules. Returns (loss, None,
    None, None); pass ``chunk_loss`` later cuts the ops into chunks of ``rows``.
    """
    with annotate({CHUNK_ROWS: rows}):
        logits = F.linear(input, linear_weight, linear_bias)
    loss = F.cross_entropy(
        logits, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    return loss, None, None, None


def chunked_cross_entropies(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, weight: Tensor | None,
    ignore_index: int, rows: int, *_: object,
) -> Tensor:  # fmt: skip
    """Computes `chunked_cross_entropy` without reduction: returns one loss for each row of ``input``."""
    return chunked_cross_entropy(
        input, linear_weight, target, linear_bias, weight, "none", ignore_index, 0.0, rows
    )[0]  # fmt: skip


def gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """Computes `F.gaussian_nll_loss` without torch's check that variances are not negative."""
    if isinstance(var, float):
        var = torch.full_like(input, var)
    if var.shape != input.shape and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    elif var.shape != input.shape and not (
        var.ndim == input.ndim and sum(b for a, b in zip(input.shape, var.shape, strict=True) if a != b) == 1
    ):
        raise ValueError("var is of incorrect size")
    # The value is clamped; the gradient is as if nothing were.
    var = var + (var.clamp(min=eps) - var).detach()
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    return _reduced(loss + 0.5 * log(2 * pi) if full else loss, reduction)


def multilabel_margin_loss(
    input: Tensor, target: Tensor, size_average: bool | None = None, reduce: bool | None = None, reduction: str = "mean"
) -> Tensor:
    """Computes `F.multilabel_margin_loss`. Labels count only before the first -1 of a row (torch's decomposition adds
    the later ones too).
    """
    if size_average is not None or reduce is not None:
        reduction = _Reduction.legacy_get_string(size_average, reduce)
    if target.shape != input.shape:
        raise ValueError(f"the target is of {list(target.shape)}, the input of {list(input.shape)}")
    input, target = torch.atleast_1d(input), torch.atleast_1d(target)
    classes = torch.arange(input.shape[-1], device=target.device)
    is_label = (target == -1).cumsum(-1) == 0  # before the first -1
    label = torch.where(is_label, target, 0)
    # [..., class]: whether it is a label; such classes do not count against labels.
    labelled = ((label.unsqueeze(-1) == classes) & is_label.unsqueeze(-1)).any(-2)
    # [..., label, class]: by how much each class comes too close to each label.
    margins = (1.0 - input.gather(-1, label).unsqueeze(-1) + input.unsqueeze(-2)).clamp_min(0)
    counted = is_label.unsqueeze(-1) & ~labelled.unsqueeze(-2)
    return _reduced(torch.where(counted, margins, 0.0).sum((-1, -2)) / input.shape[-1], reduction)


def _reduced(loss: Tensor, reduction: str) -> Tensor:
    """Return ``loss`` reduced by "none", "mean" or "sum"."""
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not valid")
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def get_cached(self: Any, instance: object, owner: type | None = None) -> object:
    """Return the value of a `functools.cached_property` of ``instance``. Replaces its ``__get__`` without the lock of
    Python 3.11, which cannot be traced.
    """
    if instance is None:
        return self
    if self.attrname not in instance.__dict__:
        instance.__dict__[self.attrname] = self.func(instance)
    return instance.__dict__[self.attrname]


def instance_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    use_input_stats: bool, momentum: float, eps: float, cudnn_enabled: bool,
) -> Tensor:  # fmt: skip
    """Computes `torch.instance_norm` with one copy of the weight; torch's own form repeats the weight for each sample.

    The result has the dtype of ``input`` under autocast too, which is why this calls no `torch.group_norm`.
    """
    if not use_input_stats:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            x = input.flatten(2).to(running_mean.dtype)
            running_mean.mul_(1 - momentum).add_(x.mean(2).mean(0), alpha=momentum)
            running_var.mul_(1 - momentum).add_(x.var(2).mean(0), alpha=momentum)
    weight, bias = (None if x is None else x.to(input.dtype) for x in (weight, bias))
    # A group norm with a group for each channel.
    samples, channels, size = *input.shape[:2], math.prod(input.shape[2:])
    return torch.native_group_norm(input.contiguous(), weight, bias, samples, channels, size, channels, eps)[0]


def is_causal_hint(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Return whether an `nn.Transformer` should treat ``mask`` as causal: only if its caller passed ``is_causal=True``.

    If the caller says nothing, torch compares the mask's values. This function returns False instead: attention with a
    causal mask gives the same result without the hint.
    """
    return is_causal is True


# (owner, attribute name, replacement)
_OTHER_FORMS: tuple[tuple[object, str, object], ...] = (
    (F, "embedding_bag", embedding_bag),
    (torch, "embedding_bag", bags),
    *((owner, f.__name__, f) for owner in (torch, Tensor) for f in (cov, corrcoef, bincount)),
    (torch, "combinations", combinations),
    (torch._C, "_infer_size", torch.broadcast_shapes),  # takes symbolic shapes
    (F, "gaussian_nll_loss", gaussian_nll_loss),
    (F, "multilabel_margin_loss", multilabel_margin_loss),
    (torch, "instance_norm", instance_norm),
    (transformer, "_detect_is_causal_mask", is_causal_hint),
    *decompositions.OTHER_FORMS,
    *raises.OTHER_FORMS,
    *OTHER_FORMS,
    *side_effects.OTHER_FORMS,
    *checkpoints.OTHER_FORMS,
    *in_place_ops.OTHER_FORMS,
    *written_out.OTHER_FORMS,
    (cached_property, "__get__", get_cached),
)
if linear_cross_entropy is not None:  # from torch 2.13 on
    _OTHER_FORMS += (
        (linear_cross_entropy, "_linear_cross_entropy_batch_chunked", chunked_cross_entropy),
        (linear_cross_entropy, "_linear_cross_entropy_batch_chunked_no_reduction", chunked_cross_entropies),
    )


@contextmanager
def traceable_functions() -> Iterator[None]:
    """Context manager in which functions of torch, and handlers of Dynamo, are replaced by those of this file and of
    the modules that it imports (their ``OTHER_FORMS``).
    """
    raises.fill_kl_cache()
    get_torch_obj_rule_map(), get_tensor_method()  # Dynamo looks functions up by name, once: to find torch's own
    with markers.patched((*_OTHER_FORMS, *markers.expert_patches())), checkpoints.sequential_traced():
        yield
