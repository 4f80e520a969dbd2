"""The vision tower of a model: what turns an image into embeddings before prefill."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from disagg_sim.facts.kinds import Count
from disagg_sim.facts.schema import Range


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """A transformer over the patches of one image, each of which sees all others, and a projector into the model.

    The projector joins ``merge`` x ``merge`` patches and leads them through two matrices to the hidden size of the
    model.
    """

    layers: Count
    hidden: Count
    width: Count  # of its feed-forward part, two matrices [1]
    patch: Annotated[int, Range(1, 1024)]  # edge of a patch [pixel]
    merge: Annotated[int, Range(1, 16)]  # edge of the patches that become one token [1]

    @property
    def matmul_params(self) -> int:
        """Weights of the layers that a patch passes: four square matrices of attention and two of the FFN. [1]"""
        return self.layers * (4 * self.hidden**2 + 2 * self.hidden * self.width)

    def patches(self, height: int, width: int) -> int:
        """Patches of an image, whose edges are rounded up to whole tokens. [1]"""
        edge = self.patch * self.merge
        return math.ceil(height / edge) * math.ceil(width / edge) * self.merge**2

    def tokens(self, height: int, width: int) -> int:
        """Tokens that an image adds to the prompt. [token]"""
        return self.patches(height, width) // self.merge**2
