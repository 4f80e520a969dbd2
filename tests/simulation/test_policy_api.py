"""Policies of the package ask for what they want, as a policy file of a user does; their options."""

import ast
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

import disagg_sim
from disagg_sim.errors import InputError
from disagg_sim.simulation.options import Option, check_options, option, options_of
from disagg_sim.simulation.policies.registry import policies, title_of
from disagg_sim.simulation.run_options import RunOptions

POLICIES = Path(disagg_sim.__file__).parent / "simulation" / "policies"
#: What docs/policies.md gives a policy, and of the kernel columns, constants and functions that only read.
API = {"policy", "wishes", "view", "site", "options", "faults", "instances", "instance_variants", "clients"}
READ = {
    **dict.fromkeys(("addresses", "compiled", "layout", "ranking")),
    "ranks": {"uncounted"},
    "runs": {"steps_time"},
    "step_table": {"StepTable"},
    "times": {"aware_prefill", "step_time"},
}
#: Names of every ``NamedTuple``, which are public.
TUPLES = {"_replace", "_fields", "_asdict"}


def nodes() -> Iterator[tuple[str, ast.AST]]:
    for path in sorted(POLICIES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            yield f"{path.relative_to(POLICIES)}:{getattr(node, 'lineno', 0)}", node


def allowed(module: str, name: str) -> bool:
    room, _, rest = module.removeprefix("disagg_sim.simulation.").partition(".")
    if room != "kernel":
        return room == "policies" or room in API
    return rest in READ and (READ[rest] is None or name in READ[rest])


def root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def test_policies_import_what_the_policy_api_has():
    seen = [
        (place, node.module, each.name)
        for place, node in nodes()
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("disagg_sim.simulation.")
        for each in node.names
    ]
    assert len(seen) > 100
    assert [each for each in seen if not allowed(*each[1:])] == []


def test_policies_read_no_private_name_of_others_and_write_into_no_view():
    private, written, attributes = [], [], 0
    for place, node in nodes():
        if isinstance(node, ast.Attribute):
            attributes += 1
            hidden = node.attr.startswith("_") and not node.attr.startswith("__") and node.attr not in TUPLES
            if hidden and not (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}):
                private.append((place, node.attr))
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            written += [place for each in targets if not isinstance(each, ast.Name) and root(each) == "view"]
    assert attributes > 1000
    assert private == written == []


OWNERS = {**policies(), "run": RunOptions}

EVERY_OPTION = [(owner, name, known) for owner in OWNERS.values() for name, known in options_of(owner).items()]


def just_outside(known: Option) -> list[object]:
    """Values next to those that an option takes, and of another kind."""
    if isinstance(known.default, bool):
        return [1, "true"]
    if isinstance(known.default, str):
        return [f"{known.default}x", 0]
    whole = isinstance(known.default, int)
    below = known.low if known.above else known.low - 1 if whole else math.nextafter(known.low, -math.inf)
    over = known.high + 1 if whole else math.nextafter(known.high, math.inf)
    outside = [below, math.nan, -math.inf, "many", True]
    return outside + ([known.low + 0.5] if whole else []) + ([over] if not known.infinite else [])


def test_every_option_says_what_it_means_and_takes_its_default():
    for owner, name, known in EVERY_OPTION:
        assert len(known.meaning) > 10, (owner, name)
        assert known.takes(known.default), (owner, name)
        assert known.allowed or known.default == "", (owner, name)
        if isinstance(known.default, int | float) and not isinstance(known.default, bool):
            assert known.low > -math.inf, f"{name} of {owner}: a number without a least value"
            assert known.unit == "s" or not name.endswith("_s"), (owner, name)
        if isinstance(known.default, str):
            assert known.default in known.choices, (owner, name)


def test_values_next_to_the_range_are_refused_in_one_line_that_names_it():
    for owner, name, known in EVERY_OPTION:
        for value in just_outside(known):
            with pytest.raises(InputError) as caught:
                owner(**{name: value})
            text = str(caught.value)
            assert text.startswith(f"{name} {value!r} is ")
            assert text.endswith(f"; allowed: {known.allowed}")
            assert "\n" not in text


@pytest.mark.parametrize(
    ("known", "allowed"),
    [
        (Option(default=8, low=1, high=64, unit="token"), "whole numbers from 1 to 64 token"),
        (Option(default=0.5, low=0.0, above=True, high=1.0), "above 0 to 1"),
        (Option(default=9.0, low=0.0, above=True, infinite=True, unit="s"), "above 0 s, or infinity"),
        (Option(default="a", choices=("a", "b")), "a, b"),
        (Option(default="any"), ""),
    ],
)
def test_a_range_in_words(known, allowed):
    assert known.allowed == allowed


def test_both_ends_of_a_range_are_inside():
    share = Option(default=0.5, low=0.0, high=1.0)
    assert share.takes(0)
    assert share.takes(1.0)
    assert not Option(default=0.5, low=0.0, above=True).takes(0)
    assert share.like_default(1) == 1.0
    assert isinstance(share.like_default(1), float)
    assert isinstance(Option(default=5).like_default(7.0), int)


@dataclass(frozen=True, kw_only=True)
class Plain:
    """A policy as a user may write it.

    With more below.
    """

    needs: ClassVar[tuple[str, ...]] = ("colocated",)
    tokens: int = 512
    share: float = option(0.5, "of the tokens", low=0.0, high=1.0)
    where: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Bare(Plain):
    rule: str = "any"


def test_a_plain_dataclass_has_options_of_which_the_default_is_known():
    known = options_of(Plain)
    assert list(known) == ["tokens", "share"]
    assert known["tokens"] == Option(default=512)
    assert known["tokens"].takes(-1)
    assert not known["tokens"].takes(0.5)
    check_options(Plain())
    with pytest.raises(InputError, match=r"^share 2 is out of range; allowed: from 0 to 1$"):
        check_options(Plain(share=2))


def test_a_title_is_the_first_line_that_somebody_wrote():
    assert title_of(Plain) == "A policy as a user may write it."
    assert title_of(Bare) == ""
    assert all(title_of(policy).endswith(".") for policy in policies().values())
