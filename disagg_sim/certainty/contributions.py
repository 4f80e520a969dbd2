r"""Compute what each operator contributes to the passes of designs, with its sizes and the fits behind it.

The time of a pass is a sum of operator times, but for overlaps and for the slowest pipeline stage, of which the larger
counts. So it is homogeneous of degree one in the times :math:`t_o` of its operators and in what does not depend on them
(host), and by Euler's theorem it is the sum of its contributions :math:`t_o\,\partial T/\partial t_o`: an operator that
hides behind another contributes nothing, one of the slowest stage counts once per micro-batch.

Derivatives are complex steps: with a factor :math:`1 + ih` on a time or on a rate, :math:`\Im(T)/h` is the exact
derivative, since nothing is subtracted. References: W. Squire and G. Trapp, "Using complex variables to estimate
derivatives of real functions", SIAM Review 40(1), 1998, :doi:`10.1137/S003614459631241X`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from disagg_sim.arrays import Floats, Ints, Mask
from disagg_sim.certainty.batching import added, batch_passes
from disagg_sim.certainty.designs import Designs, Prompt, Times
from disagg_sim.facts.efficiency import (
    CACHE_LENGTH,
    COLLECTIVE_SIZES,
    EXCHANGE_SIZES,
    EXPERT_SIZES,
    GEMM_SIZES,
    PROMPT_LENGTH,
    Fit,
)
from disagg_sim.physics.blocks import ATTENTION
from disagg_sim.physics.rates import Rates
from disagg_sim.physics.roofline import Cost, Sums
from disagg_sim.physics.setup import Setup
from disagg_sim.physics.work import Operator

Ranges = Mapping[str, tuple[Floats, Floats]]
OperatorKey = tuple[str, str, str]  # name, kind, and format or kind of attention

#: Imaginary step of a derivative: so small that its square vanishes beside one. [1]
STEP = 1e-30
#: Factor on a number of the hardware that carries the step of a derivative by its logarithm. [1]
FACTOR: Any = np.complex128(1.0 + STEP * 1j)


def with_derivative(value: Any, derivative: Any) -> Any:
    """A value that carries its derivative by something: nothing but this file knows how."""
    return value + STEP * 1j * derivative


def derivative_of(value: Any) -> Any:
    """The derivative that a value carries; 0 where it carries none."""
    return np.imag(value) / STEP


def elasticity_of(value: Any) -> Any:
    """The derivative over the value. [1]"""
    return np.imag(value) / np.real(value) / STEP


def value_of(value: Any) -> Any:
    """The value without the derivative that it carries."""
    return np.real(value)


#: Numbers of an operator's time that are carried at once: few enough for the cache, enough to hide numpy's overhead.
CARRIED = 8192
#: Kinds of operators between the projections of attention, which engines' stretches leave out.
SCORES = ("prefill_attention", "decode_attention", "attention_part")
#: Operator kinds as people read them.
LABELS = {
    "gemm": "GEMM",
    "prefill_attention": "prefill attention",
    "decode_attention": "decode attention",
    "attention_part": "linear or sparse attention",
    "experts": "experts",
    "elementwise": "elementwise kernels",
    "copy": "elementwise kernels",
    "all_reduce": "all-reduce",
    "gather": "expert gather",
    "all_to_all": "MoE exchange",
    "hop": "pipeline hop",
}


@dataclass(frozen=True, eq=False, kw_only=True)
class Contribution:
    """One operator of some designs, in passes of prompts of one length; arrays have shape (rows,)."""

    phase: str  # whose mapping and setting it runs under: "decode" or "prefill"
    name: str
    kind: str  # of ``physics.work.KINDS``
    format: str  # of a matrix multiply
    attention: str  # kind whose fits time it, of an attention
    seconds: Times  # its part of each pass [s]
    sizes: Ranges  # (least, largest) of each size, by the name that the kernel tables give it
    fits: tuple[Fit, ...]  # behind its time; none = an assumption of the profile
    architecture: str  # of the chip that it runs on
    cut_of: tuple[Contribution, Ints] | None = None  # what it is some rows of, and which; None = all that were timed

    @property
    def rows(self) -> int:
        """Designs. [1]"""
        return int(np.size(self.seconds.step))

    def of_rows(self, rows: slice | Mask) -> Contribution:
        """The operator of some of the designs."""
        whole, places = self.cut_of or (self, np.arange(self.rows))
        sizes = {size: (low[rows], high[rows]) for size, (low, high) in self.sizes.items()}
        seconds = Times(*(part[rows] for part in self.seconds))
        return replace(self, seconds=seconds, sizes=sizes, cut_of=(whole, places[rows]))

    @property
    def key(self) -> OperatorKey:
        """Name, kind, and format or kind of attention, which tell operators of a pass apart."""
        return self.name, self.kind, self.format or self.attention

    @property
    def label(self) -> str:
        """Kind as people read it."""
        return LABELS[self.kind]


#: What a pass takes under a setup. [s]
Timed = Callable[[Setup], Times]
Wanted = Callable[[Contribution], bool]
#: What is made of the cost of an operator on its way.
Adjust = Callable[[Operator, Cost], Cost]


def timed_contributions(
    designs: Sequence[Designs], wanted: Wanted = lambda _: True, marks: Callable[[Setup], Adjust] = lambda _: _as_it_is
) -> list[tuple[Times, list[Contribution]]]:
    """Time the passes of each of some designs (``times_of``), and find every operator that takes time in any of them.

    Operators of decode passes come first, then those of prefill passes, prompts of one length after the other; with
    what the host adds, their seconds add up to every pass [s]. ``marks`` of a setup are put on costs while times are
    taken: imaginary parts, along a leading axis, come with them.
    """
    found = [Times(0.0, 0.0, 0.0) for _ in designs]
    parts: list[list[tuple[int, list[Contribution]]]] = [[] for _ in designs]
    for unit in batch_passes(designs):
        times, shares = _contributions(unit.phase, unit.at, unit.timed, wanted, marks(unit.at))
        judged: dict[int, list[Contribution]] = {}  # lengths that are timed beside others are judged by themselves
        for member in unit.members:
            place, alike = member.place, member.alike
            if alike.start not in judged:
                judged[alike.start] = [each for each in shares if wanted(each.of_rows(alike))]
            mine = judged[alike.start]
            own = [replace(each.of_rows(member.rows), seconds=member.times(each.seconds)) for each in mine]
            found[place] = added(found[place], member.times(times))
            order = place_of_prompt(designs[place].prompts, member.prompt)
            parts[place].append((order, [each for each in own if any(map(np.any, each.seconds))]))
    in_order = [[each for _, some in sorted(mine, key=lambda pair: pair[0]) for each in some] for mine in parts]
    return list(zip(found, in_order, strict=True))


def place_of_prompt(prompts: Sequence[Prompt], prompt: Prompt | None) -> int:
    """Place of a pass among those of designs: 0 of a decode step, then those of prefill in order of their prompts."""
    return 0 if prompt is None else 1 + next(number for number, each in enumerate(prompts) if each is prompt)


def contributions_in(phase: str, at: Setup, timed: Timed, wanted: Wanted = lambda _: True) -> list[Contribution]:
    r"""Find every operator that takes time where ``timed`` times passes of one phase under a setup.

    ``seconds`` are :math:`t_o\,\partial T/\partial t_o`, shape (rows,); with the host's they make the passes [s].

    >>> import disagg_sim as ds
    >>> from disagg_sim.certainty.designs import times_of
    >>> from disagg_sim.certainty.rows import designs_of
    >>> at = ds.setup("llama_3_1_8b", "h100_sxm", "fp8", profile="ideal")
    >>> options = ds.Colocation(batch=(1,), prefill_batch=(1,))
    >>> (one,) = designs_of(ds.colocated(at, ds.Sharding(), ds.lengths(1000, 101), options=options))
    >>> parts = contributions_in("decode", at, lambda at: times_of(one.under(decode=at), fill=False))
    >>> whole = times_of(one).step[0]
    >>> f"{sum(part.seconds.step[0] for part in parts) / whole:.6f} of a step in {len(parts)} operators"
    '1.000000 of a step in 8 operators'
    """
    return _contributions(phase, at, timed, wanted, _as_it_is)[1]


def _contributions(
    phase: str, at: Setup, timed: Timed, wanted: Wanted, marked: Adjust
) -> tuple[Times, list[Contribution]]:
    """What the passes take under marks, and what operators contribute."""
    times, recorded, rows = _recorded(at, timed, marked)
    nothing, found = Times(*(np.zeros(rows) for _ in Times._fields)), {}
    for key, sizes in recorded.items():
        name, kind, form = key
        scores = kind in SCORES
        one = Contribution(
            phase=phase,
            name=name,
            kind=kind,
            format="" if scores else form,
            attention=form if scores else "",
            seconds=nothing,
            sizes=sizes,
            fits=tuple(fits_of(at.rates, name, kind, form)),
            architecture=at.system.architecture,
        )
        if wanted(one):
            found[key] = one
    seconds = shares_of(list(found), rows, at, timed, lambda _, cost: cost * FACTOR)
    taken = [
        replace(one, seconds=Times(*each)) for one, each in zip(found.values(), zip(*seconds, strict=True), strict=True)
    ]
    return times, [one for one in taken if any(np.any(part) for part in one.seconds)]


def shares_of(keys: Sequence[OperatorKey], rows: int, at: Setup, timed: Timed, marked: Adjust) -> Times:
    """Carry a quantity of each of some operators through the passes: what ``marked`` makes of its cost.

    Many operators are carried at once, each along a row of a leading axis on which the others carry nothing. Returns
    the quantity over all calls of an operator, each as often as it counts in a pass; shape (operators, rows).
    """
    found = [np.zeros((len(keys), rows)) for _ in Times._fields]
    step = max(CARRIED // rows, 1)
    for start in range(0, len(keys), step):
        place = {key: index for index, key in enumerate(keys[start : start + step])}

        def adjust(op: Operator, cost: Cost, place: Mapping[OperatorKey, int] = place) -> Cost:
            key = key_of(op)
            return _along(marked(op, cost), place[key], len(place)) if key in place else _real(cost)

        with np.errstate(invalid="ignore"):  # of kernels that take infinitely long, which no pass chooses
            for whole, part in zip(found, timed(adjusted(at, adjust)), strict=True):
                whole[start : start + step] = derivative_of(part)
    return Times(*found)


def _along(cost: Cost, index: int, count: int) -> Cost:
    """The cost with a leading axis of ``count``, its imaginary part at ``index`` alone."""
    axes = max(np.ndim(cost.time), 1)

    def laid(part: Any) -> Any:
        if not np.iscomplexobj(part):
            return part
        shape = (1,) * (axes - np.ndim(part)) + np.shape(part)
        apart = np.zeros((count, *shape), dtype=np.complex128)
        apart.real = np.real(part)
        apart.imag[index] = np.imag(part)
        return apart

    return Cost(laid(cost.time), Sums(*map(laid, cost.sums)))


def key_of(op: Operator) -> OperatorKey:
    """What tells operators of a pass apart, as ``Contribution.key``."""
    return op.name, op.kind, op.format or op.table


def adjusted(at: Setup, adjust: Adjust) -> Setup:
    """The setup with costs of operators changed on their way."""
    return replace(at, rates=replace(at.rates, adjust=adjust))


def carries(quantity: Callable[[Operator, Cost], Any]) -> Adjust:
    """What puts on the time of every operator a quantity times that time."""

    def adjust(op: Operator, cost: Cost) -> Cost:
        return replace(cost, time=cost.time * with_derivative(1.0, quantity(op, _real(cost))))

    return adjust


def _real(cost: Cost) -> Cost:
    parts = (cost.time, *cost.sums)
    if not any(map(np.iscomplexobj, parts)):
        return cost
    time, *sums = map(np.real, parts)
    return Cost(time, Sums(*sums))


def _as_it_is(_: Operator, cost: Cost) -> Cost:
    return cost


def _recorded(at: Setup, timed: Timed, marked: Adjust) -> tuple[Times, dict[OperatorKey, Ranges], int]:
    """Times; names, kinds and formats of operators in order of first appearance, with their sizes; rows."""
    seen: dict[OperatorKey, list[dict[str, Any]]] = defaultdict(list)

    def record(op: Operator, cost: Cost) -> Cost:
        seen[key_of(op)].append(sizes_of(op))
        return marked(op, cost)

    times = timed(adjusted(at, record))
    rows = max((np.shape(part) or (1,))[-1] for part in times)
    return times, {key: _ranges(each, rows) for key, each in seen.items()}, rows


def _ranges(calls: list[dict[str, Any]], rows: int) -> Ranges:
    """Least and largest of every size over the calls of an operator."""
    ends = {size: [_over_rows(call[size], rows) for call in calls] for size in calls[0]}
    return {
        size: (np.min([low for low, _ in pairs], axis=0), np.max([high for _, high in pairs], axis=0))
        for size, pairs in ends.items()
    }


def _over_rows(values: Any, rows: int) -> tuple[Floats, Floats]:
    """Least and largest of each row: a value may be a number, one a row, or several a row (chunks).

    >>> [each.tolist() for each in _over_rows([[1.0, 3.0], [4.0, 2.0]], 2)]
    [[1.0, 2.0], [3.0, 4.0]]
    """
    array = np.asarray(values, dtype=float)
    if array.ndim < 2:
        return (same := np.broadcast_to(array, rows)), same
    return np.broadcast_to(array.min(axis=1), rows), np.broadcast_to(array.max(axis=1), rows)


def sizes_of(op: Operator) -> dict[str, Any]:
    """Sizes of an operator by the names that kernel tables give them (``facts.efficiency``)."""
    match op.kind:
        case "gemm":
            return dict(zip(GEMM_SIZES, op.shape, strict=True))
        case "prefill_attention" | "decode_attention" | "attention_part":
            shape, block = op.attention, ATTENTION[op.table.split()[0]]
            length = CACHE_LENGTH if op.kind == "decode_attention" else PROMPT_LENGTH
            return {"batch": shape.sequences, length: shape.longest, **block.sizes(shape)}
        case "experts":
            rows = op.experts
            sizes = (op.size, rows.hidden, rows.width, op.ranks, rows.experts * op.ranks)
            return dict(zip(EXPERT_SIZES, sizes, strict=True))
        case "all_reduce" | "gather":
            return dict(zip(COLLECTIVE_SIZES, (op.ranks, op.size), strict=True))
        case "all_to_all":
            return dict(zip(EXCHANGE_SIZES, (op.ranks, op.domains, op.size), strict=True))
    return {}


def fits_of(rates: Rates, name: str, kind: str, form: str) -> Iterator[Fit]:
    """Fits behind an operator of a name, kind and format."""
    for taken in rates.used:
        if taken.serves(name, kind, form):
            yield from taken.fits
