"""The keys of a sweep for further pools: ``pools`` and ``images``."""

from __future__ import annotations

from typing import Annotated

from disagg_sim.facts.schema import Range, Strict
from disagg_sim.serving.pool_names import Images

_Pixels = Annotated[int, Range(1, 10**5)]


class ImagesKeys(Strict):
    """Keys of ``images``."""

    images: Annotated[int, Range(1, 10_000)]
    height: _Pixels
    width: _Pixels
    cached: Annotated[float, Range(0.0, 0.999999)] = 0.0


def images_of(keys: ImagesKeys) -> Images:
    """The images that a file describes."""
    return Images(**dict(keys))
