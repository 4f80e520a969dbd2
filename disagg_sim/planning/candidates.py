"""Make the configurations that the pools of one case may use, from their scored grids and the links between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from disagg_sim.choices import TUNED_DELAY, TWO
from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError
from disagg_sim.facts.load import load_system
from disagg_sim.physics.setup import Setup, setup
from disagg_sim.planning.choices import Grids, colocated_choices, decode_choices, prefill_choices, staged_choices
from disagg_sim.planning.design import Availability
from disagg_sim.planning.kv_links import cache_of, linked, wire_of
from disagg_sim.planning.limits import Demand
from disagg_sim.planning.pools import ColocatedChoice, DecodeChoice, PrefillChoice
from disagg_sim.planning.question import MOST_GPUS, OWN, PlanOptions, usual_precision
from disagg_sim.search.layouts import broken_rules
from disagg_sim.search.mappings import enumerate_mappings
from disagg_sim.search.phase_grid import PhaseGrid
from disagg_sim.serving.pool_names import pool_faults
from disagg_sim.simulation.instance_variants import ffn_of
from disagg_sim.techniques.encode.physics import EncodeStep, encode_step
from disagg_sim.techniques.encode.plan import EncodeChoice
from disagg_sim.techniques.registry import clashes
from disagg_sim.techniques.split.plan import split_choices
from disagg_sim.techniques.split.search import SplitGrid, split_grid
from disagg_sim.workload.lengths import Lengths

#: Scored points of whole decode instances, or of attention and feed-forward ranks.
DecodeGrid = PhaseGrid | SplitGrid


class FurtherPools(NamedTuple):
    """What requests pass beside prefill and whole decode instances; instances of both phases do not compete then."""

    names: tuple[str, ...]  # of all pools, those of prefill and decode among them
    encode: EncodeStep | None
    split: SplitGrid | None  # of attention and feed-forward pools
    whole: bool  # whether instances that decode alone compete with those

    @property
    def setups(self) -> tuple[Setup, ...]:
        """Those of attention and feed-forward ranks."""
        return () if self.split is None else (self.split.setup, self.split.ffn_setup)

    def under(self, lengths: Lengths) -> FurtherPools:
        """The same for requests of other lengths."""
        if (old := self.split) is None:
            return self
        return self._replace(split=split_grid(old.setup, lengths, ffn=old.ffn_setup, max_gpus=int(old.gpus.max())))


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Configurations that one case may use, for pools inside one NVLink domain and across domains."""

    at: Setup
    prefill_at: Setup
    work: Demand
    grids: Grids
    colocated: Sequence[ColocatedChoice]
    inside: tuple[Sequence[PrefillChoice], Sequence[DecodeChoice]]
    across: tuple[Sequence[PrefillChoice], Sequence[DecodeChoice]]
    costs: Mapping[str, float]  # cost of a GPU by system; with ``drawn`` that of a spare GPU
    prices: Mapping[str, float] = field(default_factory=dict)  # of a GPU by system, as given [USD/h]
    drawn: bool = False  # whether the cost of a design is the power that its GPUs draw at the rate [W]
    availability: Availability | None = None  # target for which designs get spares
    further: FurtherPools | None = None  # than prefill and decode
    encode: EncodeChoice | None = None  # of the pool before prefill; None = requests have no images

    @property
    def decoding(self) -> list[DecodeGrid]:
        """Grids of all instances that may decode."""
        grids: list[DecodeGrid] = [self.grids.decode] if self.further is None or self.further.whole else []
        return grids + ([] if self.further is None or self.further.split is None else [self.further.split])

    @property
    def domain(self) -> int:
        """GPUs of an NVLink domain that all pools may share; 0 where some have a system of their own. [1]"""
        apart = (ffn.setup is not None for taker in self.across[1] if (ffn := ffn_of(taker.mapping)) is not None)
        return 0 if self.prefill_at is not self.at or any(apart) else self.at.system.nvlink_domain

    def with_costs_of(self, other: Candidates) -> Candidates:
        """Take the costs and the availability target of other candidates."""
        counted = replace(self, costs=other.costs, prices=other.prices)
        return replace(counted, drawn=other.drawn, availability=other.availability)


def mappings_of(setups: tuple[Setup, Setup], options: PlanOptions) -> tuple[Sharding, Sharding]:
    """List the mappings of prefill, which start with those of decode where both have one setup, and of decode."""

    def taken(at: Setup, max_dcp: int, max_pcp: int) -> Sharding:
        found = enumerate_mappings(
            at,
            layouts=options.layouts,
            max_dcp=max_dcp,
            max_pcp=max_pcp,
            max_redundant_experts=options.max_redundant_experts,
        )
        asked = [(name, most) for name, most in (("dcp", max_dcp), ("pcp", max_pcp)) if most > 1]
        for name, most in asked:
            if np.all(getattr(found, name) == 1):
                raise InputError(
                    f"max_{name} {most}: {at.model.name} on {at.system.name} has no such layout; leave it out"
                )
        drafted = found if at.speculation is None else replace(found, draft_tokens=1)  # all hold the drafter
        rules, engine = broken_rules(at, drafted), at.engine if options.within == OWN else options.within
        if engine not in rules:
            return found
        kept = found[rules[engine] == ""]
        for name, most in asked:
            if np.all(getattr(kept, name) == 1):
                others = [each for each, rule in rules.items() if np.any((rule == "") & (getattr(found, name) > 1))]
                raise InputError(
                    f"max_{name} {most}: {engine} starts no such layout of {at.model.name} on {at.system.name}; "
                    f"engines that do: {', '.join(others) or 'none'}"
                )
        return kept

    at, prefill_at = setups
    decode = taken(at, options.max_dcp, 1)
    if prefill_at is not at:
        return taken(prefill_at, 1, options.max_pcp), decode
    if options.max_pcp == 1:
        return decode, decode
    shared = taken(at, 1, options.max_pcp)
    return Sharding.joined([decode, shared[shared.pcp > 1]]), decode


def further_pools(
    setups: tuple[Setup, Setup], lengths: Lengths, gpus: int | None, options: PlanOptions
) -> FurtherPools | None:
    """Make the pools beside prefill and whole decode instances, for as many ``gpus`` as there are; None = not asked."""
    decode, prefill = setups
    asked = {*options.pools} or {*TWO}
    split = "attention" in asked
    faults = list(pool_faults(options.pools, options.images, [decode.model], float(lengths.isl[0]), {}))
    if options.ffn_system is not None and not split:
        faults.append("ffn_system: needs attention and ffn among the pools, such as prefill,attention,ffn")
    alone, copies = split and "decode" not in asked, options.max_redundant_experts  # no whole instances decode, too
    on = {
        "encode": options.images is not None and "images",
        "context": alone and options.max_dcp > 1 and f"max_dcp {options.max_dcp}",
        "experts": alone and copies > 0 and f"max_redundant_experts {copies}",
        "speculation": decode.speculation is not None and f"speculation {decode.speculation.name!r}",
        "prefill_delay": options.hold_prompts != TUNED_DELAY and "hold_prompts",
        "split": split and "pools",
    }
    faults += clashes({name: text for name, text in on.items() if text}, "plan")
    if faults:
        raise InputError("; ".join(faults))
    if asked == {*TWO}:
        return None
    return FurtherPools(
        names=options.pools,
        encode=None if options.images is None else encode_step(prefill, **asdict(options.images)),
        split=_split_grid(decode, lengths, gpus, options) if split else None,
        whole="decode" in asked,
    )


def _split_grid(at: Setup, lengths: Lengths, gpus: int | None, options: PlanOptions) -> SplitGrid:
    """Score attention and feed-forward ranks of one instance, of no more GPUs than there are."""
    ffn = at
    if options.ffn_system is not None:  # whose recipe writes no cache
        system = load_system(options.ffn_system)
        recipe = options.precision or usual_precision(at.model, system)
        ffn = setup(at.model, system, recipe, at.profile, options.engine, techniques=options.techniques)
    most = None if gpus is None or gpus >= max(at.system.nvlink_domain, 64) else max(gpus, 2)
    return split_grid(at, lengths, ffn=ffn, max_gpus=most)


def candidates_of(
    setups: tuple[Setup, Setup],
    work: Demand,
    grids: Grids,
    costs: Mapping[str, float],
    max_nic: float | None,
    further: FurtherPools | None,
) -> Candidates:
    """Keep the choices of scored grids that are worth sizing; ``max_nic`` is a bandwidth [B/s]."""
    at, prefill_at = setups
    work = replace(work, lengths=grids.prefill.lengths)  # without cached prefixes where the model cannot reuse them
    encode = None if further is None else further.encode
    takers = decode_choices(grids.decode, work) if further is None or further.whole else []
    if further is not None and further.split is not None:
        takers += split_choices(further.split, work)
    choices = (prefill_choices(grids.prefill, work), takers)
    both = prefill_at is at and further is None
    case = Candidates(
        at=at,
        prefill_at=prefill_at,
        work=work,
        grids=grids,
        colocated=[*staged_choices(grids, work), *colocated_choices(grids, work)] if both else (),
        inside=choices,
        across=choices,
        costs=costs,
        further=further,
        encode=None if encode is None else EncodeChoice(step=encode, work=work),
    )
    return with_link_limit(case, max_nic)


@lru_cache(maxsize=16)  # a change that is found is planned anew
def under_limits(case: Candidates, work: Demand, max_nic: float | None) -> Candidates:
    """Candidates for other limits or links [B/s], on the same grids."""
    if (work.ttft, work.tpot) == (case.work.ttft, case.work.tpot):
        return with_link_limit(case, max_nic)
    found = candidates_of((case.at, case.prefill_at), work, case.grids, case.costs, max_nic, case.further)
    return found.with_costs_of(case)


def with_link_limit(case: Candidates, max_nic: float | None) -> Candidates:
    """Limit the bandwidth over which the caches of the candidates move. [B/s]"""
    cache = cache_of(case.grids.decode, case.grids.prefill)

    def split(gpus: int) -> tuple[Sequence[PrefillChoice], Sequence[DecodeChoice]]:
        return linked(*case.across, cache, wire_of(case.at, case.prefill_at, gpus, max_nic))

    across = split(MOST_GPUS)
    return replace(case, inside=split(1) if case.domain else across, across=across)
