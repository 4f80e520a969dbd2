"""Option classes of the public API: what is no value of a field is one clear line, whatever it is."""

import dataclasses
import math
from types import SimpleNamespace

import pytest

import disagg_sim as ds
from disagg_sim.errors import DisaggSimError, InputError, UnknownNameError
from disagg_sim.facts.traffic import ConstantShare
from disagg_sim.launch.workers import Workers
from disagg_sim.planning.question import Size
from disagg_sim.serving.pool_names import Images
from disagg_sim.simulation.admission import Busy, PredictedTtft
from disagg_sim.simulation.kv_link import LinkSpec
from disagg_sim.simulation.metrics import ServiceClass
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.techniques.availability.play import Failures
from disagg_sim.techniques.encode.play import Encoders

AT = ds.setup("llama_3_1_8b", "h100_sxm", "fp8")
SEES = ds.setup("qwen3_5_35b_a3b", "h200_sxm", "fp8")
#: Classes with what they need at least.
CLASSES = {
    ds.Colocation: {},
    ds.MatchOptions: {},
    ds.PlanOptions: {},
    ds.SpareRules: {"target": 0.99},
    ds.Reuse: {"share": ConstantShare(share=0.5)},
    ds.Slo: {"ttft": 1.0, "tpot": 0.05},
    ds.Replicas: {"mapping": ds.Sharding(), "instances": 1},
    ds.ServedDeployment: {"name": "two", "gpus": 2, "setup": AT},
    Workers: {"role": "decode", "mapping": ds.Sharding(), "instances": 1, "setup": AT},
    RunOptions: {},
    LinkSpec: {},
    Busy: {},
    PredictedTtft: {},
    Failures: {},
    ServiceClass: {"name": "chat", "slo": ds.Slo(ttft=1.0, tpot=0.05)},
    Encoders: {"step": ds.encode_step(SEES, images=1, height=448, width=448), "instances": 1},
    Size: {"rate": 1.0},
    Images: {"images": 1, "height": 448, "width": 448},
}
#: Of a kind that no field has.
STRANGE = (SimpleNamespace(), b"x", {3: "x"}, (object(),), 1j)
#: Of a kind that some fields have.
ODD = (-1, 0, 3, 1.5, 10**30, math.nan, math.inf, -math.inf, True, None, "", "word", "two\nlines", [], (-1,), ("x",))
FIELDS = [(owner, each.name) for owner in CLASSES for each in dataclasses.fields(owner) if each.init]


def made(owner, name, value):
    return owner(**{**CLASSES[owner], name: value})


def told(owner, name, value):
    """What is said of a value; nothing of one that is taken."""
    try:
        made(owner, name, value)
    except DisaggSimError as error:
        return str(error)
    return ""


def test_no_value_ends_in_an_error_of_python():
    for owner, name in FIELDS:
        for value in STRANGE:
            with pytest.raises(DisaggSimError) as caught:
                made(owner, name, value)
            assert "\n" not in str(caught.value)
        for value in ODD:
            assert "\n" not in told(owner, name, value)


@pytest.mark.parametrize(
    ("owner", "name", "value", "said"),
    [
        (RunOptions, "tiers", "dram", "tiers dram is out of range; allowed: several texts"),
        (ds.Colocation, "batch", 10**30, "allowed: whole numbers from 1 to 1000000000"),
        (ds.PlanOptions, "prices", 3, "prices 3 is out of range; allowed: a mapping of texts to numbers"),
        (ds.PlanOptions, "rank_imbalance", "least", "rank_imbalance 'least' is unknown, did you mean 'least_"),
        (ds.PlanOptions, "headroom", -0.01, "headroom -0.01 is out of range; allowed: from 0 to 10"),
        (ds.PlanOptions, "prices", {"h100_sxm": 0.0}, "price of h100_sxm"),
        (LinkSpec, "bandwidth", 0.0, "above 0 B/s"),
        (LinkSpec, "spine_oversubscription", 0.5, "spine_oversubscription 0.5 is out of range"),
        (ds.Slo, "tpot", -0.05, "tpot must be above 0 s"),
        (ds.PlanOptions, "pools", ("prefil", "decode"), "did you mean 'prefill'"),
    ],
)
def test_the_line_says_what_is_allowed(owner, name, value, said):
    with pytest.raises((InputError, UnknownNameError)) as caught:
        made(owner, name, value)
    assert said in str(caught.value)


def test_lists_and_single_numbers_are_read_as_meant():
    assert ds.Colocation(hold_steps=8) == ds.Colocation(hold_steps=[8]) == ds.Colocation(hold_steps=(8,))
    assert ds.Colocation(hold_steps=[]) == ds.Colocation()
    part = ds.Replicas(mapping=ds.Sharding(), instances=1)
    one = ds.ServedDeployment(name="one", gpus=1, setup=AT, colocated=[part])
    assert one == ds.ServedDeployment(name="one", gpus=1, setup=AT, colocated=(part,))
    assert hash(one.colocated) == hash((part,))
