"""Encode pools in launch files: SGLang's options, each with its source; one line where nothing can be started."""

import pytest

import disagg_sim as ds
from disagg_sim.cli.main import run
from disagg_sim.errors import InputError
from disagg_sim.facts.load import load_launcher
from disagg_sim.launch.expressible import expressible
from tests.launch.deployments import tp, workers

COMMAND = ("plan", "--model", "qwen3_5_35b_a3b", "--system", "h200_sxm", "--isl", "4096", "--osl", "256")
ENCODE = ("--pools", "encode,prefill,decode", "--images", "2x1120x1120", "--gpus", "8")


@pytest.fixture(scope="module")
def three():
    at = ds.setup("qwen3_5_35b_a3b", "h200_sxm", "fp8", engine="sglang")
    prefill = workers("prefill", at, tp(2), 2, batch=4, token_budget=16384)
    return workers("encode", at, ds.Sharding(), 2), prefill, workers("decode", at, tp(2), 1, batch=64)


def test_encoders_run_alone_and_prefill_without_them(three):
    made = ds.launch(three, engine="sglang")
    assert sorted(made.files) == ["decode.sh", "encode.sh", "prefill.sh", "router.sh"]
    encode, prefill, decode = (made.files[f"{name}.sh"] for name in ("encode", "prefill", "decode"))
    assert "--encoder-only" in encode
    assert "--disaggregation-mode" not in encode
    assert "--disaggregation-mode prefill" in prefill
    assert prefill.rstrip().endswith("--encoder-urls $ENCODE_URLS")
    assert "--language-only" in prefill
    assert "encoder" not in decode
    known = load_launcher("sglang").options
    flags = {word for text in (encode, prefill) for word in text.split() if word.startswith("--")}
    assert flags <= {*known}
    assert any("no run has checked" in note for note in made.notes)


def test_without_encoders_the_files_are_as_ever(three):
    with_them, alone = ds.launch(three, engine="sglang"), ds.launch(three[1:], engine="sglang")
    assert with_them.files["decode.sh"] == alone.files["decode.sh"]
    assert "encoder" not in alone.files["prefill.sh"]


@pytest.mark.parametrize("engine", ["vllm", "trtllm", "dynamo", "llm-d"])
def test_other_launchers_say_in_one_line_why_not(three, engine):
    (reason,) = [line for line in expressible(three, engine) if "encode pools" in line]
    assert reason.startswith(f"encode pools of {engine}: ")


@pytest.mark.usefixtures("without_changes")
def test_a_plan_is_written_and_one_of_halves_is_refused(capsys, tmp_path):
    assert run([*COMMAND, *ENCODE, "--emit", "sglang", "--out", str(tmp_path)]) == 0
    assert "encode.sh" in capsys.readouterr().out
    assert (tmp_path / "start" / "encode.sh").stat().st_mode & 0o100
    assert run([*COMMAND, "--pools", "prefill,attention,ffn", "--gpus", "8", "--emit", "sglang"]) == 2
    assert "no engine ships attention-FFN disaggregation" in capsys.readouterr().err


def test_a_launch_of_halves_names_what_can_be_launched():
    options = ds.PlanOptions(pools=("prefill", "attention", "ffn"))
    found = ds.plan("llama_3_1_70b", "h200_sxm", ds.lengths(4096, 512), gpus=8, tpot=0.1, options=options)
    with pytest.raises(InputError, match="plan with encode, prefill and decode"):
        ds.launch(found.best, engine="sglang")
