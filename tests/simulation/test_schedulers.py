"""Schedulers by version: their defaults reach the steps of instances, and what they admit reaches the kernel."""

from dataclasses import replace

import pytest
from sites import SIMPLE, deployment, site, trace

from disagg_sim.domain import Sharding, Slo
from disagg_sim.errors import SpecError
from disagg_sim.facts.engine import scheduler_of
from disagg_sim.facts.load import list_specs, load_scheduler, load_system
from disagg_sim.facts.yaml_files import find_file, read_mapping
from disagg_sim.physics.setup import setup
from disagg_sim.simulation.deployment import Replicas, ServedDeployment
from disagg_sim.simulation.engine import Engine
from disagg_sim.simulation.policies.registry import policy_named
from disagg_sim.simulation.run import run, serve
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.simulation.site import of_ranks, with_defaults
from disagg_sim.simulation.wishes import Limits

SLO = Slo(ttft=9.0, tpot=0.1)
OPEN = Limits(token_budget=0, max_sequences=0)


@pytest.mark.parametrize(
    ("scheduler", "system", "ranks", "tokens", "sequences"),
    [
        ("vllm_v0_2024", "h200_sxm", 1, 2048, 256),
        ("vllm_v1_2025", "h100_sxm", 1, 8192, 1024),
        ("vllm_v1_2026", "h200_sxm", 8, 8 * 8192, 8 * 1024),
        ("vllm_v1_2026", "a100_sxm_80gb", 1, 2048, 256),
        ("vllm_v1_2026", "a100_sxm_40gb", 1, 2048, 256),
        ("sglang_2026", "h200_sxm", 8, 8192, 8 * 1024),
        ("sglang_2026", "b200_sxm", 1, 16384, 1024),
        ("trtllm_2026", "b200_sxm", 4, 4 * 8192, 4 * 2048),
    ],
)
def test_defaults_by_memory_and_ranks(scheduler, system, ranks, tokens, sequences):
    """SGLang divides its chunk by the ranks, the others count for each."""
    found = of_ranks(with_defaults(OPEN, load_scheduler(scheduler), load_system(system), ranks), ranks)
    assert (found.token_budget, found.max_sequences) == (tokens, sequences)


def test_what_a_policy_says_goes_before_the_scheduler():
    own, h100 = Limits(token_budget=512, max_sequences=0), load_system("h100_sxm")
    found = with_defaults(own, load_scheduler("vllm_v1_2026"), h100, 1)
    assert (found.token_budget, found.max_sequences) == (512, 512)  # no more sequences than tokens by default
    both = Limits(token_budget=512, max_sequences=40)
    assert with_defaults(both, load_scheduler("vllm_v1_2026"), h100, 1) == both


@pytest.mark.parametrize("rows", [[], [(35, 2048)], [(0, 2048), (35, 4096), (35, 8192)]])
def test_defaults_of_a_file_rise_from_no_memory_on(rows, tmp_path):
    data = read_mapping(find_file("scheduler", "sglang_2026"))
    data["defaults"] = [{"memory": f"{at} GB", "token_budget": n, "max_sequences": 9} for at, n in rows]
    with pytest.raises(SpecError, match="defaults"):
        scheduler_of(tmp_path / "mine.yaml", data, "mine")


@pytest.mark.parametrize("scheduler", list_specs("scheduler"))
def test_every_scheduler_serves_under_memory_pressure(scheduler):
    """A hundred requests at once that end with 1,000 tokens each where 32,000 fit: who counts outputs preempts none."""
    engine, requests = Engine(0), trace([(0.0, 500, 500)] * 100)
    here = site(engine, deployment(colocated=1), table=SIMPLE, blocks=2000)
    here = replace(here, scheduler=load_scheduler(scheduler))
    found = serve(requests, policy_named("vllm", max_sequences=100), here, engine, RunOptions()).requests
    assert (found.finish_s > 0).all()
    assert (found.preemptions.sum() == 0) == (scheduler == "trtllm_2026")


def test_a_run_takes_the_scheduler_that_it_names():
    """5,000 tokens are one step under a budget of 8,192, three of 2,048 where the policy says so."""
    at = setup("llama_3_1_8b", "h100_sxm", "fp8")
    one = ServedDeployment(name="one", gpus=1, colocated=(Replicas(mapping=Sharding(), instances=1),))
    requests = trace([(0.0, 5000, 2)])

    def first(scheduler, **own):
        policy, options = policy_named("vllm", **own), RunOptions(scheduler=scheduler)
        return run(requests, one, policy, at=at, slo=SLO, options=options).requests.first_token_s[0]

    assert first("vllm_v1_2026") < first("vllm_v0_2024") == first("vllm_v1_2026", token_budget=2048)
