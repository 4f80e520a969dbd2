"""Find the lengths of requests by the word that the tables of a sweep have for them."""

from __future__ import annotations

from disagg_sim.choices import EVEN_RANKS
from disagg_sim.errors import InputError, quoted
from disagg_sim.facts.load import load_traffic
from disagg_sim.facts.traffic import TrafficCase
from disagg_sim.facts.yaml_files import is_path, list_specs
from disagg_sim.techniques.prefix.requests import constant_named, parted
from disagg_sim.workload.lengths import Lengths, constant_lengths, lengths, uneven, with_cached
from disagg_sim.workload.turns import turn_lengths, turns_of

#: Between the name of a traffic and the way its requests find their DP rank.
RANKS_SUFFIX = "/ranks_"


def lengths_named(name: str) -> Lengths:
    """Find the lengths of a case of a shipped traffic (``NAME``, ``NAME_1``), of turns of sessions, or of ``ISL/OSL``.

    Behind that may stand what is cached, as ``prefixes.reuse_text`` writes it, or what turns of sessions meet
    (``turns.turns_text``), and last ``RANKS_SUFFIX`` and one of ``choices.RANK_ROUTINGS``.
    """
    plain, rank_imbalance = ranks_parted(name)
    try:
        turns = turns_of(plain)
    except ValueError:
        raise InputError(f"traffic {quoted(name)}: a number that cannot be read") from None
    plain, reuse = parted(plain) if turns is None else (turns[0], None)
    if constant_named(plain):
        isl, osl = map(int, plain.split("/"))
        found = constant_lengths(isl, osl)
    elif is_path(plain):
        raise InputError(f"traffic {quoted(name)} is no name of a traffic, and no ISL/OSL")
    else:
        found = turn_lengths(*turns) if turns is not None else lengths(traffic_case(plain))
    return uneven(found if reuse is None else with_cached(found, reuse), rank_imbalance)


def ranks_parted(name: str) -> tuple[str, str]:
    """Part the name of a traffic in the tables of a sweep from how unequal its ranks are.

    >>> ranks_parted("16384/2048/cached0.9/ranks_random"), ranks_parted("chat")
    (('16384/2048/cached0.9', 'random'), ('chat', 'even'))
    """
    plain, _, routing = name.partition(RANKS_SUFFIX)
    return plain, routing or EVEN_RANKS


def traffic_case(name: str) -> TrafficCase:
    """Find one case of a shipped traffic by the word that the tables of a sweep have for it."""
    stem, _, number = name.rpartition("_")
    if name not in list_specs("traffic") and number.isdigit() and stem in list_specs("traffic"):
        cases = load_traffic(stem).cases
        if int(number) < len(cases):
            return cases[int(number)]
    return load_traffic(name).cases[0]
