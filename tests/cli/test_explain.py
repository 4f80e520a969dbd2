"""``disagg-sim explain``: one row of results, or a design by hand, down to its fits."""

import json
import re
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

import disagg_sim as ds
from disagg_sim.cli.main import run
from disagg_sim.facts.load import load_failures, load_system
from disagg_sim.techniques.availability.law import Need, blast_of

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
def results(swept, tmp_path_factory):
    return swept(SWEEP, tmp_path_factory.mktemp("explained") / "out")


@pytest.mark.parametrize(("options", "pool"), [(["--phase", "decode"], "decode"), (["--phase", "prefill"], "prefill")])
def test_a_design_that_does_not_fit_says_so_first(options, pool, capsys):
    """406 billion parameters in bf16 are 203 GB on each of four GPUs of 80 GB; eight of them hold them in fp8."""
    asked = ["explain", "--model", "llama_3_1_405b", "--system", "h100_sxm", "--batch", "8", *options]
    assert run([*asked, "--precision", "bf16", "--tp", "4"]) == 2
    first = capsys.readouterr().out.splitlines()[0]
    found = re.match(
        rf"does not fit: one {pool} GPU would hold ([\d.]+) of ([\d.]+) GB \((\d+)%\), ([\d.]+) GB too", first
    )
    assert found, first
    held, limit, share, over = map(float, found.groups())
    assert held > 203.0
    assert share == pytest.approx(100 * held / limit, abs=1)
    assert over == pytest.approx(held - limit, abs=0.2)
    assert run([*asked, "--precision", "bf16", "--tp", "4", "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    assert (told["status"], first.startswith(told["binds"])) == ("infeasible", True)
    assert run([*asked, "--precision", "fp8", "--tp", "8", "--json"]) == 0
    fits = json.loads(capsys.readouterr().out)
    assert (fits["status"], fits["binds"]) == ("feasible", "")


def test_halves_of_split_instances_that_do_not_fit_say_so(capsys):
    split = ["--phase", "attention_ffn", "--tp", "4", "--ffn-gpus", "4", "--batch", "12"]
    asked = ["explain", "--model", "llama_3_1_405b", "--system", "h100_sxm", "--precision", "bf16", *split]
    assert run(asked) == 2
    assert capsys.readouterr().out.startswith("does not fit: one FFN GPU would hold ")


def test_a_block_of_points_is_explained_and_drawn(results, tmp_path):
    block = next(results.glob("points/*/piggyback-*.parquet"))
    assert run(["explain", str(block), "--row", "0", "--figure", str(tmp_path / "parts.svg")]) == 0
    assert (tmp_path / "parts.svg").read_bytes().startswith(HEADS["parts.svg"])


#: How files of pictures and pages begin.
HEADS = {"parts.png": b"\x89PNG", "page.html": b"<!doctype html>", "parts.svg": b"<?xml", "parts.pdf": b"%PDF"}


@pytest.mark.parametrize(
    "name",
    ["parts.png", "page.html", *(pytest.param(f"parts.{kind}", marks=pytest.mark.rare) for kind in ("svg", "pdf"))],
)
def test_a_picture_or_page_takes_the_place_of_its_own_kind_alone(name, results, tmp_path, capsys):
    command = ["report", str(results), "--no-breakdowns", "--points", "0", "--jobs", "1", "--out"]
    command = command if name == "page.html" else ["explain", str(results), "--row", "0", "--figure"]
    path, link = tmp_path / name, tmp_path / f"link_{name}"
    assert [run([*command, str(path)]), run([*command, str(path)])] == [0, 0]
    assert path.read_bytes().startswith(HEADS[name])
    link.symlink_to(path)
    path.write_text("mine")
    assert [run([*command, str(path)]), run([*command, str(link)])] == [2, 2]
    assert path.read_text() == "mine"
    told = capsys.readouterr().err
    assert "is there already, and this command did not write it" in told
    assert "is a link, and nothing is written through it" in told


def test_a_point_as_fast_as_asked_for_is_chosen(results, capsys):
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
def test_what_cannot_be_explained_is_one_line(arguments, said, results, capsys):
    capsys.readouterr()
    assert run(["explain", str(results), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("decode_tp_attn", 0, "'decode_tp_attn' has a value below 1"),
        ("decode_batch", 3, "of the table: its settings give"),
    ],
)
def test_a_table_changed_by_hand_is_refused(column, value, said, results, tmp_path, capsys):
    table = pd.read_csv(results / "frontier.csv").head(1).astype({column: object})
    table[column] = value
    path = tmp_path / "changed.csv"
    table.to_csv(path, index=False)
    capsys.readouterr()
    assert run(["explain", str(path), "--best"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_design_by_hand_has_the_precision_of_plans_and_needs_a_system(capsys):
    assert run(["explain", "--model", "llama_3_1_8b", "--system", "h100_sxm"]) == 0
    assert "llama_3_1_8b on h100_sxm, fp8 (measured)" in capsys.readouterr().out
    assert run(["explain", "--model", "llama_3_1_8b"]) == 2
    assert "a design by hand needs --system" in capsys.readouterr().err


def explained(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, Any]]:
    """What the command prints for people, and for programs."""
    told = []
    for more in ([], ["--json"]):
        capsys.readouterr()
        assert run(["explain", *arguments, *more]) == 0
        told.append(capsys.readouterr().out)
    return told[0], json.loads(told[1])


def test_spares_of_a_row_are_those_of_its_pools(results, capsys):
    """Two pools of a matched point fail independently: their shares of the time multiply."""
    table = pd.read_csv(results / "frontier.csv")
    row = int(table.index[table["mode"] == "disaggregated"][0])
    _, told = explained([str(results), "--row", str(row), "--availability", "0.9999"], capsys)
    assert len(told["spares"]["counts"]) == 2
    failing, system = load_failures("llama_3_405b"), load_system("h100_sxm")
    links = bool(table["total_gpus"][row] > 2)  # the NVLink domain of the sweep
    alone = 1.0
    for pool in ("prefill", "decode"):
        blast = blast_of(failing, replace(system, nvlink_domain=2), table[f"{pool}_gpus"][row], links=links)
        alone *= Need(instances=int(table[f"{pool}_instances"][row]), cost=1.0, blast=blast).up(0)
    assert told["spares"]["without"] == pytest.approx(alone)


def test_a_table_says_what_its_designs_are(results, capsys):
    capsys.readouterr()
    assert run(["explain", str(results), "--best", "--cached", "0.9", "--tp", "8"]) == 2
    assert "--tp, --cached: of a design by hand; a table says that of each row" in capsys.readouterr().err


R1 = ["explain", "--model", "deepseek_r1", "--system", "h200_sxm", "--precision", "fp8", "--dp", "8", "--ep", "8"]

R1 += ["--batch", "64", "--isl", "8192", "--osl", "1024"]


def test_a_design_by_hand_tells_both_sides_of_its_wait(capsys):
    """43.6 ms in place of 83.1: the numbers of the search with and without a wait."""
    assert run([*R1, "--phase", "colocated", "--hold-prompts", "tuned", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["held_prompts"]
    at, wide = ds.setup("deepseek_r1", "h200_sxm", "fp8"), ds.Sharding(dp_attn=8, ep=8)
    both = [
        ds.colocated(
            at, wide, ds.lengths(8192, 1024), ftl_limit=1e9, options=ds.Colocation(batch=(64,), hold_steps=steps)
        )
        for steps in ((found["steps"],), ())
    ]
    assert [found["ttl"], found["ttl_without"]] == pytest.approx([float(rows["ttl_s"].iloc[0]) for rows in both])
    slots = [float(rows["ftl_with_slot_wait_s"].iloc[0]) for rows in both]
    assert [found["ftl"], found["ftl_without"]] == pytest.approx(slots)
    assert found["ttl"] < 0.6 * found["ttl_without"]
    assert found["ftl"] > found["ftl_without"]
