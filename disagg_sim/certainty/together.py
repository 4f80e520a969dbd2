"""Time designs of several modes together: passes of one kind under one setup and lengths are one evaluation.

A decode step of a co-located instance is that of a decode instance, a pass of prefill that of a prefill instance, and
the passes that fill one, two or four free seats differ in a number. A pass takes hundreds of operations on arrays,
whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np

from disagg_sim.certainty.designs import Designs, Prompt, Times, times_of
from disagg_sim.domain import MAPPING_FIELDS, Mapping
from disagg_sim.physics.setup import Setup


class Member(NamedTuple):
    """Rows that are timed beside others."""

    place: int  # of their designs
    rows: slice  # in what is timed together
    prompt: Prompt | None = None  # of prefill: how often the pass counts

    def times(self, of_all: Times) -> Times:
        """What passes take of the designs; arrays whose last axis is (rows,). [s]"""
        step, fill, busy, _, load = (np.asarray(part)[..., self.rows] for part in of_all)
        if self.prompt is None:
            return Times(step, fill, busy, 0.0 * fill, load)
        often = busy if self.prompt.batch is None else fill
        counts = self.prompt
        return Times(step, counts.fill * fill, counts.busy * often, counts.long * fill, counts.load * load)


class Together(NamedTuple):
    """Passes of one kind of several designs."""

    phase: str  # "decode" or "prefill"
    designs: Designs  # one below another
    members: tuple[Member, ...]

    @property
    def at(self) -> Setup:
        """What the passes run under."""
        return self.designs.at if self.phase == "decode" else self.designs.prefill_at

    def timed(self, at: Setup) -> Times:
        """Times of the passes under a setup; others stay zero. [s]"""
        if self.phase == "decode":
            return times_of(self.designs.under(decode=at), fill=False)
        return times_of(self.designs.under(prefill=at), step=False)


def together(designs: Sequence[Designs]) -> list[Together]:
    """Part the passes of designs by kind: decode steps, then those of prefill."""
    kinds: dict[Hashable, list[tuple[int, Prompt | None]]] = {}
    for place, one in enumerate(designs):
        kinds.setdefault(("decode", _setup_of(one.at), one.lengths), []).append((place, None))
    for place, one in enumerate(designs):
        mixed = (one.interference, _setup_of(one.at)) if one.mode == "piggyback" else None
        chunk = one.chunk_tokens[0] > 0 if one.lengths.constant else one.chunk_tokens[0]
        shared = _setup_of(one.prefill_at), one.lengths, one.form, float(chunk), mixed
        for prompt in one.prompts:
            alike = prompt.isl, prompt.past, prompt.tier, prompt.waits, prompt.lone
            kinds.setdefault(("prefill", *shared, *alike), []).append((place, prompt))
    return [_unit(designs, asked) for asked in kinds.values()]


def times_together(designs: Sequence[Designs], under: Callable[[Setup], Setup]) -> list[Times]:
    """Time the passes of each of some designs under a change of their setups; arrays whose last axis is (rows,). [s]"""
    found = [Times(0.0, 0.0, 0.0) for _ in designs]
    for unit in together(designs):
        times = unit.timed(under(unit.at))
        for member in unit.members:
            found[member.place] = added(found[member.place], member.times(times))
    return found


def added(first: Times, second: Times) -> Times:
    """Times of the passes of both."""
    return Times(*(one + other for one, other in zip(first, second, strict=True)))


def _unit(designs: Sequence[Designs], asked: Sequence[tuple[int, Prompt | None]]) -> Together:
    stops = np.cumsum([designs[place].rows.size for place, _ in asked]).tolist()
    slices = map(slice, [0, *stops], stops)
    members = tuple(Member(place, rows, prompt) for (place, prompt), rows in zip(asked, slices, strict=False))
    prompt = asked[0][1]
    if prompt is None:
        return Together("decode", _joined([designs[place] for place, _ in asked]), members)
    joined = _joined([_at_batch(designs[place], own) for place, own in asked])
    once = Prompt(prompt.isl, prompt.past, load=1.0, tier=prompt.tier, waits=prompt.waits, lone=prompt.lone)
    return Together("prefill", joined.of_prompts(once), members)


def _at_batch(one: Designs, prompt: Prompt | None) -> Designs:
    """Designs with the prompts that a pass has."""
    return one if prompt is None or prompt.batch is None else replace(one, prefill_batch=prompt.batch)


def _setup_of(at: Setup) -> Hashable:
    """Setups of which this is the same are alike: those of designs without drafts are made anew."""
    parts = (getattr(at, each.name) for each in fields(at))
    return tuple(part if isinstance(part, str | float) else id(part) for part in parts)


def _joined(designs: Sequence[Designs]) -> Designs:
    """Designs one below another, with what the first has beside its rows."""
    first, *others = designs
    if not others:
        return first
    columns: dict[str, Any] = {}
    for name in (each.name for each in fields(first)):
        parts = [getattr(one, name) for one in designs]
        if isinstance(parts[0], np.ndarray):
            columns[name] = np.concatenate(parts)
        elif isinstance(parts[0], Mapping):
            columns[name] = _stacked(parts, [one.rows.size for one in designs])
    return replace(first, **columns)


def _stacked(mappings: Sequence[Mapping], sizes: Sequence[int]) -> Mapping:
    columns: dict[str, Any] = {}
    for name in MAPPING_FIELDS:
        values = [getattr(each, name) for each in mappings]
        if any(map(np.ndim, values)):
            values = [np.broadcast_to(value, size) for value, size in zip(values, sizes, strict=True)]
            columns[name] = np.concatenate(values)
    return replace(mappings[0], **columns)
