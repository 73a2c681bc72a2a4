"""Classes of compiled modules for models of other libraries; a file of this folder is imported only if needed."""

from __future__ import annotations

import sys

from shardc.runtime.module import ShardedModule
from shardc.runtime.namespace import Namespace


def classes_for(model: object) -> tuple[type[ShardedModule], type[Namespace]]:
    """Returns two classes by the library that ``model`` comes from: the mixin of the compiled module, and the class
    of its ``module.shardc``.
    """
    transformers = sys.modules.get("transformers")
    if transformers is not None and isinstance(model, transformers.PreTrainedModel):
        from shardc.integrations.transformers import PretrainedNamespace, ShardedPretrained

        return ShardedPretrained, PretrainedNamespace
    if _saves_as_library(model):
        from shardc.integrations.saving import ShardedSaving

        return ShardedSaving, Namespace
    return ShardedModule, Namespace


def _saves_as_library(model: object) -> bool:
    """Whether ``model.save_pretrained`` comes from peft, diffusers or huggingface_hub, which write the model's
    ``state_dict()``.
    """
    owners = (cls.__module__ for cls in type(model).__mro__ if "save_pretrained" in vars(cls))
    return next(owners, "").startswith(("peft.", "diffusers.", "huggingface_hub."))
