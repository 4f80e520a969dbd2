"""Tell instances apart that differ in more than their mapping: in GPUs, recipe, engine or model."""

from __future__ import annotations

from dataclasses import dataclass, field

from disagg_sim.domain import MAPPING_FIELDS, Mapping
from disagg_sim.errors import InputError
from disagg_sim.physics.setup import Setup


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedMapping(Mapping):
    """A mapping of instances with a setup of their own, where a deployment has several.

    Policies hand it on as they do any mapping; the site knows the step times, the memory and the links of it.
    """

    at: Setup = field(repr=False)  # the same only as itself


def placed(mapping: Mapping, at: Setup) -> PlacedMapping:
    """Give a mapping a setup of its own, in place of one that it may have.

    Parameters
    ----------
    mapping
        Sharding of an instance.
    at
        What the instance serves, and on what.

    Returns
    -------
    PlacedMapping
        Equal to another where mapping and setup are the same.

    Examples
    --------
    >>> import disagg_sim as ds
    >>> at, two = ds.setup("llama_3_1_8b", "h200_sxm", "fp8"), Mapping(tp_attn=2, tp_ffn=2)
    >>> placed(two, at) == placed(two, at), placed(two, at) == two, placed(two, at).gpus
    (True, False, 2)
    """
    return PlacedMapping(**{name: getattr(mapping, name) for name in MAPPING_FIELDS}, at=at)


def bare(mapping: Mapping) -> Mapping:
    """Leave the setup of a mapping away.

    Parameters
    ----------
    mapping
        With or without a setup.

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
    if not isinstance(mapping, PlacedMapping):
        return mapping
    return Mapping(**{name: getattr(mapping, name) for name in MAPPING_FIELDS})


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
    return mapping.at if isinstance(mapping, PlacedMapping) else usual


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
    systems = dict.fromkeys(each.at.system.name for each in mappings if isinstance(each, PlacedMapping))
    if len(systems) > 1:
        raise InputError(f"{what} has GPUs of {' and '.join(systems)}; allowed: one system")
