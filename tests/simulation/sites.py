"""Small sites and traces for tests, with step times that can be worked out by hand."""

import functools

import numpy as np

from disagg_sim.domain import Sharding, Slo
from disagg_sim.facts.load import load_scheduler
from disagg_sim.physics.setup import setup
from disagg_sim.simulation.deployment import Replicas, ServedDeployment
from disagg_sim.simulation.engine import Engine
from disagg_sim.simulation.kernel.layout import Scheduling, Segment, World, dtype_of
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.simulation.run import serve
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.simulation.site import Site
from disagg_sim.workload.trace import Trace

ONE = Sharding()
#: Who watches the first token sees the prefill, whatever the link; what the default adds, ``test_transfers`` shows.
PLAIN = RunOptions(first_token="prefill")


@functools.lru_cache
def small_setup():
    """Llama-3.1-8B: 131,072 B of cache a token in bf16."""
    return setup("llama_3_1_8b", "h100_sxm", "bf16", "ideal")


def deployment(**instances):
    """One GPU an instance; as many GPUs as the largest choice of parts may need."""
    parts = {name: (Replicas(mapping=ONE, instances=count),) for name, count in instances.items()}
    return ServedDeployment(name="small", gpus=sum(instances.values()), **parts)


def trace(requests):
    """Of (arrival, input, output)."""
    arrival, inputs, outputs = zip(*requests, strict=True)
    return Trace(arrival=np.array(arrival, float), input_tokens=np.array(inputs), output_tokens=np.array(outputs))


def site(engine, served, *, table, blocks=1000, slo=None, options=PLAIN, link_bandwidth=131_072e3):
    """Every instance has this table and so many blocks; the link moves 1,000 tokens/s by default."""
    return Site(
        setup=small_setup(),
        deployment=served,
        slo=slo or Slo(ttft=2.0, tpot=0.1),
        link=options.link,
        link_bandwidth=link_bandwidth,
        link_latency_s=options.link.latency_s or 0.0,
        tables=lambda mapping, sequences: table,
        blocks=lambda mapping, limits: blocks,
        rng=engine.rng,
        start_up_s=options.start_up_s,
        flip_s=options.flip_s,
        prompt_tokens=1000.0,
        output_tokens=100.0,
        scheduling=Scheduling[options.scheduling.upper()],
        scheduler=load_scheduler("vllm_v0_2024"),  # prompts take all their blocks at once: easy to count by hand
    )


def served(requests, policy, served_by, *, table, seed=0, options=PLAIN, **more):
    """The result of a run at such a site."""
    engine = Engine(seed)
    here = site(engine, served_by, table=table, options=options, **more)
    return serve(requests if isinstance(requests, Trace) else trace(requests), policy, here, engine, options)


def arrays_of(inst):
    """The arrays of a fleet whose instances are these records, idle but for what they say."""
    empty, world = np.zeros(1), np.zeros(1, dtype_of(World))
    world["changes"] = len(inst) + 1  # more than the log holds: all are new
    rest = [np.zeros(1, dtype_of(Segment)), np.zeros((1, 1, 1)), empty, np.zeros((1, 1)), world, empty, empty]
    return [inst, *rest, np.zeros(len(inst), np.int64), np.zeros(0, np.int64)]


#: 10 ms of every step, 1 ms a sequence that decodes, 0.1 ms a prompt token.
SIMPLE = StepTable.affine(step=0.010, per_sequence=0.001, per_token=0.0001)
