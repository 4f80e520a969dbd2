"""What all instances remember of a prompt, in one look-up, is what each of them says when it is asked."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg_sim.simulation.kernel.fleet import Fleet
from disagg_sim.simulation.kernel.instance_spec import InstanceSpec
from disagg_sim.simulation.kernel.step_table import StepTable
from disagg_sim.techniques.prefix.play import FreeMemory
from disagg_sim.workload.request_columns import PrefixBlocks

#: Prompts of two blocks that all share, and of up to six of one of three families.
LENGTHS = [[0, 1, *(10 * family + 2 + block for block in range(own))] for family in range(3) for own in range(7)]
PREFIX = PrefixBlocks(
    offsets=np.cumsum([0, *map(len, LENGTHS)]), ids=np.concatenate(LENGTHS).astype(np.int64), block_tokens=32
)
TABLES = [StepTable.affine(step=0.01, max_sequences=8, ranks=ranks) for ranks in (1, 1, 2)]
REQUEST = st.integers(0, len(LENGTHS) - 1)
STEPS = st.lists(st.tuples(st.integers(0, 2), REQUEST, st.booleans()), max_size=30)


def agrees(memory, request):
    found = memory.found_everywhere(request).tolist()
    assert found == [memory.found(instance, request) for instance in range(3)]


def fleet_of():
    return Fleet([InstanceSpec(table=table, blocks=30 * table.ranks, max_sequences=8) for table in TABLES])


@given(STEPS, REQUEST)
@settings(max_examples=60)
def test_in_free_memory(steps, asked):
    """Blocks are lost when others take them; of two ranks the one counts that would take the prompt."""
    fleet = fleet_of()
    memory = FreeMemory(PREFIX, fleet)
    for now, (instance, request, waits) in enumerate(steps):
        tokens = 32 * len(LENGTHS[request]) + 5
        cached = min(memory.found(instance, request), tokens - 1)
        segment = fleet.submit(instance, now, (0, tokens, 20), float(now), cached=cached)
        memory.keep(instance, request, segment)
        fleet.run_until(now + (0.02 if waits else 1.0))
        agrees(memory, request)
        agrees(memory, asked)
        fleet.run_until(now + 1.0)
