"""Options say what they mean and which values they take, and hold to it; nothing else has to know them."""

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest

from disagg_sim.errors import InputError
from disagg_sim.simulation.options import Option, check_options, option, options_of
from disagg_sim.simulation.policies.registry import policies, title_of
from disagg_sim.simulation.run_options import RunOptions

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
        (Option(default=8, low=1), "whole numbers from 1"),
        (Option(default=8, low=1, high=64, unit="token"), "whole numbers from 1 to 64 token"),
        (Option(default=0.5, low=0.0, above=True, high=1.0), "above 0 to 1"),
        (Option(default=9.0, low=0.0, above=True, infinite=True, unit="s"), "above 0 s, or infinity"),
        (Option(default=9.0), "numbers"),
        (Option(default=True), "true or false"),
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
