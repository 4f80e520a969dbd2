"""What people write for a quantity: units, percentages, and numbers that nobody can mean."""

import pytest
from typer.testing import CliRunner

from disagg_sim.cli.aliases import own_name
from disagg_sim.cli.main import app
from disagg_sim.units import GB, asked_quantity, parse_quantity

pytestmark = pytest.mark.usefixtures("without_changes")


@pytest.mark.parametrize(
    ("text", "what", "value"),
    [
        ("2", "ttft", 2.0),
        (0.05, "tpot", 0.05),
        ("500ms", "ttft", 0.5),
        ("100 s", "ttft", 100.0),
        ("1.5 sec", "tpot", 1.5),
        ("20 min", "seconds", 1200.0),
        ("50", "nic", 50 * GB),
        ("400 Gbit/s", "nic", 50 * GB),
        ("400Gbps", "nic", 50 * GB),
        ("300 GB/s", "nic", 300 * GB),
        ("90 %", "share", 0.9),
        ("99.9%", "share", 0.999),
        (0.9, "share", 0.9),
        ("600/min", "rate", 10.0),
        ("10 req/s", "rate", 10.0),
    ],
)
def test_a_quantity_is_read_with_and_without_its_unit(text, what, value):
    assert asked_quantity(text, what, "x") == pytest.approx(value, rel=1e-15)


def test_gigabits_that_could_be_gigabytes_are_refused():
    with pytest.raises(ValueError, match=r"unit 'Gb/s'; allowed: .* GB/s, .* Gbit/s"):
        parse_quantity("400 Gb/s", "B/s")


def test_names_of_other_tools_and_units_that_stand_apart_are_taken():
    """The same JSON under either name."""
    own = ["--system", "h100_sxm", "--isl", "1024", "--osl", "128", "--rate", "10/s", "--engine", "trtllm"]
    others = ["--hardware", "h100_sxm", "--input-len=1024", "--output-len", "128", "--request-rate", "600/min"]
    model = ["plan", "--model", "llama_3_1_8b", "--json"]
    one = CliRunner().invoke(app, [*model, *own, "--ttft", "500 ms@p99", "--max-nic", "50"])
    two = CliRunner().invoke(
        app, [*model, *others, "--backend", "TensorRT-LLM", "--ttft", "500", "ms@p99", "--max-nic", "400", "Gbit/s"]
    )
    assert one.exit_code == two.exit_code == 0
    assert one.output == two.output


def test_a_name_that_a_command_has_itself_is_no_alias():
    assert own_name("backend", {"backend", "engine"}) == "backend"
    assert own_name("backend", {"address"}) == "backend"
