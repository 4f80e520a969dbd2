"""Make once what cases of sweeps have in common: specs and their digests, setups, mappings and batch axes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from disagg_sim.arrays import Ints
from disagg_sim.domain import Sharding
from disagg_sim.facts import load
from disagg_sim.facts.profile import profile_and_skew
from disagg_sim.physics.setup import Setup, engine_name
from disagg_sim.search.axes import batch_axis
from disagg_sim.search.layouts import CHECKED, CHECKED_PREFILL
from disagg_sim.serving.costs import JOULE
from disagg_sim.sweep.cases import Case, kin
from disagg_sim.sweep.digests import digest_of

Made = TypeVar("Made")


class Common:
    """Values of cases that are planned together, each made at its first use; spec files are read as they were then."""

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}

    def specs(self, case: Case) -> dict[str, Any]:
        """Every spec that the case depends on, by ``kind/name``; None where there is none of the kind."""
        return self.once(("specs", kin(case), case.traffic.law, case.per, case.served), lambda: _specs(case))

    def digests(self, case: Case) -> dict[str, str]:
        """Digest of each of these."""
        return {name: self.once(("digest", name), partial(digest_of, spec)) for name, spec in self.specs(case).items()}

    def mappings(self, case: Case, *, prefill: bool = False) -> Sharding:
        """Mappings of an instance within the limits: of prefill, or of what decodes."""
        at = self._setup(case, prefill=prefill)
        same = replace(kin(case), profile="")  # which mappings there are does not depend on how fast they are
        key = ("mappings", same, *_space(case, prefill=prefill))
        return self.once(key, lambda: case.limits.mappings(at, prefill=prefill))

    def batch(self, case: Case, *, prefill: bool = False) -> Ints:
        """Batch axis of all these mappings. [request]"""
        at, table = self._setup(case, prefill=prefill), self.mappings(case, prefill=prefill)
        phase = "prefill" if prefill else "decode"
        return self.once(
            ("batch", phase, case.traffic, kin(case), *_space(case, prefill=prefill)),
            lambda: batch_axis(at, table, case.lengths, phase=phase),
        )

    def _setup(self, case: Case, *, prefill: bool) -> Setup:
        return self.once(("setup", prefill, kin(case)), lambda: case.prefill_setup if prefill else case.decode_setup)

    def once(self, key: tuple[Any, ...], make: Callable[[], Made]) -> Made:
        """Return what was made under a key; make it the first time."""
        if key not in self._made:
            self._made[key] = make()
        found: Made = self._made[key]
        return found


def _space(case: Case, *, prefill: bool) -> tuple[Any, ...]:
    """What decides the mappings of a setup beside it: no latency, no bandwidth and no size of a deployment."""
    limits = replace(case.limits, ftl_s=math.inf, ttl_s=math.inf, nic_limit=math.inf, gpu_cap=1)
    limits = replace(limits, max_dcp=1) if prefill else replace(limits, max_pcp=1)
    return prefill and not case.pools.alike, limits


def _specs(case: Case) -> dict[str, Any]:
    model, pools, engines = load.load_model(case.model), case.pools, load.list_specs("engine")
    profile, _ = profile_and_skew(case.profile)
    specs: dict[str, Any] = {f"model/{model.name}": model, f"profile/{profile}": load.load_profile(profile)}
    specs |= {f"evidence/{name}": load.load_evidence(name) for name in (CHECKED, CHECKED_PREFILL)}
    specs |= {f"layout/{engine}": load.load_layout_rules(engine) for engine in load.list_specs("layout")}
    if case.speculation:
        curve = load.load_speculation(case.speculation)
        if curve.model:  # a stated one has no file
            specs[f"speculation/{case.speculation}"] = curve
        if curve.drafter is not None:
            specs[f"model/{curve.draft_model}"] = curve.drafter
    if case.traffic.law:
        specs[f"traffic/{case.traffic.law}"] = load.load_traffic(case.traffic.law)
    specs |= case.served.specs
    for name, recipe in ((pools.prefill_system, pools.prefill_precision), (pools.system, pools.precision)):
        specs[f"hardware/{name}"] = load.load_system(name)
        specs[f"efficiency/{name}"] = load.load_efficiency(name)
        if case.per == JOULE:
            specs[f"power/{name}"] = load.load_power(name)
        if (engine := engine_name(load.load_profile(profile), load.load_system(name), case.engine)) in engines:
            specs[f"engine/{engine}"] = load.load_engine(engine)
        specs[f"precision/{recipe}"] = load.resolve_precision(recipe, model, load.load_system(name))
    return specs
