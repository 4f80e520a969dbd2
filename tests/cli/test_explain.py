"""``disagg-sim explain``: one row of results, down to its fits."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest

from disagg_sim.cli.main import run
from disagg_sim.parquet import read_parquet

SWEEP = """
name: trial
models: [llama_3_1_8b]
systems: {h100_sxm: fp8}
traffic: [{isl: 1024, osl: 128}]
modes: [disaggregated, colocated, piggyback]
nvlink_domain: 2
limits: {max_gpus: 4}
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("explained")
    (folder / "trial.yaml").write_text(SWEEP)
    assert run(["sweep", str(folder / "trial.yaml"), "--out", str(folder / "out"), "--jobs", "1", "--no-figures"]) == 0
    return folder / "out"


@pytest.mark.parametrize("mode", ["disaggregated", "colocated", "piggyback"])
def test_printed_parts_add_up_to_the_printed_latency(
    mode: str, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row of each mode of a computed sweep, with an NVLink domain of its own, and the memory of its GPUs."""
    table = pd.read_csv(results / "frontier.csv")
    row = int(table.index[table["mode"] == mode][0])
    capsys.readouterr()
    assert run(["explain", str(results), "--row", str(row), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    for name in ("ttl", "ftl"):
        parts = [part for part in told["operators"] if part["latency"] == name]
        assert sum(part["seconds"] for part in parts) == pytest.approx(table[f"{name}_s"][row], rel=1e-9)
    for phase in ("prefill", "decode"):
        filled = sum(part["bytes"] for part in told["memory"] if part["phase"] in (phase, "both"))
        assert filled == pytest.approx(table[f"{phase}_memory_bytes"][row], rel=1e-9)


def test_the_best_row_is_told_in_words_and_bars(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = pd.read_csv(results / "frontier.csv")
    best = table.loc[table["tokens_per_s_per_gpu"].idxmax()]
    capsys.readouterr()
    assert run(["explain", str(results), "--best"]) == 0
    text = capsys.readouterr().out
    assert f"TTL {best['ttl_s'] * 1e3:.3g} ms = {best['tokens_per_s_per_user']:,.4g} tokens/s/user" in text
    shares = [float(each) for each in re.findall(r" (\d+\.\d)% ", text.split("FTL")[0])]
    assert sum(shares) == pytest.approx(100.0, abs=0.5)
    assert "physics.attention.decode_attention_cost" in text
    assert "hw_specs/efficiency/h100_sxm.yaml" in text
    assert "1 % more HBM bandwidth" in text
    assert "memory of a" in text
    assert max(map(len, text.splitlines())) <= 200


def test_a_block_of_points_is_explained_and_drawn(results: Path, tmp_path: Path) -> None:
    block = next(results.glob("points/*/piggyback-*.parquet"))
    for name, head in (("parts.png", b"\x89PNG"), ("parts.svg", b"<?xml")):
        assert run(["explain", str(block), "--row", "0", "--figure", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_bytes().startswith(head)


def test_a_point_as_fast_as_asked_for_is_chosen(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = pd.read_csv(results / "frontier.csv")
    capsys.readouterr()
    assert run(["explain", str(results / "frontier.csv"), "--at-interactivity", "100", "--json"]) == 0
    (point,) = json.loads(capsys.readouterr().out)["points"]
    assert point["tokens_per_s_per_user"] >= 100
    fast = table[table["tokens_per_s_per_user"] >= 100]
    assert point["tokens_per_s_per_gpu"] == fast["tokens_per_s_per_gpu"].max()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name one by --row, --best or --at-interactivity"),
        (["--row", "100000"], "the table has rows 0 to"),
        (["--row", "1", "--best"], "exclude each other"),
        (["--at-interactivity", "1e9"], "the fastest row has"),
        (["--best", "--case", "llama"], "no case 'llama'"),
        (["--best", "--figure", "picture.bmp"], "a picture ends in .png, .svg or .pdf"),
    ],
)
def test_what_cannot_be_explained_is_one_line(
    arguments: list[str], said: str, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert run(["explain", str(results), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("decode_tp_attn", 0, "'decode_tp_attn' has a value below 1"),
        ("mixed_step_share", "many", "'mixed_step_share' is missing or not all numbers"),
        ("isl", -1, "'isl' has a value that is empty, infinite or below 0"),
        ("decode_batch", 3, "of the table: its settings give"),
        ("model", "llama_3_1_8c", "did you mean 'llama_3_1_8b'"),
    ],
)
def test_a_table_changed_by_hand_is_refused(
    column: str, value: object, said: str, results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = pd.read_csv(results / "frontier.csv").head(1).astype({column: object})
    table[column] = value
    path = tmp_path / "changed.csv"
    table.to_csv(path, index=False)
    capsys.readouterr()
    assert run(["explain", str(path), "--best"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


BY_HAND = ["--system", "h100_sxm", "--precision", "fp8", "--tp", "4", "--batch", "32", "--isl", "4096", "--osl", "512"]


@pytest.mark.parametrize(
    ("phase", "latencies", "pools"),
    [
        ("decode", {"ttl"}, {"decode"}),
        ("prefill", {"ftl"}, {"prefill"}),
        ("colocated", {"ttl", "ftl"}, {"both"}),
        ("piggyback", {"ttl", "ftl"}, {"both"}),
    ],
)
def test_a_design_by_hand_is_explained_in_its_phases(
    phase: str, latencies: set[str], pools: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["explain", "--model", "llama_3_1_70b", *BY_HAND, "--phase", phase, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {part["latency"] for part in told["operators"]} == latencies
    assert {part["phase"] for part in told["memory"]} == pools
    (point,) = told["points"]
    for name in latencies:
        seconds = sum(part["seconds"] for part in told["operators"] if part["latency"] == name)
        assert seconds == pytest.approx(point[f"{name}_s"], rel=1e-9)
    assert run(["explain", "--model", "llama_3_1_70b", *BY_HAND, "--phase", phase]) == 0
    assert "llama_3_1_70b on h100_sxm, fp8 (measured)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name either a table of results, or a design by --model, --system and --precision"),
        (["--model", "llama_3_1_70b"], "a design by hand needs --system"),
        (["--model", "llama_3_1_70b", *BY_HAND, "--phase", "decoed"], "did you mean 'decode'"),
        (["--model", "llama_3_1_70b", *BY_HAND, "--ep", "3"], "--ep 3 does not divide the 4 GPUs of a stage"),
        (["--model", "llama_3_1_70b", *BY_HAND, "--tp", "3"], "tp_attn does not divide 64 query heads"),
    ],
)
def test_a_wrong_design_by_hand_is_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["explain", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


LAW = """
name: law
models: [llama_3_1_8b]
systems: {h100_sxm: fp8}
traffic: [log_normal_4096_512]
modes: [disaggregated, piggyback]
interference: {overlap_loss: 0.2}
limits: {max_gpus: 1, gpu_cap: 4, ftl_s: 100}
"""


@pytest.mark.long
def test_memory_of_a_server_is_told_by_its_terms(capsys: pytest.CaptureFixture[str]) -> None:
    """A model with states on an engine whose start-up is known: all that fills the GPU, and what lies outside."""
    by_hand = ["--model", "qwen3_5_35b_a3b", "--system", "h100_sxm", "--precision", "fp8", "--engine", "vllm"]
    assert run(["explain", *by_hand, "--tp", "2", "--batch", "64"]) == 0
    lines = capsys.readouterr().out.split("memory of a decode GPU: ")[1].splitlines()
    assert "outside of it CUDA graphs 1.1 and in use before 0.5 GB" in lines[0]
    told = {line.split("  ")[0] for line in lines[2:7]}
    assert told == {"weights", "KV cache", "states of sequences", "activations, logits", "runtime, libraries"}


def test_rows_under_a_distribution_of_lengths_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sweep names the distribution in its frontier, where a block of points finds it, and the interference."""
    (tmp_path / "law.yaml").write_text(LAW)
    sweep, out = [str(tmp_path / "law.yaml"), "--out", str(tmp_path / "out")], tmp_path / "out"
    assert run(["sweep", *sweep, "--jobs", "1", "--no-figures", "--uncertainty"]) == 0
    front = pd.read_csv(out / "frontier.csv")
    law = front["traffic"] == "log_normal_4096_512"
    block = next(out.glob("points/*log_normal*/piggyback-*.parquet"))
    for path, table in ((out, front[law]), (block, read_parquet(block))):
        row = int(table.index[len(table) // 2])
        capsys.readouterr()
        assert run(["explain", str(path), "--row", str(row), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)["operators"]
        for name in ("ttl", "ftl"):
            parts = [part["seconds"] for part in told if part["latency"] == name]
            assert sum(parts) == pytest.approx(table[f"{name}_s"][row], rel=1e-9)
    bands = pd.read_csv(out / "uncertainty.csv")
    assert len(bands) == len(front)
    assert (bands["ftl_p10_s"] < bands["ftl_p90_s"]).all()
    assert run(["sensitivity", *sweep, "--jobs", "1", "--no-figures"]) == 0
    assert pd.read_csv(out / "sensitivity.csv")["case"].nunique() == 2
    by_hand = ["--model", "llama_3_1_8b", *BY_HAND[:4], "--phase", "colocated", "--traffic", "log_normal_4096_512"]
    capsys.readouterr()
    assert run(["explain", *by_hand]) == 0
    assert "log_normal_4096_512 (6,653 tokens in, 740 out on average)" in capsys.readouterr().out
