"""The notebooks run from the first cell to the last, on the public names alone, and show what they promise."""

import ast
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import disagg_sim

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
FIRST, MODES, PROOF, COST, OWN, ACCURACY = (
    FOLDER / f"{name}.ipynb"
    for name in (
        "01_first_frontier",
        "02_colocated_or_disaggregated",
        "03_from_plan_to_proof",
        "04_capacity_and_cost",
        "05_your_own_model",
        "06_accuracy",
    )
)
LIMIT = 60  # of a cell [s]


class Run:
    """A notebook after its run: what it printed, the HTML and the pictures that it showed."""

    def __init__(self, path: Path, folder: Path) -> None:
        notebook = nbformat.read(path, as_version=4)
        client = NotebookClient(notebook, timeout=LIMIT, resources={"metadata": {"path": str(folder)}})
        client.execute()  # raises where a cell does
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
        self.printed = "".join(output.text for output in outputs if output.get("name") == "stdout")
        self.warned = "".join(output.text for output in outputs if output.get("name") == "stderr")
        data = [output.data for output in outputs if "data" in output]
        self.html = [each["text/html"] for each in data if "text/html" in each]
        self.pictures = sum("image/png" in each for each in data)
        shown = [self.printed, self.warned, *self.html]
        assert not [text for text in shown if str(FOLDER.parent) in text], f"{path.name} shows paths of this machine"


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    return Run(FIRST, tmp_path_factory.mktemp("first"))


@pytest.fixture(scope="module")
def modes(tmp_path_factory):
    return Run(MODES, tmp_path_factory.mktemp("modes"))


@pytest.fixture(scope="module")
def proof(tmp_path_factory):
    return Run(PROOF, tmp_path_factory.mktemp("proof"))


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, f"no {pattern!r} in {text!r}"
    return float(found[1].replace(",", ""))


def test_every_notebook_is_run_here():
    assert NOTEBOOKS == [FIRST, MODES, PROOF, COST, OWN, ACCURACY]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_kept_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs"), f"clear the outputs of {path.name}"
        assert cell.get("execution_count") is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_use_public_names_only(path):
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    for node in (node for source in cells for node in ast.walk(ast.parse(source))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ds":
            assert node.attr in disagg_sim.__all__
        if isinstance(node, ast.Import):
            assert {alias.name for alias in node.names} <= {"disagg_sim", "matplotlib.pyplot", "numpy", "pandas"}
        assert not isinstance(node, ast.ImportFrom)


@pytest.mark.long
def test_the_first_frontier_is_shown_with_its_bandwidth(first):
    assert number(r"([\d,]+) matched configurations", first.printed) > 1000
    assert number(r"configurations, (\d+) of them on the frontier", first.printed) > 10
    # 61 layers x (512 + 64) x 1 B x 16384 tokens
    assert number(r"one prompt leaves ([\d.]+) GB", first.printed) == pytest.approx(0.58)
    assert first.pictures == 3
    assert not first.warned
    texts = [cell.source for cell in nbformat.read(FIRST, as_version=4).cells if cell.cell_type == "markdown"]
    (said,) = (text for text in texts if text.startswith("A frontier is a table"))
    (table,) = (html for html in first.html if "at least" in html)
    for word in ("DP16 EP16", "PP4", "86×4 : 13×16"):
        assert f"`{word}`" in said
        assert f"<td>{word}</td>" in table


@pytest.mark.long
def test_the_first_notebook_plans_a_mixed_pool(first):
    mixed = number(r"mixed pools: +([\d.]+) requests/s", first.printed)
    single = number(r"one configuration per pool: +([\d.]+) requests/s", first.printed)
    assert mixed == pytest.approx(single * (1 + number(r"mixing gains ([\d.]+)%", first.printed) / 100), rel=1e-3)
    assert mixed > single > 0
    assert "the best TTL is" in first.printed
    (plan,) = (html for html in first.html if "Deployment" in html)
    assert re.search(r"tokens/s/GPU over \d+ GPUs", plan)
    assert any("Decode grid: DeepSeek-R1 on NVIDIA GB200 NVL72" in html for html in first.html)


@pytest.mark.long
def test_the_modes_are_compared_for_two_traffics(modes):
    assert modes.pictures == 4
    (verdict,) = (html for html in modes.html if "share_above" in html)
    assert verdict.count("<tr>") == 2
    assert all(mode in "".join(modes.html) for mode in ("disaggregated", "co-located", "piggybacked"))
    assert number(r"mean context in decode: ([\d,]+) tokens", modes.printed) > number(
        r"at constant means: ([\d,]+)", modes.printed
    )
    assert not modes.warned


@pytest.mark.long
def test_stalls_move_the_verdict_and_the_ftl_limit_does_not_as_the_text_says(modes):
    (table,) = (html for html in modes.html if "colocated_reach" in html and "as above" in html)
    rows = ("as above", "largest gap", "within 2 s")
    ratio = {row: number(rf"{row}.*?</th>\s*<td>([\d.]+)</td>", table) for row in rows}
    assert ratio == {"as above": 1.75, "largest gap": 2.4, "within 2 s": 1.74}


@pytest.mark.long
def test_an_unknown_price_is_named(modes):
    assert "usd_per_gpu_hour of gb200_nvl72 is not known" in modes.printed


@pytest.mark.long
def test_the_plan_is_proven_and_loses_to_the_spread_of_lengths(proof):
    assert number(r"full queue, planned lengths: ([\d.]+)", proof.printed) == pytest.approx(1.0, abs=0.02)
    assert 0.5 < number(r"full queue, lengths of the trace: ([\d.]+)", proof.printed) < 1.0
    planned = number(r"planned for ([\d.]+) requests/s", proof.printed)
    assert 0.5 * planned < number(r"up to ([\d.]+) requests/s", proof.printed) <= 1.1 * planned
    assert proof.pictures == 1
    assert any("disaggregated on planned under synthetic" in html for html in proof.html)
    assert not proof.warned


@pytest.mark.long
def test_cost_falls_with_the_rate_and_turns_with_the_price(tmp_path):
    run = Run(COST, tmp_path)
    assert run.pictures == 3
    offers = dict(re.findall(r"H200 at ([\d.]+) USD/h: NVIDIA (H\d00)", run.printed))
    assert offers["2.40"] == "H200"
    assert offers["3.40"] == "H100"
    ratios = re.search(r"needs ([\d.]+) times as many GPUs at 15 ms, ([\d.]+) times as many at 100 ms", run.printed)
    assert float(ratios[1]) > float(ratios[2]) >= 1.0
    assert any("GPUs serve 20 requests/s" in html for html in run.html)
    assert not run.warned


@pytest.mark.long
def test_a_model_of_ones_own_is_checked_planned_and_explained(tmp_path):
    run = Run(OWN, tmp_path)
    assert "unknown key 'kv_head', did you mean 'kv_heads'?" in run.printed
    rates = [number(rf"{heads} KV heads: \w+, (\d+) requests/s", run.printed) for heads in (8, 4, 2)]
    assert rates == sorted(rates)  # a smaller cache serves more
    assert run.pictures == 1
    assert any("gate, up" in html or "routed experts" in html for html in run.html)
    assert not run.warned


@pytest.mark.long
def test_measured_runs_are_met_and_bands_are_shown(tmp_path):
    run = Run(ACCURACY, tmp_path)
    assert number(r"median error ([\d.]+) %", run.printed) < 10
    assert number(r"(\d+) points on the frontier", run.printed) > 10
    assert run.pictures == 2
    assert not run.warned
