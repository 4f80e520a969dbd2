"""Wrong command lines: one line that says what is allowed, exit code 2, and nothing on standard output."""

import shlex
from pathlib import Path

import pytest
from fault_tables import faults_of

from disagg_sim.cli.main import run

SCENARIOS = Path(__file__).parents[2] / "scenarios"
#: What stands before the words of a case.
BEFORE = {
    "two": f"launch {SCENARIOS}/two_models_on_h100_and_h200.yaml --engine vllm",
    "eight": f"launch {SCENARIOS}/azure_conv_on_h100.yaml --engine",
    "plan": "plan --model llama_3_1_8b --system h100_sxm --isl 1024 --osl 128",
    "pools": "plan --model qwen3_5_35b_a3b --system gb200_nvl72 --isl 4096 --osl 256 --gpus 32 --pools",
    "evaluate": "evaluate --model llama_3_1_8b --system h100_sxm --isl 2048 --osl 256 --rate 40 --pool",
    "llama": "explain --model llama_3_1_8b --system h200_sxm --precision fp8 --phase prefill",
    "r1": "explain --model deepseek_r1 --system gb200_nvl72 --precision nvfp4_fp8kv --phase",
    "ranks": "explain --model deepseek_r1 --system h200_sxm --precision fp8 --ep 8 --batch 64 --hold-prompts 7 --phase",
}
CASES = r"""
sweep demo --jobs 0 --out x :: --jobs
sweep demo --jobs two --out x :: --jobs
sweep demo :: --out
sweep :: FILE|NAME
sweep demo --dry-run --engine vlm :: did you mean 'vllm'
sweep dmo --dry-run :: did you mean 'demo'
sweep demo --dryrun :: --dry
sweep demo --out '' :: --out has an empty value
specs check '' :: an argument is empty
trace stats x.csv --seed -1 :: --seed
trace stats log.csv --kind mooncak :: did you mean 'mooncake'
trace stats log.csv --kind azure :: TIMESTAMP
trace stats log.csv --time-unit sec :: did you mean 's'
trace stats log.csv --column arrival=arival_s :: no column 'arival_s', did you mean 'arrival_s'?
trace stats log.csv --column arrival_s :: --column 'arrival_s' is not ROLE=HEADER
{two} :: 2 deployments: say --deployment; known: split, all_h100
{two} --deployment spilt :: no deployment 'spilt', did you mean 'split'?
{eight} vlm :: unknown engine 'vlm', did you mean 'vllm'?
{eight} vllm --row 3 :: --row chooses a row of a table of results
sweep smoke --dry-run --price h100_sxm=2 :: --price: act with 'per: usd' or 'columns: token_prices' only
specs list modle :: unknown kind 'modle', did you mean 'model'?; known: hardware, model, traffic, precision, profile
specs show model none.yaml :: none.yaml: no such file
specs show policy vlm :: unknown policy 'vlm', did you mean 'vllm'?; known: arrow, disaggregated, dopd
reproduce arow --out x :: did you mean 'arrow'?
reproduce beyond-the-buzz --figure 2 --out x :: figure 'fig02' is unknown
reproduce arrow --jobs 2 --out x :: --jobs does not go with arrow
check nowhere --baseline nowhere :: nowhere: no such file or directory
check nowhere :: --baseline
compare nowhere :: B
{plan} --isl=2k :: '2k' is not a valid integer
  ; write 2000 or 2048 (
{plan} --osl=1,024 :: '--osl': '1,024' is not a valid integer; write 1024 (
{plan} --confidence=much :: 'much' is not a number with a unit such as '90 %'
{plan} --rate 1e-320 :: rate
{plan} --ttft 1e-320 --rate 1 :: ttft
{plan} --rate 1 --traffic chat :: give the lengths once, by --isl and --osl or --traffic or --trace
{plan} --rate 1 --gpus 8 :: give one of gpus, rate and users
{plan} --rate 1 --price h100=2 :: 'h100' is not a system, did you mean 'h100_sxm'?
{plan} --rate 1 --objective usdd :: 'usdd' is unknown, did you mean 'usd'
{plan} --rate 1 --system h100_sxm,any :: 'any'
{plan} --rate 1 --ttft=500 :: ttft 500 has no unit, and nobody means 500s; say 500ms or 500s
{plan} --rate 1 --max-nic=400 :: '--max-nic': 400 has no unit, and nobody means 400GB/s; say 400Gbit/s or 400GB/s
{plan} --rate 1 --cached=90 :: '--cached': 90 is more than 1; say 90% or 0.9
{plan} --rate 1 --cached=-0.5 :: '--cached': -0.5 is out of range; allowed: from 0 to 1
{pools} prefil,attention,ffn :: did you mean 'prefill'
{pools} prefill,attention :: attention and ffn decode together
{pools} encode,prefill,decode :: encode needs them
{pools} prefill :: prefill serve no request
{pools} prefill,decode --images 2x1120x1120 :: images: need encode among the pools, as encode,prefill,decode
{pools} encode,prefill,decode --images 2x1120x1120@1.0 :: COUNTxHEIGHTxWIDTH
{pools} prefill,attention,ffn --hold-prompts 8 :: hold_prompts: only co-located instances hold prompts back
{pools} prefill,attention,ffn --confidence 0.9 :: attention and ffn pools have no error bars
{pools} prefill,attention,ffn --tpot '30 ms@p98' :: p90 where none is said
{pools} prefill,attention,ffn --speculate 2 --acceptance 'mtp 0.8 0.6' :: use 'off'
{pools} prefill,decode --ffn-system h200_sxm :: needs attention and ffn among the pools, such as prefill,attention,ffn
{evaluate} colocated --plan nowhere :: say the deployment once
{evaluate} decoed:tp=2 :: 'decoed' is no pool, did you mean 'decode'?; allowed: colocated, prefill, decode
{evaluate} colocated:tps=2 :: --pool colocated: unknown key 'tps', did you mean 'tp'?
{evaluate} colocated:tp=two :: --pool colocated: tp 'two' is no whole number
{evaluate} colocated:ep=3,tp=2 :: --pool colocated: ep 3 does not divide the 2 GPUs of a stage
{evaluate} decode --pool decode --pool prefill :: allowed: each role once
explain :: name either a table of results, or a design by --model and --system
{llama} --phase decoed :: did you mean 'decode'
{llama} --tp 4 --ep 3 :: --ep 3 does not divide the 4 GPUs of a stage
{llama} --tp 3 :: tp_attn does not divide 32 query heads
{llama} --tiers dram :: give --cached, too
{llama} --cached 0.9 --tiers hbm=0.5,dram=0.4 :: shares add up to 0.9; allowed: 1
{llama} --cached 0.9 --tiers hbm=-1,dram=2 :: 'hbm=-1' is out of range
{llama} --cached 0.9 --tiers hbm=nan :: 'hbm=nan'; allowed: TIER or TIER=SHARE
{llama} --best :: --best chooses a row
{llama} --phase decode --cached 0.9 :: --phase is decode; allowed: prefill, colocated, piggyback
{llama} --traffic 8192/256/cached0.5 --cached 0.9 :: what is cached already
{llama} --availability 0.9 --failures rsc_3 :: did you mean 'rsc_
{r1} attention_ffn --dp 16 --batch 3072 :: needs --ffn-gpus
{r1} attention_ffn --dp 16 --ffn-gpus 8 --batch 100 :: give n times 48
{r1} attention_ffn --dp 16 --ffn-gpus 8 --pp 2 :: no other degrees
{r1} encode :: needs --images
{r1} encode --images 2x1120x1120 :: deepseek_r1 has no encoder
{r1} decode --ffn-gpus 8 :: --ffn-gpus: only --phase attention_ffn takes it
{ranks} piggyback --dp 8 :: --hold-prompts is of --phase colocated; piggyback has chunks in decode steps
{ranks} colocated --tp 8 :: --hold-prompts 7: no gain for this design
"""


@pytest.mark.usefixtures("without_changes")
@pytest.mark.parametrize(("line", "parts"), faults_of(CASES))
def test_a_wrong_command_line_is_one_line(line, parts, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log.csv").write_text("arrival_s,input_tokens,output_tokens\n0,10,2\n")
    assert run(shlex.split(line.format(**BEFORE))) == 2
    told = capsys.readouterr()
    assert told.err.startswith("error: ")
    assert len(told.err.splitlines()) == 1
    assert all(part in told.err for part in parts)
    assert not told.out


@pytest.mark.parametrize(("word", "shown"), [("\x1b[31mred", r"\x1b[31mred"), ("\u202ered", r"\u202ered")])
def test_signs_that_move_a_cursor_are_written_out(word, shown, capsys):
    assert run(["specs", "show", "model", word]) == 2
    assert f"unknown model '{shown}'" in capsys.readouterr().err
