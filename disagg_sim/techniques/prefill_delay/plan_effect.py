"""Say what a co-located design gains and loses by holding prompts back until every attention rank has a free seat."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from disagg_sim.certainty.designs import Designs
from disagg_sim.domain import ServingMode
from disagg_sim.serving.colocated import colocated
from disagg_sim.serving.colocation import Colocation
from disagg_sim.techniques.prefill_delay.law import delayed_passes

#: FTL that no design exceeds. [s]
NO_LIMIT = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillDelayEffect:
    """A design at its wait, and at none: an instance with a full queue."""

    steps: int  # decode steps that prompts are held back at most [1]
    gathered: float  # prompts of a pass, on average [request]
    between: float  # decode steps from a pass to the next, on average [1]
    ttl: float  # as the design means it [s]
    ttl_without: float  # where prompts do not wait [s]
    ftl: float  # with the wait for a slot [s]
    ftl_without: float  # [s]


def prefill_delay_effect_of(one: Designs) -> PrefillDelayEffect | None:
    """Find what a design gains and loses by holding prompts back; None where it holds none."""
    if one.mode != ServingMode.COLOCATED or not one.hold_steps[0]:
        return None
    steps, batch, mapping = int(one.hold_steps[0]), int(one.batch[0]), one.mapping[0]
    ending = min(float(one.at.accepted_length(mapping.draft_tokens)) / one.lengths.gaps, 1.0)
    passes = delayed_passes(np.array([batch]), np.array([mapping.dp_attn]), np.array([ending]), np.array([steps]))
    measure = "p99" if one.by_gap[0] else "tpot" if one.by_tpot[0] else "mean"
    found = []
    for waits in ((steps,), ()):
        options = Colocation(
            batch=(batch,), hold_steps=waits, ttl_measure=measure, mla_form=one.form, allow_long_context=True
        )
        rows = colocated(one.at, mapping, one.lengths, ftl_limit=NO_LIMIT, options=options)
        found.append(rows.sort_values(["hold_steps", "ttl_s"], ascending=[False, True]).iloc[0])
    own, without = found
    return PrefillDelayEffect(
        steps=steps,
        gathered=float(passes.prompts[0]),
        between=float(passes.steps[0]),
        ttl=float(own["ttl_s"]),
        ttl_without=float(without["ttl_s"]),
        ftl=float(own["ftl_with_slot_wait_s"]),
        ftl_without=float(without["ftl_with_slot_wait_s"]),
    )
