"""List the techniques, an entry each: what it does, how it is asked for, what it excludes, and how it acts.

An entry either has ``keys``, which only tell where its own code asks for it, or an ``Ask``. Of an ``Ask`` the registry
makes everything: the key in sweep and scenario files, the option of commands, the argument of agents' tools with its
schema. The value then travels in ``Setup.techniques`` and in a column of tables. Where several techniques lengthen a
step, their factors multiply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations, product
from typing import Any, NamedTuple, TypeVar

from disagg_sim.errors import InputError, quoted, unknown_word
from disagg_sim.question import Ask, QuestionField, fields_of

Q = TypeVar("Q")

#: Techniques that are on, by name, each with its value, in the order of the registry.
Chosen = tuple[tuple[str, Any], ...]
#: What a table or a case says where all techniques are off.
NONE = "none"


class Keys(NamedTuple):
    """Where a technique is asked for: options of plan and explain, keys of sweep and scenario files."""

    plan: str
    sweep: str
    explain: str
    simulate: str


class Clash(NamedTuple):
    """Why a technique does not go with another."""

    other: str  # its name
    why: str  # the reason, and what is allowed; printed after what was asked for and a colon
    part: str = ""  # the part of the other that is refused, where the rest of it is not; "" = all of it
    where: tuple[str, ...] = Keys._fields  # commands in which they do not go together


@dataclass(frozen=True, kw_only=True, eq=False)
class Technique:
    """An optional effect on serving; off, it changes nothing."""

    name: str  # of its folder, and of its key where it has an ``Ask``
    title: str  # what it does, in a sentence
    excludes: tuple[Clash, ...] = ()
    keys: Keys | None = None  # where it is asked for; None = by ``ask``
    ask: Ask | None = None  # of its value; None = by ``keys``
    kind: type = float  # of its value
    #: Takes its value and the sequences that a step decodes, over all DP ranks; returns how many times as long the step
    #: takes [1]. It is not called for steps that only prefill: these keep their time.
    stretch: Callable[[Any, Any], Any] | None = None

    @property
    def asked(self) -> Keys:
        """Where it is asked for."""
        return self.keys or Keys(self.field.flag, self.name, self.field.flag, self.name)

    @property
    def field(self) -> QuestionField:
        """The field of a question that asks for it; None = off."""
        assert self.ask is not None
        return QuestionField(self.name, self.kind | None, self.ask, None)

    def value(self, given: str) -> Any:
        """Read a value that a table or a notebook gives."""
        assert self.ask is not None
        try:
            read = given if self.kind is not int else self.kind(given)
            return read if self.kind is str else self.kind(self.ask.read(read))
        except (ValueError, InputError) as error:
            why = str(error).strip() if isinstance(error, InputError) else f"{quoted(given)} is no {self.kind.__name__}"
            raise InputError(f"technique {self.name}: {why}") from None


#: What neither of the further pools goes with: that of encode, that of feed-forward layers.
_FURTHER = (
    Clash("prefill_delay", "only co-located instances hold prompts back; use 'tuned'", where=("plan",)),
    Clash("availability", "sweeps count no spares of further pools; allowed: none, or plan", where=("sweep",)),
)


def _not_explained(*others: str) -> Iterator[Clash]:
    for other in others:
        yield Clash(other, "only prefill, decode and instances of both take it", where=("explain",))


#: In the order in which they act.
TECHNIQUES: tuple[Technique, ...] = (
    Technique(
        name="prefix",
        title="Cached beginnings of prompts are not computed again.",
        keys=Keys("--cached", "traffic: {cached}", "--cached", "run: {prefix_cache}"),
    ),
    Technique(
        name="encode",
        title="A pool of its own encodes images before prefill.",
        excludes=(
            *_FURTHER,
            *_not_explained("prefix", "context", "experts", "ranks", "speculation", "prefill_delay", "availability"),
        ),
        keys=Keys("--images", "images", "--images", "encode of a deployment"),
    ),
    Technique(
        name="context",
        title="GPUs share the tokens of a sequence, in decode (DCP) or in prefill (PCP).",
        keys=Keys("--max-dcp, --max-pcp", "limits: {max_dcp, max_pcp}", "--dcp, --pcp", "dcp, pcp of instances"),
    ),
    Technique(
        name="experts",
        title="Experts are unequally popular, and copies even them out.",
        keys=Keys(
            "--expert-skew, --max-redundant-experts",
            "expert_skew, limits: {max_redundant_experts}",
            "--profile measured_skew0.5",
            "profile: measured_skew0.5, redundant_slots of instances",
        ),
    ),
    Technique(
        name="ranks",
        title="A step waits for the attention-DP rank that has most to do.",
        keys=Keys("--rank-imbalance", "rank_imbalance", "--rank-imbalance", "always played"),
    ),
    Technique(
        name="speculation",
        title="A step verifies draft tokens, and emits those that are accepted.",
        keys=Keys("--speculate", "speculation", "--speculate", "speculation"),
    ),
    Technique(
        name="prefill_delay",
        title="Prompts wait until every attention rank has one.",
        keys=Keys("--hold-prompts", "hold_steps", "--hold-prompts", "hold_steps of instances"),
    ),
    Technique(
        name="split",
        title="Attention and feed-forward layers decode on GPUs of their own.",
        excludes=(
            Clash(
                "speculation",
                "steps over attention and feed-forward GPUs have no drafts, as no system places a drafter on them; "
                "use 'off' in a command, 'none' in a file",
            ),
            Clash(
                "context",
                "attention GPUs beside a feed-forward pool have tp and dp alone, and share no tokens; allowed: 1, or "
                "whole decode instances",
                part="DCP",
                where=("plan", "sweep", "simulate"),
            ),
            Clash(
                "experts",
                "a feed-forward pool has the fewest copies that fill its ranks; allowed: 0, or whole decode instances",
                part="copies",
                where=("plan", "sweep", "simulate"),
            ),
            *_FURTHER,
            *_not_explained("prefix", "encode", "context", "ranks", "prefill_delay", "availability"),
        ),
        keys=Keys("--pools", "pools", "--phase attention_ffn", "ffn of instances"),
    ),
    Technique(
        name="availability",
        title="GPUs fail, and spares take over.",
        keys=Keys("--availability", "availability", "--availability", "run: {failures}"),
    ),
)


def technique_named(name: str) -> Technique:
    """Find a technique by its name."""
    known = {each.name: each for each in TECHNIQUES}
    if name not in known:
        raise InputError(f"technique {unknown_word(name, tuple(known))}")
    return known[name]


def exclusions(one: str, other: str, where: str = "") -> Iterator[Clash]:
    """List why two techniques do not go together, in any command or in one of ``Keys``."""
    for first, second in ((one, other), (other, one)):
        for each in technique_named(first).excludes:
            if each.other == second and (not where or where in each.where):
                yield each


def clashes(on: Mapping[str, str], where: str) -> Iterator[str]:
    """Say which techniques do not go together in a command.

    ``on`` holds the names of those that are on, each with what asks for it.
    """
    found = (each for one, other in combinations(on, 2) for each in exclusions(one, other, where))
    yield from dict.fromkeys(f"{on[each.other]}: {each.why}" for each in found)


def asked_techniques() -> tuple[Technique, ...]:
    """List the techniques whose keys the registry makes."""
    return tuple(each for each in TECHNIQUES if each.ask is not None)


def asked_fields(question: type) -> Iterator[QuestionField]:
    """List the fields of a question, with those of techniques where it takes any."""
    yield from fields_of(question)
    if any(each.name == "techniques" for each in fields(question)):
        yield from (each.field for each in asked_techniques())


def question_of(question: type[Q], given: Mapping[str, Any]) -> Q:
    """Make a question of the values of ``asked_fields``."""
    named = {each.name for each in asked_techniques()}
    found = question(**{name: value for name, value in given.items() if name not in named})
    chosen = words_of({name: given[name] for name in given if name in named})
    return replace(found, techniques=chosen) if chosen else found  # type: ignore[type-var]


def words_of(values: Mapping[str, Any]) -> str:
    """Write the values of techniques, None = off: ``crowding=64``; "" where all are off."""
    on = {name: value for name, value in values.items() if value is not None}
    return ", ".join(f"{each.name}={on[each.name]}" for each in asked_techniques() if each.name in on)


def combined(axes: Mapping[str, Sequence[Any]]) -> tuple[str, ...]:
    """Write every combination of values; that with all techniques off is ``none``, or "" where it is the only one."""
    words = tuple(words_of(dict(zip(axes, values, strict=True))) for values in product(*axes.values()))
    return words if words == ("",) else tuple(each or NONE for each in words)


def chosen_in(words: str) -> Chosen:
    """Read techniques and their values, such as ``crowding=64``; "" and ``none`` say that all are off."""
    if not isinstance(words, str):
        raise InputError(f"techniques {words!r}; allowed: text such as name=value, or {NONE}")
    known, found = {each.name: each for each in asked_techniques()}, {}
    for part in filter(None, (each.strip() for each in words.split(","))):
        name, _, value = (each.strip() for each in part.partition("="))
        if name == NONE:
            continue
        if name in found:
            raise InputError(f"technique {name} is given twice; allowed: one value")
        if name not in known:
            raise InputError(f"technique {unknown_word(name, (*known, NONE))}")
        found[name] = known[name].value(value)
    return tuple((name, found[name]) for name in known if name in found)


def stretch_of(chosen: Chosen, sequences: Any) -> Any:
    """Find how many times as long techniques make a step of so many sequences in decode. [1]"""
    ratio = 1.0
    for name, value in chosen:
        if (hook := technique_named(name).stretch) is not None:
            ratio = ratio * hook(value, sequences)
    return ratio
