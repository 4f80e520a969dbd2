"""Schedulers of serving engines by version: what they admit, what they keep, and how much a step holds by default.

One file per version in ``hw_specs/schedulers/``; every value has its source there. An engine's own times stand apart in
``hw_specs/engines/``, which names the scheduler of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.schema import NOT_IN_FILE, Line, OneOf, Quantity, Range, faults_of_sources, spec_of
from disagg_sim.facts.yaml_files import spec_error
from disagg_sim.notebook import Shown
from disagg_sim.units import TB

_Count = Annotated[int, Range(1, 10**7)]

#: What a prompt needs to be admitted: its own blocks at once, room for its first chunk, for the prompt, for the output.
ADMISSIONS = ("prompt", "first_chunk", "prompt_fits", "output_fits")

#: Which attention rank of an instance takes a request: that with the least waiting and running ones, the next in turn,
#: that with the fewest prompt tokens.
RANK_CHOICES = ("least_waiting", "in_turn", "fewest_tokens")


#: When a prompt finds the blocks of another: once these are taken for a step, or once the step has computed them.
PREFIX_FOUND = ("taken", "computed")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDefaults:
    """What a step holds where the operator says nothing, on GPUs of some memory and more."""

    memory: Annotated[float, Quantity("B", 0.0, 10 * TB)]  # from so much reported memory of a GPU on [B]
    token_budget: _Count  # decodes and prefill of one step [token]
    max_sequences: _Count  # running and in prefill together [1]


@dataclass(frozen=True, kw_only=True)
class SchedulerSpec(Shown):
    """How an engine of some version forms its steps and uses its memory for KV blocks."""

    name: Annotated[str, NOT_IN_FILE]
    title: Line
    admission: Annotated[str, OneOf(ADMISSIONS)]
    watermark: Annotated[float, Range(0.0, 0.5)]  # share of the blocks that an admission leaves free [1]
    prefix_found: Annotated[str, OneOf(PREFIX_FOUND)]  # what a prompt finds of those before it
    keeps_preempted: bool  # blocks of a preempted request stay in the prefix cache until others take them
    defaults: tuple[StepDefaults, ...]  # by memory, from 0 B on
    least_on: tuple[str, ...]  # words in names of systems whose defaults are the first ones, whatever their memory
    budget_per_rank: bool  # the token budget is that of each attention rank; else all of them share it
    rank_choice: Annotated[str, OneOf(RANK_CHOICES)]
    sources: Mapping[str, str]  # key -> where its value comes from

    def defaults_on(self, system: SystemSpec) -> StepDefaults:
        """What a step holds by default on a system.

        vLLM takes the larger values on 70 GiB and more, but on the A100:

        >>> from disagg_sim.facts.load import load_scheduler, load_system
        >>> vllm = load_scheduler("vllm_v1_2025")
        >>> [vllm.defaults_on(load_system(name)).token_budget for name in ("h100_sxm", "a100_sxm_80gb")]
        [8192, 2048]
        """
        if any(word in system.name for word in self.least_on):
            return self.defaults[0]
        return [each for each in self.defaults if each.memory <= system.hbm_reported][-1]


def scheduler_of(path: Path, data: Mapping[str, Any], name: str) -> SchedulerSpec:
    """Read a scheduler from its file; every value needs a source."""
    spec = spec_of(SchedulerSpec, path, data, name)
    found = faults_of_sources(SchedulerSpec, spec.sources, data, ("title",))
    rows = [each.memory for each in spec.defaults]
    if not rows or rows[0] != 0.0 or any(low >= high for low, high in pairwise(rows)):
        found.append("defaults: memory must rise from 0 GB on, one line each")
    if found:
        raise spec_error(path, found)
    return spec
