"""What a plan would deploy beside what was published: boards of three submissions, frontiers, ratios, by hand."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
from made_loads import latencies, made_run

from disagg_sim.cli.main import run
from disagg_sim.domain import ServingMode
from disagg_sim.physics.setup import setup
from disagg_sim.search.grid import prefill_grid
from disagg_sim.workload.named import lengths_named
from lab.calibration.served import boards as module
from lab.calibration.served.boards import COLUMNS, boards, judged_boards, met, set_aside, tokens_per_gpu
from lab.calibration.served.cells import instance
from lab.calibration.served.evaluate import evaluate
from lab.calibration.served.optimum import judged_optima, on_frontier, split_groups
from lab.calibration.served.rows import Measurement, ServingRow, WorkerGroup
from lab.cli import validate_served

PUBLISHED = "measured/mlperf_inference.csv"


def submission(samples: float, *, gpus: int = 8, submitter: str = "", **changed: object) -> ServingRow:
    """A Server result of Llama-3.1-8B on H200, 129 tokens out."""
    row = made_run(
        submitter,
        form="mlperf",
        system="h200_sxm",
        engine="trtllm",
        load="server",
        mode="",
        workers=WorkerGroup(count=gpus, mapping=instance(1)),
        assumed_layout=True,
        isl=778.0,
        osl=129.0,
        rate=samples,
        submitter=submitter,
        scenario="Server",
        ttft_limit=2.0,
        tpot_limit=0.1,
    )
    return replace(row, **changed)


def test_the_run_of_a_board_is_its_best_submission_by_gpu():
    """100 requests/s on 8 GPUs are 1,612.5 tokens/s/GPU, 60 on 4 are 1,935; other limits are another board."""
    rows = [
        submission(100.0, submitter="A"),
        submission(60.0, gpus=4, submitter="B"),
        submission(90.0, submitter="C", assumed_layout=False),
        submission(300.0, submitter="D", tpot_limit=0.2),
        submission(999.0, submitter="E", reason="open division: the model may be changed"),
        submission(999.0, submitter="F", tpot_limit=math.nan),  # Offline
        submission(999.0, submitter="G", model="llama_2_70b"),  # whose lengths are not published
    ]
    first, second = boards(rows)
    assert [each.submitter for each in first.submissions] == ["B", "A", "C"]
    assert [tokens_per_gpu(each) for each in first.submissions] == [1935.0, 1612.5, 1451.25]
    assert [each.submitter for each in second.submissions] == ["D"]


def test_a_board_is_set_aside_where_another_system_has_twice_its_share_of_its_own_best():
    """H200: 100 of 400 requests/s Offline; H100: 80 of 150; A100: 27 of 100, just above half of the share of H100."""
    offline = {"scenario": "Offline", "tpot_limit": math.nan}
    rows = [
        submission(100.0),
        submission(400.0, **offline),
        submission(999.0, reason="open division: the model may be changed", **offline),
        submission(80.0, system="h100_sxm"),
        submission(150.0, system="h100_sxm", **offline),
        submission(27.0, system="a100_sxm_80gb"),
        submission(100.0, system="a100_sxm_80gb", **offline),
        submission(10.0, scenario="Interactive"),  # nobody else ran it
    ]
    several = boards(rows)
    found = {(each.best.system, each.best.scenario): why for each, why in zip(several, set_aside(several), strict=True)}
    assert [each.share for each in several] == pytest.approx([0.27, 80 / 150, 0.025, 0.25])
    assert {name for name, why in found.items() if why} == {("h200_sxm", "Server")}
    assert "25%" in found["h200_sxm", "Server"]
    assert "53%" in found["h200_sxm", "Server"]


def test_the_rules_of_a_scenario_say_what_drafts():
    interactive = submission(1.0, model="deepseek_r1", scenario="Interactive")
    (fast,), (slow,) = boards([interactive]), boards([replace(interactive, scenario="Server")])
    assert slow.drafts is None
    assert fast.drafts is not None
    assert (fast.drafts.choices, 1 + sum(fast.drafts.acceptance)) == ((3,), pytest.approx(2.82))


def test_a_run_that_does_what_the_plan_does_has_a_ratio_of_one():
    """And half of the rate needs no more than the same GPUs, at twice the ratio."""
    (told,) = judged_boards(boards([submission(200.0)])).to_dict("records")
    rate = told["plan"] * 8 / 129.0
    pairs = submission(rate / 2, assumed_layout=False, workers=WorkerGroup(count=4, mapping=instance(2)))
    several = boards([submission(rate, assumed_layout=False)]) + boards([pairs])
    same, half = judged_boards(several).to_dict("records")
    assert (same["plan_over_run"], half["plan_over_run"]) == (pytest.approx(1.0), pytest.approx(2.0))
    assert half["gpus_for_run"] <= same["gpus_for_run"] <= 8
    assert (same["mode"], same["planned"], same["ran"]) == ("colocated", "8 x 1 GPU", "8 x 1 GPU")
    assert same["of_kind"] == same["of_kind_together"] == 1.0
    assert 0.5 < half["of_kind_together"] <= half["of_kind"] < 1.0


def test_a_board_is_held_against_the_plan_of_its_best_run(monkeypatch):
    """4 GPUs of B do 60 requests/s: 1,935 tokens/s/GPU, of 4,837.5 Offline; a plan of 7,740 tokens/s does as much.

    H100 has all of its best there, more than twice as much: the board of H200 is set aside, and planned all the same.
    """
    at = setup("llama_3_1_8b", "h200_sxm", "fp8", engine="trtllm")
    pools = [("prefill", 2, instance(1)), ("decode", 1, instance(2, pp=2))]
    made = [SimpleNamespace(role=role, instances=count, mapping=one, setup=at) for role, count, one in pools]
    design = SimpleNamespace(mode=ServingMode.DISAGGREGATED, tokens_per_s=7740.0, pools=made)
    asked, heard = [], []

    def planned(board, lengths):
        if board.best.system == "h100_sxm":
            return SimpleNamespace(best=None, ask=None, infeasible="nothing fits")

        def again(**changed):
            asked.append(changed)
            return SimpleNamespace(best=SimpleNamespace(gpus=3))

        return SimpleNamespace(best=design, ask=again, infeasible="")

    monkeypatch.setattr(module, "planned", planned)
    monkeypatch.setattr(module, "of_kind", lambda found, ran, together=False: 0.9 - 0.1 * together)
    offline = {"scenario": "Offline", "tpot_limit": math.nan}
    rows = [
        submission(100.0, submitter="A"),
        submission(60.0, gpus=4, submitter="B"),
        submission(30.0, submitter="C", assumed_layout=False, workers=WorkerGroup(count=2, mapping=instance(4))),
        submission(300.0, **offline),
        submission(80.0, system="h100_sxm"),
    ]
    table = judged_boards(boards(rows), listen=lambda: heard.append(1))
    assert (tuple(table.columns), len(heard)) == (COLUMNS, 2)
    other, told = table.to_dict("records")
    assert (other["set_aside"], other["reason"]) == ("", "nothing fits")
    assert math.isnan(other["plan"])
    assert told["set_aside"].startswith("its best run has 40% of the best result on its system")
    stated = {"gpus": 4, "submissions": 3, "submitter": "B", "ran": "2 x TP4", "gpus_for_run": 3}
    stated |= {"ttft_limit_s": 2.0, "tpot_limit_s": 0.1, "mode": "disaggregated", "reason": ""}
    stated |= {"planned": "prefill 2 x 1 GPU; decode 1 x PP2", "never_served": "PP of one-GPU stages never served"}
    assert {name: told[name] for name in stated} == stated
    numbers = [told[name] for name in ("run", "share", "plan", "plan_over_run")]
    assert numbers == pytest.approx([1935.0, 0.4, 1935.0, 1.0])
    assert (told["of_kind"], told["of_kind_together"]) == (0.9, 0.8)
    mean = lengths_named("mlperf_llama_3_1_8b").mean_osl
    assert asked == [{"rate": pytest.approx(7740.0 / mean), "gpus": None}]


def test_a_run_is_on_the_frontier_unless_another_is_as_fast_and_higher_or_faster_and_as_high():
    runs = pd.DataFrame(
        [(10.0, 100.0), (10.0, 90.0), (20.0, 100.0), (30.0, 40.0), (30.0, 40.0)],
        columns=["interactivity_measured", "throughput_measured"],
    )
    assert on_frontier(runs).tolist() == [False, False, True, True, True]


def split_run(row: str, concurrency: float, tpot: float, throughput: float, *, prefill: int, decode: int) -> ServingRow:
    """R1 in fp8 on B200: prefill workers and decode workers of DP8 EP8."""
    made = Measurement(name="throughput", measured=throughput, basis="total", gpus=8.0 * (prefill + decode))
    wide = instance(8, ep=8, dp=0)
    return made_run(
        row,
        form="inferencex_dsr1",
        quantities=(*latencies(tpot=tpot, ttft=1.0), made),
        model="deepseek_r1",
        system="b200_sxm",
        engine="trtllm",
        mode="disaggregated",
        workers=WorkerGroup(count=decode, mapping=wide),
        prefill=WorkerGroup(count=prefill, mapping=wide),
        isl=7372.8,
        osl=921.6,
        concurrency=concurrency,
    )


TWO_RUNS = [
    split_run("slow", 512, 1 / 20.0, 3000.0, prefill=3, decode=2),
    split_run("fast", 64, 1 / 50.0, 900.0, prefill=1, decode=2),
]


def test_heights_at_the_interactivity_of_each_published_run():
    """Three prefill workers beside two of decode; a run of one prefill worker has no ratio to judge.

    Frontiers are in output tokens; with 8 tokens in for one out they are 9 times as high. What is free to choose is at
    least as high as the kinds that ran, whose layout is among the free ones.
    """
    rows = [
        *TWO_RUNS,
        split_run("beaten", 72, 1 / 45.0, 800.0, prefill=1, decode=2),
        split_run("beyond", 8, 1 / 80.0, 100.0, prefill=1, decode=2),
        replace(split_run("doubtful", 256, 1 / 30.0, 9000.0, prefill=1, decode=2), qa_flag="check"),
    ]
    table = evaluate(rows)
    (group,) = split_groups(table, rows)
    optima = judged_optima([group])
    assert optima["published"].tolist() == pytest.approx([900.0, 3000.0])
    assert optima["prefill_over_decode"].tolist() == [0.5, 1.5]
    assert optima["ratio_over_published"].notna().tolist() == [False, True]
    forecast = table[table["quantity"] == "throughput"].set_index("row")["predicted"]
    assert optima["as_run"].tolist() == pytest.approx([forecast["fast"] / 900.0, forecast["slow"] / 3000.0])
    assert (optima["same_kinds"] >= optima["same_workers"] * (1 - 1e-9)).all()
    assert (optima["same_kinds"] >= optima["planned"] * (1 - 1e-9)).all()
    assert (optima["free"] >= optima["same_kinds"] * (1 - 1e-9)).all()
    workers = group.frontiers["same_workers"]
    best = group.best(workers, 20.0)
    assert best["ctx_gen_gpu_ratio"] / 1.5 == pytest.approx(optima["ratio_over_published"][1])
    beside = workers[workers["tokens_per_s_per_user"] >= 20.0]["tokens_per_s_per_gpu"].max()
    assert optima["same_workers"][1] * 3000.0 >= 9.0 * beside * (1 - 1e-9)  # between two points the curve is higher


def test_a_planned_frontier_fits_the_largest_run_and_leaves_prefill_room():
    """The runs have 8 x (3 + 2) and 8 x (1 + 2) GPUs; 85 % of what the prefill workers can do carries the rate."""
    (group,) = split_groups(evaluate(TWO_RUNS), TWO_RUNS)
    planned, wide = group.frontiers["planned"], group.frontiers["same_kinds"]
    assert 24 < planned["total_gpus"].max() <= 40 < wide["total_gpus"].max()
    assert set(planned["decode_ep"]) > {8}  # other degrees of the kind that ran
    alone = prefill_grid(group.at, [instance(4, ep=4, dp=0)], group.lengths).request_rate.max()
    mine = planned[planned["prefill_ep"] == 4]
    rate = mine["tokens_per_s_per_gpu"] * mine["total_gpus"] / group.lengths.mean_osl
    assert (rate / (alone * mine["prefill_instances"])).max() == pytest.approx(0.85, rel=1e-6)


MLPERF = (
    "row_id,mlperf_id,submitter,division,hardware,gpu_family,gpus_total,model,precision_weights,framework,scenario,"
    "samples_per_s,tokens_per_sample_out,value,slo_ttft_ms,slo_tpot_ms\n"
    "a,6.0-1,Somebody,closed,NVIDIA H200-SXM-141GB,H200,1,llama3.1-8b,fp8,TensorRT 10.14,Server,40,129,5160,2000,100\n"
    "b,6.0-2,Nobody,closed,NVIDIA H200-SXM-141GB,H200,1,llama3.1-8b,fp8,TensorRT 10.14,Server,50,129,6450,2000,100\n"
)


def test_boards_count_as_met_up_to_15_percent_from_their_run(tmp_path, capsys, monkeypatch):
    """0.85 and 1.15 of four; the board that is set aside is none of them then, and one without a plan says why."""
    ratios = [0.85, 1.15, 0.84, 1.16, math.nan]
    assert met(pd.DataFrame({"plan_over_run": ratios})) == "2 of 4 (median 1.00)"
    lines = {"model": list("abcde"), "system": "s", "scenario": "Server", "plan_over_run": ratios, "planned": "8 x TP1"}
    lines |= {"never_served": ["", "PP", None, "", ""], "reason": [*[""] * 4, "no room"]}
    made = pd.DataFrame(lines | {"set_aside": ["untuned", "", "", "", ""]})
    monkeypatch.setattr(validate_served, "judged_boards", lambda *_, **__: made)
    (tmp_path / "mlperf.csv").write_text(MLPERF)
    assert run(["validate", "optimum", str(tmp_path / "mlperf.csv"), "--out", str(tmp_path / "out")]) == 0
    assert pd.read_csv(tmp_path / "out" / "boards.csv")["plan_over_run"].tolist()[:4] == ratios[:4]
    assert pd.read_csv(tmp_path / "out" / "optima.csv").empty
    told = capsys.readouterr().out
    assert told.count("8 x TP1 *") == 1
    assert "e on s, Server: no room\n" in told
    assert "set aside: a on s, Server: untuned\n" in told
    ends = "boards within 0.85 to 1.15: 2 of 4 (median 1.00); 1 of 3 (median 1.15) without those set aside\n"
    assert told.endswith(ends)
