"""Write the word that the tables of a sweep have for the lengths of requests, and find these by it."""

from __future__ import annotations

import re
from typing import Any

from disagg_sim.choices import EVEN_RANKS
from disagg_sim.errors import InputError, quoted
from disagg_sim.facts.load import load_traffic
from disagg_sim.facts.traffic import ConstantShare, Reuse, TrafficCase
from disagg_sim.facts.yaml_files import is_path, list_specs
from disagg_sim.workload.lengths import Lengths, constant_lengths, lengths, uneven, with_cached
from disagg_sim.workload.turns import turn_lengths, turns_of

#: Between the name of a traffic and the way its requests find their DP rank.
RANKS_SUFFIX = "/ranks_"
_NUMBER = r"[0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?"
_REUSE = re.compile(
    rf"(?P<traffic>.+)/cached(?P<share>{_NUMBER})(_decode(?P<decode>{_NUMBER}))?(_blocks(?P<blocks>[0-9]+))?"
    rf"(?P<tiers>(_[a-z]+({_NUMBER})?)*)"
)


def lengths_named(name: str) -> Lengths:
    """Find the lengths of a case of a shipped traffic (``NAME``, ``NAME_1``), of turns of sessions, or of ``ISL/OSL``.

    Behind that may stand what is cached, as ``reuse_text`` writes it, or what turns of sessions meet
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
    """Part the name of a traffic in the tables of a sweep from how unequal its ranks are."""
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


def reuse_text(reuse: Reuse) -> str:
    """Name a constant share in the tables of a sweep."""
    usual = Reuse(share=reuse.share)
    assert isinstance(reuse.share, ConstantShare)
    said = [f"cached{reuse.share.share:.12g}"]
    if reuse.in_decode != usual.in_decode:
        said.append(f"decode{reuse.in_decode:.12g}")
    if reuse.block_tokens != usual.block_tokens:
        said.append(f"blocks{reuse.block_tokens}")
    said += [f"{name}{'' if share == 1.0 else f'{share:.12g}'}" for name, share in reuse.tiers]
    return "_".join(said)


def parted(traffic: str) -> tuple[str, Reuse | None]:
    """Part the name of a traffic from what is cached, as ``reuse_text`` writes it; None = nothing is said."""
    found = _REUSE.fullmatch(traffic)
    if found is None:
        return traffic, None
    share, in_decode, block_tokens = found.group("share", "decode", "blocks")
    own: dict[str, Any] = {"in_decode": float(in_decode)} if in_decode else {}
    own |= {"block_tokens": int(block_tokens)} if block_tokens else {}
    tiers = re.findall(rf"_([a-z]+)({_NUMBER})?", found.group("tiers"))
    own |= {"tiers": tuple((name, float(part or 1.0)) for name, part in tiers)}
    return found.group("traffic"), Reuse(share=ConstantShare(share=float(share)), **own)


def constant_named(traffic: str) -> bool:
    """Tell constant lengths in the tables of a sweep from the name of a traffic."""
    return re.fullmatch("[0-9]+/[0-9]+", traffic) is not None
