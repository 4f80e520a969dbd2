"""The page about policies: its example runs as it stands there, its table knows every policy."""

import re
from pathlib import Path
from unittest.mock import patch

import pytest
from sites import ONE, SIMPLE, served

from disagg_sim.simulation.deployment import Replicas, ServedDeployment
from disagg_sim.simulation.policies.registry import policies, policy_named
from disagg_sim.simulation.records import Outcome
from disagg_sim.simulation.run_options import RunOptions

PAGE = (Path(__file__).parents[2] / "docs" / "policies.md").read_text()
EXAMPLE = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)[-1]
ONE_INSTANCE = (Replicas(mapping=ONE, instances=1),)
SPARE = ServedDeployment(name="spare", gpus=4, prefill=ONE_INSTANCE, decode=ONE_INSTANCE)  # two GPUs to grow into


@pytest.mark.parametrize("name", list(policies()))
def test_every_policy_stands_on_the_page(name):
    assert f"| `{name}` |" in PAGE


@patch.dict(policies())
def test_the_example_grows_in_a_burst_and_shrinks_after_it():
    """3 s of prompts come at once; at 30 ms each, they keep one instance busy for as long."""
    exec(compile(EXAMPLE, "docs/policies.md", "exec"), {"__name__": "example"})
    assert len(EXAMPLE.splitlines()) <= 55
    requests = [(0.0, 200, 3)] * 100 + [(3.0 + 0.1 * k, 200, 3) for k in range(20)]
    policy = policy_named("queue_depth", target_tokens=2000, period_s=0.1)
    result = served(requests, policy, SPARE, table=SIMPLE, options=RunOptions(start_up_s=0.2))
    assert (result.requests.status == Outcome.COMPLETED).all()
    kinds = [decision.kind for decision in result.decisions]
    assert kinds[:2] == ["start", "start"]
    assert kinds.count("stop") == 2
    assert result.decisions[0].reason.endswith("prompt tokens queued, 1 instances")
    assert result.samples.gpus.max() <= 4
