"""Find the operators of a design outside the range of every fit, or with fits of another system.

The text leaves out elementwise kernels and pipeline hops: no table measures them, so they are assumptions of the
profile in every design.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pandas as pd

from disagg_sim.arrays import Floats, Mask
from disagg_sim.certainty.contributions import Contribution, timed_contributions
from disagg_sim.certainty.designs import Designs, Times
from disagg_sim.certainty.rows import SHIPPED, Origin, designs_of
from disagg_sim.facts.efficiency import ASSUMED, AllToAllFit, CollectiveFit, Fit

#: Column with the words of designs outside the range of their fits.
OUTSIDE = "outside_calibration"
#: Operators that take less than this share of every pass of a design are left out of its words. [1]
WORTH_TELLING = 0.01
#: Part by which a size may pass the end of a range and still count as inside: rounding. [1]
ROUNDING = 1e-9
#: Sizes of the kernel tables as people call them.
SIZE_WORDS = {
    "num_gpus": "ranks",
    "ep_size": "ranks",
    "node_num": "domains",
    "num_tokens": "tokens",
    "width": "expert width",
    "num_experts": "experts",
    "message_bytes": "bytes",
    "kv_len": "context",
    "seq_len": "prompt",
}
#: What stands between two statements about a design.
BETWEEN = "; "


@dataclass(frozen=True, eq=False, kw_only=True)
class Breach:
    """One end of a range that an operator passes in some designs; arrays have shape (rows,)."""

    size: str
    above: bool
    end: float  # of the range
    value: Floats
    where: Mask

    @property
    def doublings(self) -> Floats:
        """How far outside; 0 where the range is kept. [1]"""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.where, np.abs(np.log2(self.value / self.end)), 0.0)


def breaches(operator: Contribution) -> list[Breach]:
    """Ends of ranges that an operator passes; of several fits that could speak, the one that it leaves least counts."""
    if operator.cut_of is None:
        return _breaches(operator)
    whole, rows = operator.cut_of  # each row passes what it passes, whichever stand beside it
    if whole not in _KNOWN:
        _KNOWN[whole] = _breaches(whole)
    cut = [replace(each, value=each.value[rows], where=each.where[rows]) for each in _KNOWN[whole]]
    return [each for each in cut if each.where.any()]


#: Of operators that were cut into rows, as long as there are such rows.
_KNOWN: WeakKeyDictionary[Contribution, list[Breach]] = WeakKeyDictionary()


def _breaches(operator: Contribution) -> list[Breach]:
    measured = [fit for fit in operator.fits if fit.engine != ASSUMED]
    least, choice = np.full(operator.rows, np.inf), np.full(operator.rows, -1)
    found: list[list[Breach]] = []
    for number, (fit, ranges) in enumerate(_ranges(measured)):
        mine = [
            breach
            for size, ends in ranges.items()
            if size in operator.sizes
            for breach in _passed(operator, size, ends)
        ]
        far = sum((breach.doublings for breach in mine), start=np.zeros(operator.rows))
        far = np.where(_speaks(fit, operator), far, np.inf)
        choice, least = np.where(far < least, number, choice), np.minimum(far, least)
        found.append(mine)
    kept = [(breach, breach.where & (choice == number)) for number, mine in enumerate(found) for breach in mine]
    return [
        Breach(size=breach.size, above=breach.above, end=breach.end, value=breach.value, where=where)
        for breach, where in kept
        if where.any()
    ]


def outside_calibration(points: pd.DataFrame, *, origin: Origin = SHIPPED) -> pd.Series:
    """Describe in words where a design leaves the range of its fits or uses inherited ones; "" where it does not.

    Such as ``experts: expert width 32 below 64; all-reduce: ranks 16 above 8; inherited from gb200_nvl72: GEMM``.

    Parameters
    ----------
    points : DataFrame
        A table of points or a frontier (``points.COLUMNS``), any modes and cases.
    origin : Origin
        What the rows were made with: systems of one's own, a distribution of lengths. Rows need not be
        exact: those of a distribution that nothing names are judged at its means.

    Returns
    -------
    Series
        Index of ``points``. Operators of less than 1 % of every pass are left out. Under a distribution of lengths what
        an operator takes beyond the range counts, over all lengths; told is the length that takes most of it. The words
        of a case do not depend on other cases in the table.

    Raises
    ------
    InputError, UnknownNameError
        As ``rescore``.

    Examples
    --------
    Prompts of 100,000 tokens are longer than any that prefill attention was measured at:

    >>> import disagg_sim as ds
    >>> options = ds.Colocation(batch=(1,), prefill_batch=(1,))
    >>> at, mapping = ds.setup("llama_3_1_8b", "h100_sxm", "fp8"), ds.Sharding(tp_attn=8, tp_ffn=8)
    >>> words = outside_calibration(ds.colocated(at, mapping, ds.lengths(100_000, 1000), options=options))[0]
    >>> [each.partition(" above ")[0] for each in words.split(BETWEEN)]
    ['GEMM: m 1e+05', 'prefill attention: prompt 1e+05']
    """
    every = list(designs_of(points, replace(origin, exact=False)))
    return words_outside(points, every, timed_contributions(every, doubtful))


def words_outside(
    points: pd.DataFrame, every: Sequence[Designs], timed: Sequence[tuple[Times, Sequence[Contribution]]]
) -> pd.Series:
    """Words of ``outside_calibration`` for a table whose designs have these times and ``doubtful`` operators."""
    words = np.full(len(points), "", dtype=object)
    case = pd.factorize(points["case"])[0] if "case" in points else np.zeros(len(points), dtype=np.int64)
    for designs, (times, parts) in zip(every, timed, strict=True):
        for number in np.unique(case[designs.rows]).tolist():
            mine = case[designs.rows] == number
            own = [part.of_rows(mine) for part in parts]
            taken = [part for part in own if any(np.any(seconds) for seconds in part.seconds)]
            words[designs.rows[mine]] = words_of(taken, _of_rows(times, mine))
    return pd.Series(words, index=points.index, name=OUTSIDE)


def _of_rows(times: Times, mine: Mask) -> Times:
    return Times(*(part[mine] for part in times))


def doubtful(operator: Contribution) -> bool:
    """Whether an operator leaves the range of its fits in any design, or has inherited ones."""
    return any(fit.inherited_from for fit in operator.fits) or bool(breaches(operator))


def words_of(parts: Sequence[Contribution], times: Times) -> list[str]:
    """Describe where designs leave the range of their fits, row by row, from operators and times [s] that are known."""
    rows = np.size(times.step)
    passed: dict[tuple[str, str, bool, float], Floats] = {}
    inherited: dict[str, dict[str, Mask]] = {}
    by_operator: dict[tuple[Any, ...], list[Contribution]] = defaultdict(list)  # one part for every length of prompts
    for part in parts:
        by_operator[part.phase, *part.key].append(part)
    for same in by_operator.values():
        operator, matters = same[0], _matters([each.seconds for each in same], times)
        for far in _passed_by_any(same):
            key = (operator.label, SIZE_WORDS.get(far.size, far.size), far.above, far.end)
            value = np.where(_matters(far.seconds, times), far.value, np.nan)
            worst = np.fmax if far.above else np.fmin
            passed[key] = worst(passed.get(key, np.full(rows, np.nan)), value)
        for system in dict.fromkeys(fit.inherited_from for fit in operator.fits if fit.inherited_from):
            kinds = inherited.setdefault(system, {})
            kinds[operator.label] = kinds.get(operator.label, np.zeros(rows, dtype=bool)) | matters
    told: list[list[str]] = [[] for _ in range(rows)]
    for (label, size, above, end), values in passed.items():
        for row in np.flatnonzero(np.isfinite(values)).tolist():
            told[row].append(f"{label}: {size} {values[row]:.4g} {'above' if above else 'below'} {end:.4g}")
    for system, kinds in inherited.items():
        for row in range(rows):
            mine = [label for label, mask in kinds.items() if mask[row]]
            if mine:
                told[row].append(f"inherited from {system}: {', '.join(mine)}")
    return [BETWEEN.join(each) for each in told]


@dataclass
class _End:
    """One end of a range that an operator passes at some lengths of the prompts; arrays have shape (rows,)."""

    size: str
    above: bool
    end: float  # of the range
    value: Floats  # at the length at which most time goes by beyond it
    most: Floats  # of that time [s]
    seconds: list[Times]  # that the operator takes beyond it, a length each


def _passed_by_any(same: Sequence[Contribution]) -> list[_End]:
    """Ends that an operator passes at any length."""
    found: dict[tuple[str, bool, float], _End] = {}
    for operator in same:
        for breach in breaches(operator):
            beyond = Times(*(np.where(breach.where, part, 0.0) for part in operator.seconds))
            most, key = sum(beyond, start=np.zeros(operator.rows)), (breach.size, breach.above, breach.end)
            known = found.setdefault(key, _End(*key, value=breach.value, most=most, seconds=[]))
            known.value = np.where(most > known.most, breach.value, known.value)
            known.most = np.maximum(most, known.most)
            known.seconds.append(beyond)
    return list(found.values())


def _matters(taken: Sequence[Times], times: Times) -> Mask:
    """Where times that add up are worth telling in any pass."""
    added = [sum(parts[1:], start=parts[0]) for parts in zip(*taken, strict=True)]
    shares = [
        np.divide(part, whole, out=np.zeros(np.shape(part)), where=np.asarray(whole) > 0)
        for part, whole in zip(added, times, strict=True)
    ]
    return np.asarray(np.max(np.broadcast_arrays(*shares), axis=0) >= WORTH_TELLING)


def _ranges(fits: Sequence[Fit]) -> Iterator[tuple[Fit, dict[str, tuple[float, float]]]]:
    """Fits with their ranges; fits of one group size each make one range together, between which is interpolated."""
    for fit in fits:
        if fit.valid:
            yield fit, {size: (low, high) for size, low, high in fit.valid}
    counted = [fit for fit in fits if isinstance(fit, CollectiveFit) and not fit.valid and fit.gpus]
    if counted:
        yield counted[0], {"num_gpus": (min(f.gpus for f in counted), max(f.gpus for f in counted))}
    for link in ("nvlink", "nic"):
        sent = [fit for fit in fits if isinstance(fit, AllToAllFit) and not fit.valid and fit.link == link]
        if sent:
            groups = [fit.nodes if link == "nic" else fit.ranks for fit in sent]
            yield sent[0], {"node_num" if link == "nic" else "ep_size": (min(groups), max(groups))}
    if not counted:
        for fit in fits:
            if not fit.valid and not isinstance(fit, CollectiveFit | AllToAllFit):
                yield fit, {}


def _speaks(fit: Fit, operator: Contribution) -> Mask:
    """Whether a fit applies: an exchange fit covers NVLink or the NIC, not both."""
    if isinstance(fit, AllToAllFit) and "node_num" in operator.sizes:
        across = operator.sizes["node_num"][1] > 1
        return np.asarray(across if fit.link == "nic" else ~across)
    return np.ones(operator.rows, dtype=bool)


def _passed(operator: Contribution, size: str, ends: tuple[float, float]) -> Iterator[Breach]:
    """Below a range that begins at 1 there is nothing to extrapolate: means of counts may be fractions."""
    (low, high), (least, largest) = ends, operator.sizes[size]
    if low > 1 and (below := least < low * (1.0 - ROUNDING)).any():
        yield Breach(size=size, above=False, end=low, value=least, where=below)
    if (above := largest > high * (1.0 + ROUNDING)).any():
        yield Breach(size=size, above=True, end=high, value=largest, where=above)
