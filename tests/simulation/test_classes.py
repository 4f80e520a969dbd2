"""Classes of service: limits and priorities of their own, and what each class gets."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_sim.domain import Slo
from disagg_sim.simulation.admission import Busy, PredictedTtft
from disagg_sim.simulation.metrics import ServiceClass, by_class, limits_of, summary
from disagg_sim.simulation.records import Outcome
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.workload.request_columns import Labels, Sessions
from disagg_sim.workload.scaling import at_rate, with_classes
from disagg_sim.workload.trace import Trace, concatenate
from tests.simulation.sites import SIMPLE, deployment, served

ONE = deployment(colocated=1)
LIMITS = Slo(ttft=2.0, tpot=0.1)
BATCH = ServiceClass(name="batch", slo=Slo(ttft=300.0, tpot=1.0), priority=-1)


def overload(count: int = 300) -> Trace:
    """Prompts of 1,000 tokens, 27 a second where 9 are served; every third is interactive, the others batch."""
    number = (np.arange(count) % 3 > 0).astype(int)
    return Trace(
        arrival=np.arange(count) / 27.0,
        input_tokens=np.full(count, 1000),
        output_tokens=np.ones(count),
        classes=Labels(names=("interactive", "batch"), number=number),
    )


def rows_of(trace: Trace, admission=None):
    options = RunOptions(classes=(BATCH,), admission=admission)
    result = served(trace, "vllm", ONE, table=SIMPLE, slo=LIMITS, options=options)
    return result, by_class(result.frame(), trace, LIMITS, (BATCH,)).set_index("class")


def test_attainment_is_by_the_limits_of_each_class():
    """First come, first served: interactive requests are late after 3 s, batch ones have five minutes."""
    trace = overload()
    result, rows = rows_of(trace)
    assert rows.loc["batch", "slo_attainment"] == 1.0
    assert rows.loc["interactive", "slo_attainment"] < 0.4
    whole = summary(result, LIMITS, limits=limits_of(trace, LIMITS, (BATCH,)))
    assert whole.slo_attainment == pytest.approx((rows["slo_attainment"] * rows["requests"]).sum() / 300)
    assert whole.goodput_requests_per_s == pytest.approx(rows["goodput_requests_per_s"].sum())
    assert rows["requests"].tolist() == [100, 200]
    assert rows["slo_ttft_s"].tolist() == [2.0, 300.0]


def test_shedding_the_sheddable_keeps_what_matters_in_time():
    """The 9 interactive requests a second are what the instance serves: batch ones have to go."""
    trace = overload()
    for admission in (Busy(prefill_tokens=8000, sheds="sheddable"), PredictedTtft(sheds="sheddable")):
        result, rows = rows_of(trace, admission)
        assert (result.requests.status[trace.classes.number == 0] == Outcome.COMPLETED).all()
        assert rows.loc["interactive", "rejected"] == 0
    _, busy = rows_of(trace, Busy(prefill_tokens=8000, sheds="sheddable"))
    assert busy.loc["interactive", "slo_attainment"] > 0.9
    assert busy.loc["batch", "rejected"] > 150
    _, every = rows_of(trace, Busy(prefill_tokens=8000))
    assert every.loc["interactive", "rejected"] > 30


def test_a_prediction_is_judged_by_the_limit_of_the_class():
    """Batch requests may wait for five minutes, so none of them is rejected; interactive ones behind them are."""
    _, rows = rows_of(overload(), PredictedTtft())
    assert rows.loc["batch", "rejected"] == 0
    assert rows.loc["interactive", "rejected"] > 50


@given(rate=st.floats(0.2, 3.0), by=st.sampled_from(["time", "requests"]), seed=st.integers(0, 5))
def test_requests_keep_their_class_at_every_rate(rate, by, seed):
    trace = replace(overload(60), input_tokens=np.where(overload(60).classes.number, 7, 5))
    found = at_rate(trace, rate, by, seed=seed)
    assert np.array_equal(found.input_tokens == 7, found.classes.number == 1)
    doubled = concatenate(
        [trace, replace(trace, classes=Labels(names=("batch", "interactive"), number=1 - trace.classes.number))]
    )
    assert np.array_equal(doubled.input_tokens == 7, doubled.classes.number == 1)


def test_a_session_has_one_class():
    trace = Trace(
        arrival=np.arange(100.0), input_tokens=np.ones(100), output_tokens=np.ones(100),
        sessions=Sessions(session=np.arange(100) % 20, think_s=np.ones(100)),
    )  # fmt: skip
    found = with_classes(trace, {"a": 1, "b": 1}, seed=2).classes.number
    assert all(len(set(found[trace.sessions.session == each])) == 1 for each in range(20))
    assert 0 < found.mean() < 1
