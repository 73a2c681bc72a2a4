"""What a compiled module has more if the user's model is of another library. Each is an extra: imported where used."""

from __future__ import annotations

import sys
from typing import Any

from shardc.runtime.module import ShardedModule


def mixin_for(model: Any) -> type[ShardedModule]:
    """What `shardc.compile` mixes into the class of ``model``."""
    transformers = sys.modules.get("transformers")
    if transformers is not None and isinstance(model, transformers.PreTrainedModel):
        from shardc.integrations.transformers import ShardedPretrained

        return ShardedPretrained
    return ShardedModule
