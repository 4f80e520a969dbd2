"""What policies see cannot be written: not an attribute, not an element, and a policy that tries is told."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from sites import SIMPLE, deployment, served

from disagg_sim.errors import PolicyError
from disagg_sim.simulation.policies.registry import policy_named
from disagg_sim.simulation.view import ClusterView
from disagg_sim.simulation.wishes import Leg

POOLS = deployment(prefill=2, decode=2)
REQUESTS = [(0.1 * k, 100, 5) for k in range(5)]
#: Public names of a view; what it has beside them are questions, which change nothing.
QUESTIONS = {"cached_everywhere", "cached_tokens", "refresh", "starting", "table", "waiting_prompts", "window"}


class Looking:
    """Least load, and something else before every placement."""

    needs = ("prefill", "decode")

    def __init__(self, look):
        self.look = look

    def build(self, site):
        parts = policy_named("least_load").build(site)
        self.routing = parts.routing
        return replace(parts, routing=self)

    def place(self, view, request):
        self.look(view)
        return self.routing.place(view, request)

    def proceed(self, view, request, origin):
        return Leg(int(view.decode[0]))


@pytest.fixture(scope="module")
def names():
    """Of all that a view shows."""
    shown = []
    served(REQUESTS, Looking(lambda view: shown.append(set(dir(view)) | set(view.__dict__))), POOLS, table=SIMPLE)
    return sorted(name for name in shown[0] - QUESTIONS if not name.startswith("_"))


def test_all_of_the_view_is_looked_at_here(names):
    assert {"now", "order", "prefill", "queued_requests", "inst", "kernel", "site", "shared_requests"} <= set(names)
    assert set(dir(ClusterView)) >= QUESTIONS


def test_no_attribute_can_be_set_or_deleted(names):
    for name, done in product([*names, *sorted(QUESTIONS), "something_new"], ("written", "deleted")):

        def look(view, name=name, done=done):
            setattr(view, name, 0) if done == "written" else delattr(view, name)

        with pytest.raises(PolicyError, match=f"{name} of the view cannot be {done}: a policy reads it and returns"):
            served(REQUESTS, Looking(look), POOLS, table=SIMPLE)


def writable(found):
    """What of an attribute takes another value in its first place."""
    parts = [part for part in found if isinstance(part, np.ndarray)] if isinstance(found, tuple) else [found]
    for part in parts or [found]:
        try:
            part[0] = part[0]
        except (TypeError, ValueError):  # numpy, memory views and tuples say it in their own words
            continue
        yield part


def test_no_element_can_be_set(names):
    taken = []

    def look(view):
        taken.extend(name for name in names for _ in writable(getattr(view, name)))

    served(REQUESTS, Looking(look), POOLS, table=SIMPLE)
    assert not taken


def test_step_tables_cannot_be_written_either():
    found = []
    served(REQUESTS, Looking(lambda view: found.append(view.table(0))), POOLS, table=SIMPLE)
    assert not found[0].values.flags.writeable
    assert not found[0].head.flags.writeable


def test_a_policy_that_writes_is_told_with_its_line():
    def corrupt(view):
        view.running_tokens[0] = 10**9

    with pytest.raises(PolicyError, match=r"(?s)policy 'Looking' at 0 s.*read-only.*test_view.py:\d+, in corrupt"):
        served(REQUESTS, Looking(corrupt), POOLS, table=SIMPLE)


def test_the_view_shows_what_the_cluster_writes():
    seen = []

    def look(view):
        seen.append((view.arrived, view.order, view.arrival_s[view.order[-1]], int(view.queued_prompt_tokens.sum())))

    served([(0.0, 100, 5), (0.001, 200, 5)], Looking(look), POOLS, table=SIMPLE)
    assert seen == [(1, (0,), 0.0, 0), (2, (0, 1), 0.001, 100)]
