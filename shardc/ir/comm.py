"""What local graphs call process groups, and the one collective that torch has no functional op for.

A group's name says which axes its ranks differ along, so that one graph serves every rank: the runtime
gives the name to this rank's group. ``torch.ops.shardc.permute_ranks`` is defined here and implemented
in `shardc.runtime.permute`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardc.ir.tally import GROUP_PREFIX

_library = torch.library.Library("shardc", "DEF")
_library.define("permute_ranks(Tensor x, int[] destinations, str group_name) -> Tensor")


@torch.library.register_fake("shardc::permute_ranks")
def _permute_ranks_fake(x: torch.Tensor, destinations: list[int], group_name: str) -> torch.Tensor:
    return x.new_empty(x.shape)


def group_name(axes: Iterable[str]) -> str:
    """The name of the groups whose ranks differ along ``axes``, which are in mesh order.

    >>> group_name(["dp", "tp"])
    'shardc:dp,tp'
    """
    return GROUP_PREFIX + ",".join(axes)
