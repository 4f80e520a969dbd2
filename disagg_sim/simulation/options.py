"""Declare options of serving policies and runs: default, meaning, unit and range at the field.

``option(2048, "tokens of one step", unit="token", low=1, high=MOST_TOKENS)`` makes a field of a dataclass. Checks,
scenarios and ``disagg-sim specs list policies`` all read the same ``Option``. A dataclass with plain defaults has
options, too; only their defaults are known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any, TypeVar

from disagg_sim.errors import InputError, as_float, nearest, quoted

Plain = TypeVar("Plain", bool, int, float, str)

#: Most sequences of an instance: a step table holds a row for each number of them. [1]
MOST_SEQUENCES = 65_536
#: Most tokens of a step or a batch: above every context limit, far below where counts of tokens overflow. [token]
MOST_TOKENS = 2**24
#: Most of whatever else is counted: more is a slip of the pen. [1]
MOST = 10**9
#: Longest time out of service: 30 years are a slip of the pen, too. [s]
LONGEST_S = 1e9
#: Least time between two looks, of a policy or of the samples: shorter than the steps that they look at. [s]
LEAST_PERIOD_S = 0.001
#: Most samples of a run: some 0.4 GB, taken in a minute. [1]
MOST_SAMPLES = 10**6
#: What is kept of the records of requests: see ``RunOptions.records``.
RECORDS = FULL, STREAM, NONE = "full", "stream", "none"
#: Most looks of a policy in a run: 10 minutes or so at 50 us each; two months at a look every half second. [1]
MOST_LOOKS = 10**7
#: Looks of a policy in a row at which nothing but prompts in the shared queue is left, before the run ends: no instance
#: takes them, as after failures for good, and a policy that could still start one has had time to do so. [1]
MOST_IDLE_LOOKS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option: its meaning, and its allowed values, which have the type of the default."""

    default: bool | int | float | str
    meaning: str = ""  # empty of a plain field of a user's own policy
    unit: str = ""
    low: float = -math.inf  # least value of a number
    above: bool = False  # whether a value must lie above ``low``
    high: float = math.inf  # largest value of a number
    infinite: bool = False  # whether a number without end is a value
    choices: tuple[str, ...] = ()  # of a text; empty = any text

    @property
    def allowed(self) -> str:
        """The values that it takes, in words; empty where every value of its kind is one."""
        if isinstance(self.default, bool):
            return "true or false"
        if isinstance(self.default, str):
            return ", ".join(self.choices)
        bounds = [f"{'above' if self.above else 'from'} {self.low:.12g}"] if self.low > -math.inf else []
        if self.high < math.inf:
            bounds.append(f"to {self.high:.12g}")
        kind = "whole numbers" if isinstance(self.default, int) else "numbers"
        words = " ".join([*([kind] if isinstance(self.default, int) or not bounds else []), *bounds])
        return f"{words}{' ' + self.unit if self.unit else ''}{', or infinity' if self.infinite else ''}"

    def takes(self, value: object) -> bool:
        """Whether it is a value of this option."""
        if isinstance(self.default, bool):
            return isinstance(value, bool)
        if isinstance(self.default, str):
            return isinstance(value, str) and (not self.choices or value in self.choices)
        if isinstance(value, bool) or not isinstance(value, Real):
            return False
        number = as_float(value)
        if math.isinf(number):
            return self.infinite and number > 0
        whole = not isinstance(self.default, int) or number.is_integer()
        return whole and self.low <= number <= self.high and not (self.above and number == self.low)

    def fault(self, value: object) -> str:
        """Describe what is wrong with a value and what is allowed; empty for an allowed value."""
        if self.takes(value):
            return ""
        if self.choices:
            return f"{quoted(value)} is unknown{nearest(value, self.choices)}; allowed: {self.allowed}"
        return f"{quoted(value)} is out of range; allowed: {self.allowed or 'a text'}"

    def like_default(self, value: Any) -> Any:
        """A value that it takes, of the type of its default: 5 as 5.0, 2048.0 as 2048."""
        return type(self.default)(value)


def option(
    default: Plain,
    meaning: str,
    *,
    unit: str = "",
    low: float = -math.inf,
    above: bool = False,
    high: float = math.inf,
    infinite: bool = False,
    choices: tuple[str, ...] = (),
) -> Plain:
    """A field of a dataclass, with its meaning; see ``Option``.

    Parameters
    ----------
    default
        Value where none is given.
    meaning, unit
        What ``specs show policy`` prints of it; "" = no unit.
    low, high
        Smallest and largest value, in that unit.
    above
        Whether the value must be above ``low``.
    infinite
        Whether infinity is allowed, too.
    choices
        Allowed words; () = no choice of words.

    Returns
    -------
    object
        The field, for the body of the dataclass.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Mine:
    ...     period_s: float = option(5.0, "time between two decisions", unit="s", low=0.0, above=True)
    >>> Mine().period_s
    5.0
    """
    known = Option(
        default=default, meaning=meaning, unit=unit, low=low, above=above, high=high, infinite=infinite, choices=choices
    )
    made: Plain = field(default=default, metadata={Option: known})
    return made


def options_of(owner: Any) -> dict[str, Option]:
    """List the options of a dataclass or one of its objects: its fields whose default is a plain value."""
    found = {}
    for each in fields(owner):
        if (known := each.metadata.get(Option)) is not None:
            found[each.name] = known
        elif isinstance(each.default, bool | int | float | str):
            found[each.name] = Option(default=each.default)
    return found


def check_options(chosen: Any) -> None:
    """``InputError`` for the first option of a dataclass object whose value is out of range.

    Parameters
    ----------
    chosen
        Object of a dataclass with fields of ``option``; others are not checked.

    Returns
    -------
    None
        Where all are in range.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Mine:
    ...     period_s: float = option(5.0, "time between two decisions", unit="s", low=0.0, above=True)
    >>> check_options(Mine(period_s=0.0))
    Traceback (most recent call last):
    disagg_sim.errors.InputError: period_s ...
    """
    for name, known in options_of(chosen).items():
        if fault := known.fault(getattr(chosen, name)):
            raise InputError(f"{name} {fault}")


class Checked:
    """Base of a dataclass of options: ``InputError`` for the first value that is out of range."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """See ``check_options``."""
        check_options(self)


def token_budget_option(meaning: str = "decodes and prefill of one step of an attention rank") -> int:
    """Tokens of one step. [token]"""
    return option(0, f"{meaning}; 0: as the engine's scheduler", unit="token", low=0, high=MOST_TOKENS)


def max_sequences_option(meaning: str = "most sequences of an attention rank, running and in prefill") -> int:
    """Sequences of an instance. [1]"""
    return option(0, f"{meaning}; 0: as the engine's scheduler", low=0, high=MOST_SEQUENCES)


def prompts_per_step_option() -> int:
    """Prompts that share one step. [1]"""
    return option(
        MOST, "most prompts that share one step of an attention rank; 1: one after the other", low=1, high=MOST
    )


#: Where prompts wait for prefill: in one queue, from which instances take them, or each at an instance.
QUEUES = ("shared", "instances")


def queue_option() -> str:
    """Where prompts wait."""
    return option(
        "shared", "where prompts wait: in one queue, from which prefill instances take them, or at one", choices=QUEUES
    )


def least_option() -> int:
    """Instances that no planner stops. [1]"""
    return option(1, "least number of instances of each pool", low=1, high=MOST)


def headroom_option() -> float:
    """Share of the forecast load that sizes leave free. [1]"""
    return option(
        0.0, "by what the forecast load is raised before sizes are taken; 0.2: by a fifth", low=0.0, high=10.0
    )


def drain_option() -> bool:
    """Whether requests outlive the stop of their instance."""
    return option(True, "a stopped instance finishes its requests; false: they fail")


def period_option(default: float, meaning: str) -> float:
    """Time between two checks or decisions, or of one observation. [s]"""
    return option(default, meaning, unit="s", low=LEAST_PERIOD_S)
