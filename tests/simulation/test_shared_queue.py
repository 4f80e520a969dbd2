"""The queue that all prefill instances share, worked out by hand: who takes which prompt, and when."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
from sites import SIMPLE, deployment, served

from disagg_sim.domain import Sharding
from disagg_sim.errors import PolicyError
from disagg_sim.simulation.kernel.layout import Mode
from disagg_sim.simulation.policies.loads import ByRole, least_decode
from disagg_sim.simulation.policy import Parts
from disagg_sim.simulation.records import Outcome
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.simulation.wishes import SHARED, Batch, Flip, Leg, Limits, Role, Start, Stop

TWO = deployment(prefill=2, decode=1)


@dataclass
class Pulled:
    """Prefill instances take a prompt when they have less than ``room`` tokens to compute."""

    needs: ClassVar[tuple[str, ...]] = ("prefill", "decode")
    room: int = 1
    mode: Mode = Mode.CHUNKED
    wishes: tuple = ()
    takes: bool = True
    delay_s: float = 0.0
    onward: int | None = None  # where requests go on; None = least loaded
    period_s: float = 0.05

    def build(self, site):
        self.seen, self.script = [], list(self.wishes)
        return Parts(
            start=site.instances(("prefill", Role.PREFILL), ("decode", Role.DECODE)),
            routing=self,
            steps=ByRole(prefill=Limits(mode=self.mode), decode=Limits()),
            roles=self if self.wishes else None,
            forming=self if self.takes else None,
        )

    def place(self, view, request):
        return Leg(SHARED, view.input_tokens[request] + 1, delay_s=self.delay_s)

    def proceed(self, view, request, origin):
        return Leg(least_decode(view, view.decode) if self.onward is None else self.onward)

    def form(self, view, instance, waiting):
        self.seen.append((view.now, instance, waiting, view.shared_requests, view.shared_prompt_tokens))
        return Batch(waiting[:1] if view.queued_prompt_tokens[instance] < self.room else ())

    def flips(self, view):
        return self.script.pop(0) if self.script else ()


def run(requests, policy, served_by=TWO, **more):
    return served(requests, policy, served_by, table=SIMPLE, **more).requests


@pytest.mark.parametrize("mode", [Mode.CHUNKED, Mode.MANUAL])
def test_the_instance_that_is_free_first_takes_the_next_prompt(mode):
    """900 tokens take 100 ms on instance 0; instance 1 does the three of 100 tokens meanwhile, 20 ms each."""
    r = run([(0.0, 900, 2), (0.0, 100, 2), (0.0, 100, 2), (0.0, 100, 2)], Pulled(mode=mode))
    assert r.prefill_instance.tolist() == [0, 1, 1, 1]
    assert r.first_token_s.tolist() == pytest.approx([0.10, 0.02, 0.04, 0.06])


def test_an_instance_takes_prompts_while_it_has_room():
    """Room for 250 tokens: 100 + 100 + 100 in one step after the first, of 10 ms and 30 ms."""
    requests = [(0.0, 500, 2)] + [(0.01, 100, 2)] * 4
    r = run(requests, Pulled(room=250), deployment(prefill=1, decode=1))
    assert r.first_token_s.tolist() == pytest.approx([0.06, 0.10, 0.10, 0.10, 0.12])


def test_the_instance_that_has_waited_longest_is_asked_first():
    """Instance 0 takes the first prompt and is free again at 20 ms; the second goes to 1, which never had one."""
    assert run([(0.0, 100, 2), (0.1, 100, 2), (0.2, 100, 2)], Pulled()).prefill_instance.tolist() == [0, 1, 0]


def test_the_view_counts_what_waits_for_any_instance():
    policy = Pulled()
    run([(0.0, 900, 2), (0.0, 800, 2), (0.05, 100, 2), (0.06, 50, 2)], policy)
    at = next(look for look in policy.seen if look[0] == pytest.approx(0.09))
    assert at == (pytest.approx(0.09), 1, (2, 3), 2, 150)


def test_an_instance_that_turns_to_prefill_takes_of_the_queue_at_once():
    """The only prefill instance is busy for 1.01 s; a decode instance turns at 50 ms and takes the second prompt."""
    wishes = ((Flip(1, Role.PREFILL, "help"),),)
    r = run([(0.0, 2000, 2), (0.0, 100, 2)], Pulled(wishes=wishes), deployment(prefill=1, decode=2))
    assert r.prefill_instance.tolist() == [0, 1]
    assert r.first_token_s[1] == pytest.approx(0.05 + 0.02)


def test_an_instance_that_starts_takes_of_the_queue_and_one_that_stops_takes_no_more():
    wishes = ((Stop(1, "spare"), Start(Sharding(), Role.PREFILL, "burst")),)
    requests = [(0.06, 2000, 2), (0.06, 100, 2), (0.06, 100, 2)]
    room = deployment(prefill=2, decode=1, colocated=1)
    r = run(requests, Pulled(wishes=wishes), room, options=RunOptions(start_up_s=0.1))
    assert r.prefill_instance.tolist() == [0, 3, 3]
    assert r.prefill_start_s[1] == pytest.approx(0.15)


def test_a_prompt_that_no_prefill_instance_holds_is_rejected():
    r = run([(0.0, 1650, 2), (0.0, 100, 2)], Pulled(), blocks=100)
    assert r.status.tolist() == [Outcome.REJECTED, Outcome.COMPLETED]


def test_prompts_that_nobody_takes_stay_unfinished():
    r = run([(0.0, 100, 2)], Pulled(room=0))
    assert r.status.tolist() == [Outcome.UNFINISHED]


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (Pulled(takes=False), "nothing takes prompts of the shared queue: it forms no batches"),
        (Pulled(delay_s=0.1), "its delay_s is 0.1; allowed: from 0 s, and 0 s in the shared queue"),
        (Pulled(onward=SHARED), "request 0 on instance -2 is impossible: there is no such instance"),
    ],
)
def test_what_cannot_be_is_told(policy, said):
    with pytest.raises(PolicyError, match=said):
        run([(0.0, 100, 2)], policy)
