"""What a fleet shows of its arrays: columns of instances and of segments, views and not copies."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from disagg_sim.simulation.kernel import layout as state
from disagg_sim.simulation.kernel.layout import SegmentStatus

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Arrays(NamedTuple):
    """The kernel's own arrays, not copies; ``state`` names their columns."""

    ints: Ints  # (instances, INST_INTS)
    floats: Floats  # (instances + 1, INST_FLOATS), the clock in the last row
    seg: Ints  # (room for segments, SEG_INTS)
    sets: Ints  # (2, instances, sequences)
    heads: Ints  # of step tables
    values: Floats
    submitted: int  # segments so far [1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Columns of all segments submitted so far, in the order of submission."""

    request: Ints
    instance: Ints
    context: Ints  # [token]
    prompt: Ints  # [token]
    generate: Ints  # [token]
    status: Ints  # ``SegmentStatus``
    preemptions: Ints
    cached: Ints  # prompt tokens found in the prefix cache [token]
    submit_s: Floats
    start_s: Floats  # first step or pass that worked on it; nan = never [s]
    first_token_s: Floats  # end of its prefill, or of its first decode step; nan = none [s]
    finish_s: Floats  # nan = not finished [s]

    @classmethod
    def of(cls, ints: Ints, times: Floats) -> Segments:
        """Columns of the kernel's arrays."""
        return cls(
            request=ints[:, state.REQUEST],
            instance=ints[:, state.INSTANCE],
            context=ints[:, state.CONTEXT],
            prompt=ints[:, state.PROMPT],
            generate=ints[:, state.GENERATE],
            status=ints[:, state.STATUS],
            preemptions=ints[:, state.PREEMPTED],
            cached=ints[:, state.HIT],
            submit_s=times[:, state.SUBMIT_S],
            start_s=times[:, state.START_S],
            first_token_s=times[:, state.FIRST_S],
            finish_s=times[:, state.FINISH_S],
        )

    def kept(self) -> Segments:
        """Those that were not withdrawn."""
        whole = self.status != SegmentStatus.WITHDRAWN
        if whole.all():
            return self
        return Segments(**{field.name: getattr(self, field.name)[whole] for field in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Views:
    """Columns of the instances, current up to each one's last event.

    ``Fleet.refresh`` brings what decode runs change up to a time: tokens, blocks and counters.
    """

    active: Ints
    queued_requests: Ints  # wait or are in prefill [1]
    queued_prompt_tokens: Ints  # of theirs, not yet computed [token]
    queued_context_tokens: Ints  # that they came with, computed elsewhere; of preempted ones too [token]
    running_requests: Ints  # in decode [1]
    running_tokens: Ints  # cached tokens of theirs [token]
    free_blocks: Ints
    total_blocks: Ints
    decode_steps: Ints  # steps with at least one decode [1]
    passes: Ints  # steps with prefill [1]
    prefill_tokens: Ints  # computed [token]
    decode_tokens: Ints  # emitted by decodes [token]
    first_tokens: Ints  # emitted by prefill [token]
    preemptions: Ints
    decode_time: Floats  # of the steps with at least one decode [s]
    busy_time: Floats  # [s]
    next_event: Floats  # inf = none [s]

    @classmethod
    def of(cls, ints: Ints, floats: Floats) -> Views:
        """Columns of the kernel's arrays, whose last row of ``floats`` is its clock."""
        return cls(
            active=ints[:, state.ACTIVE],
            queued_requests=ints[:, state.QUEUED],
            queued_prompt_tokens=ints[:, state.QUEUED_TOKENS],
            queued_context_tokens=ints[:, state.QUEUED_CONTEXT],
            running_requests=ints[:, state.RUNNING],
            running_tokens=ints[:, state.RUNNING_TOKENS],
            free_blocks=ints[:, state.FREE_BLOCKS],
            total_blocks=ints[:, state.TOTAL_BLOCKS],
            decode_steps=ints[:, state.DECODE_STEPS],
            passes=ints[:, state.PASSES],
            prefill_tokens=ints[:, state.PREFILL_TOKENS],
            decode_tokens=ints[:, state.DECODE_TOKENS],
            first_tokens=ints[:, state.FIRST_TOKENS],
            preemptions=ints[:, state.PREEMPTIONS],
            decode_time=floats[:-1, state.DECODE_S],
            busy_time=floats[:-1, state.BUSY_S],
            next_event=floats[:-1, state.NEXT_S],
        )
