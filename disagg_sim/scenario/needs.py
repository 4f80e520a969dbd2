"""Say what a run needs before it begins: memory, and cells that divide its deployment."""

from __future__ import annotations

from collections.abc import Iterator

from disagg_sim.facts.faults import faults_of_call
from disagg_sim.memory import require_memory
from disagg_sim.simulation.cells import require_cells
from disagg_sim.simulation.deployment import ServedDeployment
from disagg_sim.simulation.options import FULL
from disagg_sim.simulation.run import RunOptions
from disagg_sim.units import GB
from disagg_sim.workload.stream import TraceStream
from disagg_sim.workload.trace import Trace

#: A process with its libraries and tables, [B]
PROCESS = 0.4 * GB
#: and for each request that it holds: of the trace and the run; of the table at its end; of each block of a prompt. [B]
REQUEST, RECORD, BLOCK = 260.0, 250.0, 24.0
#: From which on ``specs check`` says it. [B]
WORTH_SAYING = 2.0 * GB


def run_memory(trace: Trace | TraceStream, records: str) -> float:
    """Estimate the memory of a process that runs a trace. [B]

    >>> from disagg_sim.workload.synthetic import synthetic_trace
    >>> f"{run_memory(synthetic_trace(rate=4.0, lengths=(256, 16), requests=10_000), FULL) / GB:.3f} GB"
    '0.405 GB'
    """
    if isinstance(trace, TraceStream):
        return PROCESS + REQUEST * trace.window
    blocks = 0 if trace.prefix is None else trace.prefix.ids.size
    return PROCESS + (REQUEST + RECORD * (records == FULL)) * len(trace) + BLOCK * blocks


def run_faults(trace: Trace | TraceStream, deployment: ServedDeployment, options: RunOptions) -> Iterator[str]:
    """Faults of a run that would show after hours, or in a machine without memory; a line each."""
    yield from faults_of_call("trace", require_memory, "a run of it", run_memory(trace, options.records))
    if options.cells > 1:
        yield from faults_of_call("run.cells", require_cells, trace, deployment, options)


def memory_note(path: str, trace: Trace | TraceStream, options: RunOptions) -> Iterator[str]:
    """A line on the memory of a run, where it is worth one."""
    if (needed := run_memory(trace, options.records)) > WORTH_SAYING:
        yield f"{path}: each process of a run on {trace.name} needs about {needed / GB:.1f} GB of memory"
