"""Bugs of a user's own policy: one line with the policy and the place, what was served, the error as the cause."""

import math
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from sites import SIMPLE, deployment, served

from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError, PolicyError
from disagg_sim.simulation.kernel.layout import Mode
from disagg_sim.simulation.policies.fixed import Vllm
from disagg_sim.simulation.policies.loads import ByRole
from disagg_sim.simulation.policy import Parts, register
from disagg_sim.simulation.records import Outcome
from disagg_sim.simulation.wishes import Batch, Flip, Leg, Limits, Role, SetLimits, Start, Stop

HERE = Path(__file__).name
REQUESTS = [(0.0, 100, 5), (9.0, 100, 5)]
TWO = deployment(colocated=2)


class Router:
    """Asks two functions."""

    def __init__(self, place, proceed=None):
        self.placed, self.next = place, proceed

    def place(self, view, request):
        return self.placed(request)

    def proceed(self, view, request, origin):
        return self.next(request, origin)


class Plain:
    def limits(self, mapping, role):
        return Limits()


@dataclass(frozen=True)
class Mine:
    """Whole requests on instance 0, unless a test says otherwise."""

    needs: ClassVar[tuple[str, ...]] = ("colocated",)
    place: object = lambda request: Leg(0)
    proceed: object = None
    more: object = None

    def build(self, site):
        start = site.instances(("colocated", Role.BOTH))
        usual = {"start": start, "routing": Router(self.place, self.proceed), "steps": Plain()}
        return Parts(**{**usual, **(self.more or {})})


def fault(policy, requests=REQUESTS) -> PolicyError:
    with pytest.raises(PolicyError) as caught:
        served(requests, policy, TWO, table=SIMPLE)
    assert len(str(caught.value).splitlines()) == 1
    assert "'Mine'" in str(caught.value)
    return caught.value


def at_second(call):
    """The first request is served; ``call`` answers for the second."""
    return lambda request: call() if request else Leg(0)


def fails():
    return {}["no such key"]


def deeper(depth=0):
    return deeper(depth + 1)


def leaves():
    raise SystemExit


class Strange(BaseException):
    def __str__(self):
        raise ValueError


def strange():
    raise Strange


@pytest.mark.parametrize(
    ("call", "cause", "said"),
    [
        (fails, KeyError, "at 9 s: KeyError: 'no such key' ("),
        (deeper, RecursionError, "at 9 s: RecursionError: "),
        (leaves, SystemExit, "at 9 s: it called sys.exit() ("),
        (strange, Strange, "at 9 s: Strange ("),
    ],
)
def test_what_a_policy_raises_is_one_line_with_its_place_and_keeps_what_was_served(call, cause, said):
    error = fault(Mine(place=at_second(call)))
    assert said in str(error)
    line = call.__code__.co_firstlineno + (call.__name__ != "<lambda>")
    assert f"{HERE}:{line}" in str(error)
    assert isinstance(error.__cause__, cause)
    assert error.so_far.requests.status.tolist() == [Outcome.COMPLETED, Outcome.UNFINISHED]


def test_ctrl_c_while_a_policy_thinks_is_no_fault_of_it():
    def wait():
        os.kill(os.getpid(), signal.SIGINT)
        return Leg(0)

    with pytest.raises(KeyboardInterrupt):
        served(REQUESTS, Mine(place=at_second(wait)), TWO, table=SIMPLE)


def test_a_bug_of_this_package_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("disagg_sim.simulation.policies.fixed.Vllm.build", fails_in_build)
    with pytest.raises(KeyError):
        served(REQUESTS, Vllm(), TWO, table=SIMPLE)


def fails_in_build(self, site):
    return {}["no such key"]


LEGS = {
    "a text": (Leg("0"), "request 1 on instance '0' is impossible: its instance is '0', no whole number"),
    "too large": (Leg(10**30), "there is no such instance; known: 0 to 1"),
    "no tokens": (Leg(0, 0), "end at token 0"),
    "a number": (0, "0 is impossible: a place for request 1 has to be a Leg"),
    "no end": (Leg(0, until=math.nan), "its end is nan, no whole number of tokens"),
    "then nowhere": (Leg(0, until=50, then=77), "it goes on on instance 77, which is not there; known: 0 to 1"),
    "back in time": (Leg(0, delay_s=-1.0), "its delay_s is -1.0; allowed: from 0 s"),
    "a giant": (Leg("x" * 10**6), "(1,000,002 characters), no whole number"),
    "wishes that are no list": (Leg(0, wishes=7), "7 is impossible: wishes come in a list, which may be empty"),
}


@pytest.mark.parametrize("case", LEGS)
def test_a_leg_that_is_none_is_told_with_the_method_that_gave_it(case):
    leg, said = LEGS[case]
    error = fault(Mine(place=at_second(lambda: leg)))
    assert said in str(error)
    assert str(error).endswith(f"{HERE}:{Router.place.__code__.co_firstlineno}, in place)")
    assert error.so_far.requests.status.tolist() == [Outcome.COMPLETED, Outcome.UNFINISHED]


def test_whole_numbers_of_numpy_are_whole_numbers():
    policy = Mine(place=lambda request: Leg(np.int64(1), until=np.int64(101)), proceed=lambda *_: Leg(np.intp(0)))
    records = served(REQUESTS, policy, TWO, table=SIMPLE).requests
    assert records.status.tolist() == [Outcome.COMPLETED] * 2


def test_going_on_without_a_step_ahead_would_never_end():
    """The first leg ends at token 101 of 105; going on there up to the same token is no leg."""
    error = fault(Mine(place=lambda request: Leg(0, until=101), proceed=lambda request, origin: Leg(origin, until=101)))
    assert "it would end at token 101, and 101 tokens exist already" in str(error)
    assert str(error).endswith(", in proceed)")


WISHES = {
    "an instance as text": (Flip("a", Role.DECODE, "why"), "its instance is 'a', no whole number"),
    "no role": (Flip(0, 7, "why"), "its role is 7, no Role"),
    "no mapping": (Start(None, Role.BOTH, "why"), "its mapping is None, no Mapping"),
    "no reason": (Stop(0, None), "its reason is None, no text"),
    "no limits": (SetLimits(0, None, "why"), "None is no Limits"),
    "no tokens": (SetLimits(0, Limits(token_budget=0), "why"), "token_budget 0 is out of range; allowed: whole"),
    "no time": (SetLimits(0, Limits(step_limit_s=math.nan), "why"), "step_limit_s nan is out of range; allowed"),
    "what does not fit": (Start(Sharding(tp_attn=8, tp_ffn=8), Role.BOTH, "why"), "takes 8 GPUs, and 0 of 2 are free"),
}


@pytest.mark.parametrize("case", WISHES)
def test_a_wish_that_is_none_is_told(case):
    wish, said = WISHES[case]
    error = fault(Mine(place=at_second(lambda: Leg(0, wishes=(wish,)))))
    assert said in str(error)
    assert error.so_far.requests.status.tolist() == [Outcome.COMPLETED, Outcome.UNFINISHED]


class Clock:
    def __init__(self, period_s):
        self.period_s = period_s

    def flips(self, view):
        return ()


class Hasty:
    def limits(self, mapping, role):
        return Limits(token_budget=-5)


BUILDS = {
    "no routing": ({"routing": None}, "routing has no method place; routing has no method proceed"),
    "no steps": ({"steps": None}, "steps has no method limits"),
    "no instances": ({"start": ()}, "start is (); allowed: one (Sharding, Role) or more"),
    "no roles": ({"start": ((Sharding(), "both"),)}, "start holds (Sharding("),
    "no period": ({"roles": Clock(None)}, "period_s of roles is None, no number of seconds"),
    "limits below zero": ({"steps": Hasty()}, "limits of a both instance: token_budget -5 is out of range"),
}


@pytest.mark.parametrize("case", BUILDS)
def test_parts_that_are_none_are_told_before_the_run(case):
    more, said = BUILDS[case]
    error = fault(Mine(more=more))
    assert said in str(error)
    assert error.so_far is None


def test_build_has_to_return_parts():
    class Mine:
        needs = ("colocated",)

        def build(self, site):
            return None

    assert str(fault(Mine())) == "policy 'Mine': build has to return Parts, not None"


class Former:
    def form(self, view, instance, waiting):
        return [0]


def test_a_batch_that_is_none_is_told():
    manual = ByRole(prefill=Limits(mode=Mode.MANUAL), decode=Limits(mode=Mode.MANUAL))
    error = fault(Mine(more={"forming": Former(), "steps": manual}))
    assert "[0] is impossible: what to do on instance 0 has to be a Batch" in str(error)
    assert Batch(()).requests == ()


def test_a_policy_is_registered_as_the_dataclass_that_it_is():
    for change, said in (
        ({"needs": "colocated"}, "needs is 'colocated'; allowed: a tuple of some of prefill, decode, colocated, pairs"),
        ({"build": None}, "has no method build"),
        ({}, "Odd is not a dataclass; write @register above @dataclass"),
    ):
        with pytest.raises(InputError, match=said):
            register("odd")(type("Odd", (), {"needs": ("colocated",), "build": lambda self, site: None, **change}))
    with pytest.raises(InputError, match=r"'a\\nb' is not the name of a policy"):
        register("a\nb")(Mine)
    with pytest.raises(InputError, match="registered twice"):
        register("vllm")(Mine)
