"""What a compiled module has more if the user's model is of another library. Each is an extra: imported where used."""

from __future__ import annotations

import sys
from typing import Any

from shardc.runtime.module import ShardedModule
from shardc.runtime.namespace import Namespace


def classes_for(model: Any) -> tuple[type[ShardedModule], type[Namespace]]:
    """What `shardc.compile` puts in front of the class of ``model``, and the class of ``module.shardc``."""
    transformers = sys.modules.get("transformers")
    if transformers is not None and isinstance(model, transformers.PreTrainedModel):
        from shardc.integrations.transformers import PretrainedNamespace, ShardedPretrained

        return ShardedPretrained, PretrainedNamespace
    return ShardedModule, Namespace
