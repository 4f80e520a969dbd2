"""The engine alone: order of events, feeds, sources, random streams."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_sim.errors import InputError
from disagg_sim.simulation.engine import FIRST, LAST, NORMAL, Engine

PRIORITIES = st.sampled_from((FIRST, NORMAL, LAST))
TIMES = st.floats(0, 10).map(lambda t: round(t, 1))


@given(st.lists(st.tuples(TIMES, PRIORITIES), max_size=30))
def test_events_happen_by_time_then_priority_then_order_of_the_calls(wanted):
    engine, seen = Engine(), []
    for serial, (time, priority) in enumerate(wanted):
        engine.at(time, priority, lambda *each: seen.append((engine.now, *each)), priority, serial)
    engine.run()
    assert seen == sorted((time, priority, serial) for serial, (time, priority) in enumerate(wanted))


@given(st.lists(TIMES, max_size=20), st.lists(TIMES, max_size=20))
def test_a_feed_is_the_same_as_its_events(feed, events):
    feed = sorted(feed)

    def order(by_feed):
        engine, seen = Engine(), []
        if by_feed:
            engine.feed(feed, FIRST, lambda k: seen.append((engine.now, "feed", k)))
        else:
            for k, time in enumerate(feed):
                engine.at(time, FIRST, lambda k: seen.append((engine.now, "feed", k)), k)
        for k, time in enumerate(events):
            engine.at(time, NORMAL, lambda k: seen.append((engine.now, "event", k)), k)
        engine.run()
        return seen

    assert order(by_feed=True) == order(by_feed=False)


def test_time_never_runs_backwards():
    engine = Engine()
    engine.at(2.0, NORMAL, lambda: engine.at(1.0, NORMAL, print))
    with pytest.raises(InputError, match=r"allowed: from the present, 2\.0 s"):
        engine.run()
    with pytest.raises(InputError, match=r"time 1 of a feed is 1\.0 s, before 3\.0 s"):
        Engine().feed([3.0, 1.0], NORMAL, print)
    with pytest.raises(InputError, match=r"time 0 of a feed is -1\.0 s, before 0\.0 s"):
        Engine().feed([-1.0], NORMAL, print)


def test_a_run_that_is_cut_goes_on_where_it_stopped():
    engine, seen = Engine(), []
    engine.feed([0.0, 1.0, 2.0, 3.0], NORMAL, seen.append)
    assert engine.run(until=1.5) == 1.5
    assert seen == [0, 1]
    assert engine.run() == 3.0
    assert seen == [0, 1, 2, 3]


class Ticker:
    """A source that ticks every ``period`` and tells of each tick."""

    def __init__(self, period, ticks, engine):
        self.engine, self.due, self.period, self.ticks, self.told = engine, period, period, ticks, []

    def advance(self, until):
        return self.due if len(self.told) < self.ticks and self.due <= until else math.inf

    def deliver(self):
        self.told.append(self.engine.now)
        self.due += self.period
        self.engine.at(self.engine.now, NORMAL, self.told.append, -self.engine.now)


def test_a_source_advances_between_events_and_wakes_the_engine():
    engine = Engine()
    ticker = Ticker(1.0, 6, engine)
    engine.attach(ticker)
    engine.at(1.5, NORMAL, ticker.told.append, "event")
    engine.run()
    assert ticker.told == [1.0, -1.0, "event", 2.0, -2.0, 3.0, -3.0]


def test_streams_depend_on_seed_and_name_alone():
    first, second = Engine(7), Engine(7)
    first.rng("another policy").random(1000)
    assert np.array_equal(first.rng("arrivals").random(5), second.rng("arrivals").random(5))
    assert first.rng("arrivals") is first.rng("arrivals")
    draws = [Engine(seed).rng(name).random() for seed in (0, 1) for name in ("a", "b")]
    assert len(set(draws)) == 4
