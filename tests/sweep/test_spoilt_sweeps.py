"""Whatever stands in a sweep file, the answer is a sweep or an expected error."""

import copy
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from disagg_sim.errors import DisaggSimError
from disagg_sim.sweep.spec import load_sweep

GOOD: dict[str, Any] = {
    "name": "trial",
    "models": ["llama_3_1_8b", "opt_30b"],
    "systems": {"h100_sxm": ["fp8", "bf16"], "b200_sxm": "fp8"},
    "traffic": [{"isl": 1024, "osl": 128}, {"isl": 512, "osl": 2}],
    "modes": ["disaggregated", "colocated", "piggyback"],
    "limits": {"ftl_s": [1.0, 10.0], "ttl_s": 0.1, "gpu_cap": 64, "max_gpus": 8, "nic_gb_per_s": ["none", 50]},
    "ctx_gen_ratio": ["optimal", 0.5, "1/3"],
    "nvlink_domain": ["own", 72],
    "mla_form": ["auto", "naive"],
    "ttl_measure": "p99",
    "every_step_mixed": True,
    "interference": {"minority_efficiency": 0.8, "overlap_loss": 0.2},
    "per": "usd",
    "prices": {"h100_sxm": 2.5, "b200_sxm": 5},
    "profile": "measured",
    "engine": "vllm",
    "matching": "exact",
    "block_points": 100,
    "allow_long_context": False,
}

ODD = (
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["h100_sxm", "10 ms", "1e400", "../x", "x.yaml", [], {}, [[]], [{}], {"isl": None}, {1: 2}])
)


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.sampled_from(list(places(GOOD))), odd=ODD, drop=st.booleans())
def test_a_spoilt_sweep_is_read_or_refused(place, odd, drop, tmp_path):
    document = copy.deepcopy(GOOD)
    node: Any = document
    for key in place[:-1]:
        node = node[key]
    if drop:
        del node[place[-1]]
    else:
        node[place[-1]] = odd
    path = tmp_path / "spoilt.yaml"
    path.write_text(yaml.safe_dump(document))
    with suppress(DisaggSimError):
        load_sweep(str(path))


def test_the_unspoilt_sweep_is_read(tmp_path):
    path = tmp_path / "good.yaml"
    path.write_text(yaml.safe_dump(GOOD))
    assert len(load_sweep(str(path)).pools) == 3


@pytest.mark.parametrize("text", ["name: a\n\tb: c", "&a [*a]", "? [1, 2]\n: 3", "!!python/object:os.system {}", "%"])
def test_hostile_yaml_is_refused(tmp_path, text):
    path = tmp_path / "hostile.yaml"
    path.write_text(text)
    with pytest.raises(DisaggSimError):
        load_sweep(str(path))
