"""Tell instances apart that differ in more than their mapping: in GPUs, recipe, engine or model, or in a second pool.

The feed-forward part of an instance that decodes may stand on GPUs of its own (``techniques.split.physics``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from disagg_sim.domain import MAPPING_FIELDS, Sharding
from disagg_sim.errors import InputError, check_kinds, whole_number
from disagg_sim.physics.setup import Setup
from disagg_sim.techniques.split.physics import Split


@dataclass(frozen=True, slots=True, kw_only=True)
class FfnPool:
    """GPUs for the feed-forward part of an instance, whose other GPUs keep caches and attention."""

    mapping: Sharding  # of ``techniques.split.search.ffn_mapping``
    microbatches: int = 2  # that alternate between both halves [1]
    setup: Setup | None = field(default=None, repr=False)  # None = that of the attention GPUs

    def __post_init__(self) -> None:
        """``InputError`` for micro-batches below 1."""
        check_kinds(self)
        whole_number("microbatches", self.microbatches)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedMapping(Sharding):
    """A mapping of instances with a setup of their own, or with feed-forward GPUs.

    Policies hand it on as they do any mapping; the site knows the step times, the memory and the links of it. The
    degrees are those of attention where there are feed-forward GPUs.
    """

    at: Setup | None  # the same only as itself; None = that of the deployment
    ffn: FfnPool | None  # None = attention and feed-forward part share their GPUs

    @property
    def gpus(self) -> Any:
        """GPUs of one instance, those of its feed-forward part, too. [1]"""
        return self.stage_gpus * self.pp + (0 if self.ffn is None else self.ffn.mapping.gpus)


def placed(mapping: Sharding, at: Setup | None, ffn: FfnPool | None = None) -> Sharding:
    """Give a mapping a setup of its own, in place of one that it may have, or feed-forward GPUs."""
    degrees = {name: getattr(mapping, name) for name in MAPPING_FIELDS}
    if at is None and ffn is None:
        return Sharding(**degrees)
    return PlacedMapping(**degrees, at=at, ffn=ffn)


def bare(mapping: Sharding) -> Sharding:
    """Leave the setup of a mapping away, and its feed-forward GPUs."""
    return placed(mapping, None) if isinstance(mapping, PlacedMapping) else mapping


def ffn_of(mapping: Sharding) -> FfnPool | None:
    """Look up the feed-forward GPUs of instances of a mapping; None where both parts share their GPUs."""
    return mapping.ffn if isinstance(mapping, PlacedMapping) else None


def split_of(mapping: Sharding, ffn: FfnPool) -> Split:
    """The pools of an instance whose feed-forward part stands on GPUs of its own."""
    return Split(bare(mapping), ffn.mapping, ffn.microbatches)


def setup_of(mapping: Sharding, usual: Setup) -> Setup:
    """Look up what instances of a mapping serve, and on what."""
    return own_setup(mapping) or usual


def own_setup(mapping: Sharding) -> Setup | None:
    """Setup of a mapping that has one of its own; None of others."""
    return mapping.at if isinstance(mapping, PlacedMapping) else None


def require_one_system(what: str, mappings: tuple[Sharding, ...]) -> None:
    """Raise where instances stand on unlike systems, and something is made for one."""
    systems = dict.fromkeys(at.system.name for each in mappings if (at := own_setup(each)) is not None)
    if len(systems) > 1:
        raise InputError(f"{what} has GPUs of {' and '.join(systems)}; allowed: one system")
