"""Make co-located instances for very long prompts: pipelines that serve one request at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from disagg_sim.domain import BOUNDS
from disagg_sim.physics.drafting import accepted_length
from disagg_sim.planning.choices import Grids, host_of, longer_than_steps, staged_rows, times_of_passes
from disagg_sim.planning.limits import Demand
from disagg_sim.planning.long_prompts import OneByOne
from disagg_sim.planning.mixed_steps import MixedSteps


def staged_choices(grids: Grids, work: Demand) -> Iterator[OneByOne]:
    """Pipelines of one attention rank that serve one prompt at a time, in chunks; none where a step holds one."""
    if not longer_than_steps(work.lengths):
        return
    prefill, decode, nodes = grids.prefill, grids.decode, work.lengths.prompt_nodes()
    at, none = decode.setup, np.zeros((0, 1))
    for row, own in staged_rows(grids, work):
        ftl, _, load = times_of_passes(prefill, np.array([row]), np.ones(1), nodes)
        mapping = replace(decode.chosen(own, 0), chunk_tokens=int(prefill.mappings.chunk_tokens[row]))
        steps = MixedSteps(  # no prompt is computed beside a decode
            ranks=1,
            budget=math.ceil(nodes.new.max()),
            prompt=work.lengths.mean_new,
            each=work.lengths.gaps / float(accepted_length(at.speculation, mapping.draft_tokens)),
            waits=(0,),
            batch=np.ones(1),
            verified=np.full(1, 1.0 + mapping.draft_tokens),
            step=decode.step[own, :1],
            tokens=np.zeros(0),
            mixed=none,
            single=none,
            late=none,
        )
        yield OneByOne(
            at=at,
            mapping=mapping,
            work=work,
            steps=steps,
            nodes=nodes.new,
            weights=nodes.weight,
            host=host_of(at),
            memory=float(max(prefill.memory_bytes[row, 0], decode.memory_bytes[own, 0])),
            memory_seats=int(decode.batch[np.flatnonzero(decode.feasible[own])[-1]]),
            bound=BOUNDS[decode.bound[own, 0]],
            passes=host_of(at) + (ftl + load)[:, 0, 0],
        )
