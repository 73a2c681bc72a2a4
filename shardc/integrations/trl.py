"""TRL's fused head for compiled models. TRL replaces ``forward`` by a function that calls parts of the model, which
compiled models do not allow; here it works on the logits of the whole program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardc._compat import PyTree
from shardc.errors import InputError
from shardc.runtime.module import ShardedModule

FUSED = "_fused_forward"  # the function that ``trl.trainer.utils.add_fused_lm_head`` sets as a model's forward


def replace_fused_head(module: object) -> None:
    """Replaces TRL's forward of a compiled module, if it has one, by a forward that computes the same from full logits.

    Logits of this rank's rows are in memory, which TRL's own head avoids. Other modules stay as they are.
    """
    around = module.shardc.around if isinstance(module, ShardedModule) else None
    function: Any = getattr(around, "__func__", around)
    if getattr(function, "__code__", None) is None or function.__code__.co_name != FUSED:
        return
    cells = zip(function.__code__.co_freevars, function.__closure__, strict=True)
    settings = {name: cell.cell_contents for name, cell in cells}
    head = FusedHead(module, settings["original_forward"], function.__globals__["FusedCausalLMOutput"], settings)
    module.shardc.around = head  # type: ignore[attr-defined]


class FusedHead:
    """Forward of a compiled module for TRL. With ``fused_lm_head=True`` it returns the loss and values per token that
    TRL's own head computes; otherwise it calls the model's forward.

    Args:
        module: the compiled module.
        forward: its compiled forward.
        output: TRL's class of results.
        settings: TRL's ``temperature``, ``cast_lm_head_to_fp32`` and ``outputs``.
    """

    def __init__(
        self, module: Any, forward: Callable[..., Any], output: Callable[..., Any], settings: dict[str, Any]
    ) -> None:
        self.module, self.forward, self.output = module, forward, output
        self.temperature, self.names = settings["temperature"], settings["outputs"]
        self.in_float32 = settings["cast_lm_head_to_fp32"]

    def __call__(
        self,
        *args: PyTree,
        fused_lm_head: bool = False,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Any = None,
        **kwargs: PyTree,
    ) -> Any:
        if not fused_lm_head:
            more = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
            return self.forward(*args, **kwargs, **{name: x for name, x in more.items() if x is not None})
        out = (
            self.forward(*args, **kwargs, use_cache=False)
            if "use_cache" not in kwargs
            else self.forward(*args, **kwargs)
        )
        logits = out.logits
        vocabulary = self.module.config.get_text_config().vocab_size
        if logits.shape[-1] != vocabulary:
            raise InputError(
                f"the logits on this rank have {logits.shape[-1]} of {vocabulary} words, and TRL needs all for a token",
                fix='add shardc.Plan(outputs={"logits": ...}) to the plan, with the vocabulary whole',
            )
        if shift_labels is None:
            assert labels is not None
            logits, shift_labels = logits[:, :-1], labels[:, 1:]
        low = logits.dtype in (torch.bfloat16, torch.float16)
        scaled = (logits.float() if low or self.in_float32 else logits) / self.temperature
        return self._of_tokens(scaled, shift_labels, num_items_in_batch, getattr(out, "aux_loss", None))

    def _of_tokens(self, logits: Tensor, labels: Tensor, count: Any, aux_loss: Tensor | None) -> Any:
        """Computes the loss and metrics that TRL expects from ``logits`` [rows, tokens, vocabulary] and ``labels``
        [rows, tokens]. The loss is a sum divided by ``count``, by default by the number of labels.
        """
        mask, places = labels != -100, labels.clamp(min=0)
        words = torch.log_softmax(logits, -1)
        of: dict[str, Callable[[], Tensor]] = {
            "log_probs": lambda: words.gather(-1, places.unsqueeze(-1)).squeeze(-1),
            "entropy": lambda: -(words.exp() * words).sum(-1),
            "log_sum_sq_probs": lambda: torch.logsumexp(2 * words.detach(), -1),
            "mean_logits": lambda: logits.detach().mean(-1),
            "is_top1": lambda: logits.argmax(-1) == places,
        }
        values = {name: of[name]().masked_fill(~mask, 0) for name in {"log_probs", *self.names}}
        loss = -values["log_probs"].sum() / (mask.sum().clamp(min=1) if count is None else count)
        return self.output(loss=loss, label_mask=mask, aux_loss=aux_loss, **values)
