"""Tell instances apart that differ in more than their mapping: in GPUs, recipe, engine or model, or in a second pool.

The feed-forward part of an instance that decodes may stand on GPUs of its own (``physics.passes.attention_ffn``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from disagg_sim.domain import MAPPING_FIELDS, Mapping
from disagg_sim.errors import InputError, above_zero, check_kinds, whole_number
from disagg_sim.physics.passes.attention_ffn import Split
from disagg_sim.physics.setup import Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class FfnPool:
    """GPUs for the feed-forward part of an instance, whose other GPUs keep caches and attention."""

    mapping: Mapping  # of ``search.splits.ffn_mapping``
    microbatches: int = 2  # that alternate between both halves [1]
    setup: Setup | None = field(default=None, repr=False)  # None = that of the attention GPUs

    def __post_init__(self) -> None:
        """``InputError`` for micro-batches below 1."""
        check_kinds(self)
        whole_number("microbatches", self.microbatches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Aging:
    """How the popularity of experts drifts, and how often an instance moves their copies after it.

    The law is that of ``physics.rebalance``, whose ``best_period`` loses least.
    """

    drift: float  # time constant with which experts become others' popular [s]
    period: float  # work between two moves; inf = they never move [s]

    def __post_init__(self) -> None:
        """``InputError`` for times that are not above 0, and for popularity that stays."""
        check_kinds(self)
        above_zero("drift", self.drift, "s")
        if math.isinf(self.drift):
            raise InputError("drift inf: popularity stays, and nothing ages; allowed: finite times above 0 s")
        if not self.period > 0:
            raise InputError(f"period {self.period:g} is out of range; allowed: above 0 s, or inf: never")

    def check(self, at: Setup) -> None:
        """``InputError`` where all experts are alike, so that none becomes popular."""
        if not at.profile.expert_skew:
            raise InputError(
                f"popularity drifts, and experts of profile {at.profile.name!r} are all alike; allowed: a profile with "
                "a skew of experts, such as 'measured_skew0.5'"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedMapping(Mapping):
    """A mapping of instances with a setup of their own, with feed-forward GPUs, or with experts whose placement ages.

    Policies hand it on as they do any mapping; the site knows the step times, the memory and the links of it. The
    degrees are those of attention where there are feed-forward GPUs.
    """

    at: Setup | None = field(default=None, repr=False)  # the same only as itself; None = that of the deployment
    ffn: FfnPool | None = None  # None = attention and feed-forward part share their GPUs
    aging: Aging | None = None  # None = popularity stays

    @property
    def gpus(self) -> Any:
        """GPUs of one instance, those of its feed-forward part, too. [1]"""
        return self.stage_gpus * self.pp + (0 if self.ffn is None else self.ffn.mapping.gpus)


def placed(mapping: Mapping, at: Setup | None, ffn: FfnPool | None = None, aging: Aging | None = None) -> Mapping:
    """Give a mapping a setup of its own, in place of one that it may have, feed-forward GPUs, or an aging placement.

    Parameters
    ----------
    mapping
        Sharding of an instance.
    at
        What the instance serves, and on what; None = as the deployment.
    ffn
        GPUs for its feed-forward part; None = none of its own.
    aging
        Of the placement of its experts; None = popularity stays.

    Returns
    -------
    Mapping
        Equal to another where mapping, setup, feed-forward GPUs and aging are the same.

    Examples
    --------
    >>> import disagg_sim as ds
    >>> at, two = ds.setup("llama_3_1_8b", "h200_sxm", "fp8"), Mapping(tp_attn=2, tp_ffn=2)
    >>> placed(two, at) == placed(two, at), placed(two, at) == two, placed(two, at).gpus
    (True, False, 2)
    >>> placed(two, None, FfnPool(mapping=Mapping(tp_attn=4, tp_ffn=4))).gpus
    6
    """
    degrees = {name: getattr(mapping, name) for name in MAPPING_FIELDS}
    if at is None and ffn is None and aging is None:
        return Mapping(**degrees)
    return PlacedMapping(**degrees, at=at, ffn=ffn, aging=aging)


def bare(mapping: Mapping) -> Mapping:
    """Leave the setup of a mapping away, its feed-forward GPUs, and the aging of its experts.

    Parameters
    ----------
    mapping
        With or without them.

    Returns
    -------
    Mapping
        The same degrees.

    Examples
    --------
    >>> import disagg_sim as ds
    >>> bare(placed(Mapping(pp=2), ds.setup("llama_3_1_8b", "h200_sxm", "fp8"))) == Mapping(pp=2)
    True
    """
    return placed(mapping, None) if isinstance(mapping, PlacedMapping) else mapping


def ffn_of(mapping: Mapping) -> FfnPool | None:
    """Look up the feed-forward GPUs of instances of a mapping.

    Parameters
    ----------
    mapping
        Of the instances.

    Returns
    -------
    FfnPool
        None where both parts share their GPUs.

    Examples
    --------
    >>> ffn_of(placed(Mapping(), None, FfnPool(mapping=Mapping(), microbatches=3))).microbatches, ffn_of(Mapping())
    (3, None)
    """
    return mapping.ffn if isinstance(mapping, PlacedMapping) else None


def aging_of(mapping: Mapping) -> Aging | None:
    """Look up how placements of experts age on instances of a mapping.

    Parameters
    ----------
    mapping
        Of the instances.

    Returns
    -------
    Aging
        None where popularity stays.

    Examples
    --------
    >>> aging_of(placed(Mapping(), None, None, Aging(drift=600.0, period=150.0))).period, aging_of(Mapping())
    (150.0, None)
    """
    return mapping.aging if isinstance(mapping, PlacedMapping) else None


def split_of(mapping: Mapping, ffn: FfnPool) -> Split:
    """The pools of an instance whose feed-forward part stands on GPUs of its own."""
    return Split(bare(mapping), ffn.mapping, ffn.microbatches)


def setup_of(mapping: Mapping, usual: Setup) -> Setup:
    """Look up what instances of a mapping serve, and on what.

    Parameters
    ----------
    mapping
        Of the instances.
    usual
        Setup of mappings that have none of their own.

    Returns
    -------
    Setup
        Its own, or the usual one.

    Examples
    --------
    >>> import disagg_sim as ds
    >>> here, there = (ds.setup("llama_3_1_8b", system, "fp8") for system in ("h100_sxm", "h200_sxm"))
    >>> [setup_of(each, here).system.name for each in (Mapping(), placed(Mapping(), there))]
    ['h100_sxm', 'h200_sxm']
    """
    return own_setup(mapping) or usual


def own_setup(mapping: Mapping) -> Setup | None:
    """Setup of a mapping that has one of its own; None of others."""
    return mapping.at if isinstance(mapping, PlacedMapping) else None


def require_one_system(what: str, mappings: tuple[Mapping, ...]) -> None:
    """Raise where instances stand on unlike systems, and something is made for one.

    Parameters
    ----------
    what
        That is made so; begins the message.
    mappings
        Of the instances.

    Returns
    -------
    None
        Where all are on one system.

    Raises
    ------
    InputError
        Names the systems.

    Examples
    --------
    >>> require_one_system("policy 'dopd'", (Mapping(), Mapping(pp=2)))
    """
    systems = dict.fromkeys(at.system.name for each in mappings if (at := own_setup(each)) is not None)
    if len(systems) > 1:
        raise InputError(f"{what} has GPUs of {' and '.join(systems)}; allowed: one system")
