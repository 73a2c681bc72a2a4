"""Classes of compiled modules for models of other libraries; a file of this folder is imported only if needed."""

from __future__ import annotations

import sys

from shardc.runtime.module import ShardedModule
from shardc.runtime.namespace import Namespace


def classes_for(model: object) -> tuple[type[ShardedModule], type[Namespace]]:
    """Returns the mixin for the class of a compiled ``model``, and the class of ``module.shardc``."""
    transformers = sys.modules.get("transformers")
    if transformers is not None and isinstance(model, transformers.PreTrainedModel):
        from shardc.integrations.transformers import PretrainedNamespace, ShardedPretrained

        return ShardedPretrained, PretrainedNamespace
    return ShardedModule, Namespace
