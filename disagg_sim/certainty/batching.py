"""Time designs of several modes and lengths together: passes of one kind under one setup are one evaluation.

A decode step of a co-located instance is that of a decode instance, a pass of prefill that of a prefill instance, and
the passes that fill one, two or four free seats differ in a number, as those of prompts of several lengths do. A pass
takes hundreds of operations on arrays, whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np

from disagg_sim.certainty.designs import Designs, Prompt, Times, times_of
from disagg_sim.domain import MAPPING_FIELDS, Sharding
from disagg_sim.facts.traffic import HBM
from disagg_sim.physics.residents import RankLoad
from disagg_sim.physics.setup import Setup


class Member(NamedTuple):
    """Rows that are timed beside others."""

    place: int  # of their designs
    rows: slice  # in what is timed together
    alike: slice  # of it, those of the same lengths, whose operators are judged together
    prompt: Prompt | None  # of prefill: how often the pass counts

    def times(self, of_all: Times) -> Times:
        """What passes take of the designs; arrays whose last axis is (rows,). [s]"""
        step, fill, busy, _, load, stall, _ = (np.asarray(part)[..., self.rows] for part in of_all)
        if self.prompt is None:
            return Times(step, fill, busy, 0.0 * fill, load, stall, 0.0 * fill)
        counts, apart = self.prompt, self.prompt.batch is None
        each, waits = (counts.busy * busy, counts.busy * stall) if apart else (counts.busy * fill, 0.0 * stall)
        return Times(step, counts.fill * fill, each, counts.long * fill, counts.load * load, waits, counts.own * fill)


#: Place of designs, and the prompts that they are timed at; None = a decode step.
_Asked = tuple[int, Prompt | None]


def pass_times(designs: Designs, phase: str, at: Setup) -> Times:
    """Times of the passes of a phase under a setup; others stay zero. [s]"""
    if phase == "decode":
        return times_of(designs.under(decode=at), fill=False)
    return times_of(designs.under(prefill=at), step=False)


class PassBatch(NamedTuple):
    """Passes of one kind of several designs."""

    phase: str  # "decode" or "prefill"
    designs: Designs  # one below another
    members: tuple[Member, ...]

    @property
    def at(self) -> Setup:
        """What the passes run under."""
        return self.designs.at if self.phase == "decode" else self.designs.prefill_at

    def timed(self, at: Setup) -> Times:
        """See ``pass_times``. [s]"""
        return pass_times(self.designs, self.phase, at)


def batch_passes(designs: Sequence[Designs]) -> list[PassBatch]:
    """Part the passes of designs by kind: decode steps, then those of prefill."""
    kinds: dict[Hashable, dict[Hashable, list[_Asked]]] = {}

    def ask(place: int, prompt: Prompt | None, kind: tuple[Hashable, ...], lengths: tuple[Hashable, ...]) -> None:
        kinds.setdefault(kind, {}).setdefault(lengths, []).append((place, prompt))

    for place, one in enumerate(designs):
        if "decode" in one.phases:
            ask(place, None, ("decode", _setup_of(one.at), one.load.batch is None), (one.lengths,))
    for place, one in enumerate(designs):
        if "prefill" not in one.phases:
            continue
        mixed = (_setup_of(one.at), one.load.batch is None) if one.mode == "piggyback" else None
        shared = _setup_of(one.prefill_at), one.form, mixed
        chunk = one.chunk_tokens[0] > 0 if one.lengths.constant else one.chunk_tokens[0]
        for prompt in one.prompts:
            of_one = one.lengths, prompt.isl, prompt.past, float(chunk)
            ask(place, prompt, ("prefill", *shared, *_kind_of(one, prompt)), of_one)
    return [_unit(designs, list(asked.values())) for asked in kinds.values()]


def _kind_of(one: Designs, prompt: Prompt) -> tuple[Hashable, ...]:
    """What passes of prompts share that are timed together, of whatever length they are."""
    size, new = one.chunk_tokens.min(), prompt.isl - prompt.past
    most = 4 ** int(np.ceil(np.log2(max(new / size, 1.0)) / 2)) if size else 0  # chunks of a prompt, a power of four
    same = prompt.tier, prompt.waits, prompt.lone, prompt.past > 0, most
    lengths = one.lengths if prompt.waits else (prompt.isl, prompt.past) if prompt.tier != HBM else None
    if one.mode != "piggyback":
        return (*same, lengths, None)
    # ``mixed_step`` takes the kernels of the phase with more tokens: prefill in any step, and in all
    chunk = np.maximum(one.mixed_chunk / one.mapping.dp_attn, 1.0) if prompt.lone else one.mixed_chunk
    microbatches = np.minimum(one.mapping.pp, one.batch)
    leads = chunk / microbatches > np.ceil(one.batch / microbatches) * (1.0 + one.mapping.draft_tokens)
    return (*same, lengths, (bool(np.any(leads)), bool(np.all(leads))))


def batched_times(designs: Sequence[Designs], under: Callable[[Setup], Setup]) -> list[Times]:
    """Time the passes of each of some designs under a change of their setups; arrays whose last axis is (rows,). [s]"""
    found = [Times(0.0, 0.0, 0.0) for _ in designs]
    for unit in batch_passes(designs):
        times = unit.timed(under(unit.at))
        for member in unit.members:
            found[member.place] = added(found[member.place], member.times(times))
    return found


def added(first: Times, second: Times) -> Times:
    """Times of the passes of both."""
    return Times(*(one + other for one, other in zip(first, second, strict=True)))


def _unit(designs: Sequence[Designs], groups: Sequence[Sequence[_Asked]]) -> PassBatch:
    members: list[Member] = []
    for group in groups:
        stops = np.cumsum([designs[place].rows.size for place, _ in group]) + (members[-1].rows.stop if members else 0)
        starts = stops - [designs[place].rows.size for place, _ in group]
        alike = slice(int(starts[0]), int(stops[-1]))
        slices = map(slice, starts.tolist(), stops.tolist())
        members += [Member(place, rows, alike, prompt) for (place, prompt), rows in zip(group, slices, strict=True)]
    asked = [each for group in groups for each in group]
    prompts = [prompt for _, prompt in asked if prompt is not None]
    if not prompts:
        return PassBatch("decode", _joined([designs[place] for place, _ in asked]), tuple(members))
    joined = _joined(
        [
            designs[place] if own is None or own.batch is None else replace(designs[place], prefill_batch=own.batch)
            for place, own in asked
        ]
    )
    first, sizes = prompts[0], [designs[place].rows.size for place, _ in asked]
    isl, past = (_of_rows([getattr(each, name) for each in prompts], sizes) for name in ("isl", "past"))
    once = Prompt(isl, past, load=1.0, tier=first.tier, waits=first.waits, lone=first.lone)
    return PassBatch("prefill", joined.of_prompts(once), tuple(members))


def _of_rows(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    """A number of each of some designs as one of each row; one number where all are the same."""
    if all(np.ndim(each) == 0 for each in values) and len({*values}) == 1:
        return values[0]
    return np.concatenate([np.broadcast_to(each, size) for each, size in zip(values, sizes, strict=True)])


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
    sizes = [one.rows.size for one in designs]
    for name in (each.name for each in fields(first)):
        parts = [getattr(one, name) for one in designs]
        if isinstance(parts[0], np.ndarray):
            columns[name] = np.concatenate(parts)
        elif isinstance(parts[0], Sharding):
            columns[name] = _stacked(parts, sizes)
    loads = [one.load for one in designs]
    batch = None if loads[0].batch is None else _of_rows([load.batch for load in loads], sizes)
    return replace(first, **columns, held=RankLoad(_of_rows([load.context for load in loads], sizes), batch))


def _stacked(mappings: Sequence[Sharding], sizes: Sequence[int]) -> Sharding:
    columns: dict[str, Any] = {}
    for name in MAPPING_FIELDS:
        values = [getattr(each, name) for each in mappings]
        if any(map(np.ndim, values)):
            values = [np.broadcast_to(value, size) for value, size in zip(values, sizes, strict=True)]
            columns[name] = np.concatenate(values)
    return replace(mappings[0], **columns)
