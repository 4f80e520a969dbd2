"""Every ``config.json`` of the data folder: parameters within 1 % of the published number, recipe, and the refusals.

``hub_models.csv`` has the published parameters [1e9] as the model cards, names or element counts have them, and why a
count differs by more. ``FACTS`` holds sizes that were derived apart: by hand, or printed by the publishers.
"""

import csv
import gzip
import json
import os
import subprocess
import sys
from functools import cache
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from threading import Thread

import pytest
from fuzz.spoiling import spoilt_document
from shared_data import shared_file
from test_hub_import import LLAMA

from disagg_sim.cli.main import run
from disagg_sim.errors import InputError, SpecError
from disagg_sim.facts.hub.imported import import_model
from disagg_sim.facts.load import load_model, load_precision

MODELS = {row["id"]: row for row in csv.DictReader((Path(__file__).parent / "hub_models.csv").open(encoding="utf-8"))}
IMPORTED = {name: row for name, row in MODELS.items() if not row["refused_for"]}


@cache
def config_file(name, folder):
    """The file with ``hf_quant_config.json`` beside it, unpacked into a folder where one of them is packed."""
    source = shared_file(f"hf_configs/{MODELS[name]['file']}")
    packed = source.with_name(f"{source.name.partition('.json')[0]}.hf_quant_config.json.gz")
    if not packed.is_file():
        return source
    for each in (source, packed):
        content = each.read_bytes()
        unpacked = gzip.decompress(content) if each.suffix == ".gz" else content
        (folder / each.name.removesuffix(".gz")).write_bytes(unpacked)
    return folder / source.name.removesuffix(".gz")


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("configs")


def test_nine_of_ten_files_are_read():
    assert len(IMPORTED) >= 0.9 * len(MODELS)


def test_parameters_are_the_published_ones(folder):
    for name in IMPORTED:
        found, row = import_model(config_file(name, folder)), MODELS[name]
        assert found.unknown == ()
        assert found.recipe == row["recipe"]
        if row["exact"]:
            assert found.model.total_params == round(float(row["published_b"]) * 1e9)
        elif row["published_b"]:
            within = abs(found.model.total_params / (float(row["published_b"]) * 1e9) - 1) <= 0.01
            assert within == (not row["off_because"])


@pytest.mark.parametrize("name", sorted(MODELS.keys() - IMPORTED.keys()))
def test_what_cannot_be_expressed_is_refused_with_its_key(name, folder):
    with pytest.raises(SpecError) as refusal:
        import_model(config_file(name, folder))
    assert str(refusal.value).endswith(f".json: {MODELS[name]['refused_for']}")


#: Parameters [1], cache of a token in bf16 [B], state of a sequence [B].
FACTS = {
    # 12 full layers of 48 keep 2 heads of 256, keys and values; 36 states of 32 matrices of 128x128 in fp32 and
    # 3 columns of 8,192 channels in bf16
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (79_674_391_296, 12 * 2 * 2 * 256 * 2, 36 * (32 * 128**2 * 4 + 3 * 8192 * 2)),
    # 24 latents of 576; 69 states of 96 matrices and 3 columns of q, k and v
    "moonshotai/Kimi-K3": (2_779_484_476_000, 24 * 576 * 2, 69 * (96 * 128**2 * 4 + 3 * 3 * 96 * 128 * 2)),
    # 61 latents of 576 and index keys of 128 in fp8 with a scale
    "deepseek-ai/DeepSeek-V3.2": (671_877_944_064, 61 * (576 * 2 + 132), 0),
    # 78 latents; 21 layers have an index of their own
    "zai-org/GLM-5.2": (743_377_019_904, 78 * 576 * 2 + 21 * 132, 0),
    # 6 full layers keep 2 heads of 128; 23 states of 64 heads of 64x128, 3 columns of 4,096 + 2*8*128
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (
        31_577_940_288,
        6 * 2 * 2 * 128 * 2,
        23 * (64 * 64 * 128 * 4 + 3 * (4096 + 2048) * 2),
    ),
    # 60 layers keep 4 heads of 128, keys and values; 57 an index key of 128 in bf16
    "MiniMaxAI/MiniMax-M3": (426_174_572_928, 60 * 2 * 4 * 128 * 2 + 57 * 128 * 2, 0),
    # 50 windows keep 16 heads of 256, 10 full layers 4 of 512
    "nvidia/Gemma-4-31B-IT-NVFP4": (30_697_345_280, (50 * 16 * 256 + 10 * 4 * 512) * 2 * 2, 0),
    # 9 full layers keep 4 heads of 192 + 128, 39 windows 8
    "XiaomiMiMo/MiMo-V2-Flash": (308_778_780_864, (9 * 4 + 39 * 8) * (192 + 128) * 2, 0),
}


@pytest.mark.parametrize("name", FACTS)
def test_sizes_derived_by_hand(name, folder):
    model = import_model(config_file(name, folder)).model
    bf16 = load_precision("bf16").resolve(model)
    assert (model.total_params, model.kv_bytes_per_token(bf16), model.state_bytes) == FACTS[name]


@pytest.mark.parametrize("name", FACTS)
def test_a_spoilt_config_loads_or_is_one_clear_error(name, folder, tmp_path):
    """Values of every depth become junk: lists of layers, sections of linear and sparse attention, quantisation."""
    whole = json.loads(config_file(name, folder).read_text(encoding="utf-8"))
    path, rng = tmp_path / "c.json", Random(name)
    refused = 0
    for _ in range(20):
        path.write_text(json.dumps(spoilt_document(whole, rng), skipkeys=True, default=str), encoding="utf-8")
        try:
            assert import_model(path).model.total_params > 0
        except SpecError as error:
            refused += 1
            lines = str(error).splitlines()
            assert "c.json: " in lines[0] or all(line.startswith("  - ") for line in lines[1:])
    assert refused > 0


def kinds(model):
    return [(layer.attention.kind, layer.ffn.kind) for layer in model.layers]


def test_deepseek_v4_begins_with_windows_and_alternates(folder):
    """compress_ratios 0, 0, 4, 128, 4, ...: two windows, then entries of 4 tokens chosen and of 128 tokens whole."""
    layers = import_model(config_file("deepseek-ai/DeepSeek-V4-Flash", folder)).model.layers
    ratios = json.loads(shared_file("hf_configs/deepseek-ai--DeepSeek-V4-Flash.json").read_text())["compress_ratios"]
    assert [layer.attention.ratio for layer in layers] == ratios[:43]
    assert [layer.attention.kind for layer in layers] == ["hca", "hca"] + ["csa", "hca"] * 20 + ["csa"]


def test_nemotron_has_layers_of_one_operator(folder):
    """MEMEM*E...: a layer is a mixer or experts."""
    model = import_model(config_file("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", folder)).model
    assert kinds(model)[:7] == [
        ("mamba2", "none"),
        ("none", "moe"),
        ("mamba2", "none"),
        ("none", "moe"),
        ("mamba2", "none"),
        ("gqa", "none"),
        ("none", "moe"),
    ]


def test_kimi_counts_its_layers_from_one(folder):
    """full_attn_layers 4, 8, ...: the fourth layer is the first with latent attention; the last one is, too."""
    attention = [layer.attention.kind for layer in import_model(config_file("moonshotai/Kimi-K3", folder)).model.layers]
    assert attention[:5] == ["kda", "kda", "kda", "mla", "kda"]
    assert attention.count("mla") == 24


def test_every_fourth_layer_of_llama_4_sees_all_tokens(folder):
    layers = import_model(config_file("meta-llama/Llama-4-Maverick-17B-128E-Instruct", folder)).model.layers
    assert [layer.attention.chunk for layer in layers] == [8192, 8192, 8192, 0] * 12


def test_the_yaml_of_every_model_is_the_model(folder, tmp_path):
    for name in IMPORTED:
        found = import_model(config_file(name, folder))
        assert load_model(found.write(tmp_path)) == found.model, name


CONFIG = json.dumps(LLAMA).encode()

FILES = {"/own/Small-8B/resolve/main/config.json": CONFIG}

COMMAND = """
import sys
from pathlib import Path
from disagg_sim.cli.mcp import confined
from disagg_sim.cli.main import run
for name in sys.argv[1:]:
    with confined(Path()):  # as an agent asks for it; the library has its cache all the same
        print(run(["model", "import", name]), "<- code")
"""


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does: the file, its hash and the commit; 404 for all else."""

    def do_HEAD(self):
        content = FILES.get(self.path)
        self.send_response(404 if content is None else 200)
        self.send_header("X-Repo-Commit", "0" * 40)
        if content is None:
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
        else:
            self.send_header("ETag", f'"{sha1(content).hexdigest()}"')
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()

    def do_GET(self):
        self.do_HEAD()
        self.wfile.write(FILES.get(self.path, b""))

    def log_message(self, *_):
        """Nothing: tests are silent."""


def test_a_name_is_fetched_once_and_then_found_in_the_cache(tmp_path):
    pytest.importorskip("huggingface_hub")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    own = {"HF_HOME": str(tmp_path / "cache"), "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}

    def told(*names, **others):
        done = subprocess.run(
            [sys.executable, "-c", COMMAND, *names],
            cwd=tmp_path,
            env=os.environ | own | others,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout, done.stderr

    try:
        first, missing = told("own/Small-8B", "own/Missing")
    finally:
        server.shutdown()
        server.server_close()
    spec, code, rest = first.partition("0 <- code\n")
    assert code, missing
    assert 'source: "config.json of own/Small-8B (Hugging Face)"' in spec
    assert "8,030,261,248; +0.38% against 8e9 in its name" in spec
    assert rest == "2 <- code\n"
    assert missing.splitlines()[-1].startswith("error: 'own/Missing': no such file, and not fetched from the hub: ")
    assert told("own/Small-8B", "own/Other", HF_HUB_OFFLINE="1")[0] == first


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Names that the hub was asked for, by anything of its library; files here, and none in its cache."""
    hub = pytest.importorskip("huggingface_hub")
    found = []

    def caught(name, *_, **__):
        found.append(name)
        raise ConnectionError("nobody is there")

    for call in ("hf_hub_download", "get_hf_file_metadata"):
        monkeypatch.setattr(hub, call, caught)
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    return found


COMMANDS = (
    ["plan", "--system", "h100_sxm", "--isl", "1024", "--osl", "128", "--rate", "4", "--model"],
    ["explain", "--system", "h100_sxm", "--precision", "fp8", "--model"],
    ["model", "import"],
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
@pytest.mark.parametrize(
    "name",
    [
        *("models/mistyped", "./own/model", "~/own/model", "../own/model", "/own/model", "own/models/mine", "no_such"),
        *("own/model.yaml", "own/config.json", "own/MODEL.JSON", "own/trace.csv"),
    ],
)
def test_what_is_a_path_or_a_shipped_name_is_never_asked_of_the_hub(command, name, asked, capsys):
    assert run([*command, name]) == 2
    assert asked == []
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
def test_the_hub_is_asked_once_for_a_name_of_its_own_and_never_offline(command, asked, capsys, monkeypatch):
    assert run([*command, "own/model"]) == 2
    assert asked == ["https://huggingface.co/own/model/resolve/main/config.json"]
    assert "'own/model': no such file, and not fetched from the hub: nobody is there" in capsys.readouterr().err
    assert run([*command, "own/model", "--offline"]) == 2
    monkeypatch.setenv("HF_HUB_OFFLINE", "true")
    assert run([*command, "own/model"]) == 2
    assert len(asked) == 1
    said = "error: 'own/model': no such file, and the hub, whose cache lacks it, is not asked (offline)\n"
    assert capsys.readouterr().err == said * 2


def test_a_table_of_others_asks_nothing_of_the_hub(asked, tmp_path, capsys):
    sweep = "name: small\nmodels: llama_3_1_8b\nsystems: {h100_sxm: fp8}\ntraffic: [{isl: 1024, osl: 128}]\n"
    (tmp_path / "small.yaml").write_text(sweep + "limits: {max_gpus: 1, gpu_cap: 4}\nmodes: [colocated]\n")
    assert run(["sweep", "small.yaml", "--out", "out", "--jobs", "1"]) == 0
    text = (tmp_path / "out" / "frontier.csv").read_text()
    (tmp_path / "frontier.csv").write_text(text.replace(",llama_3_1_8b,", ",evil/name,"))
    capsys.readouterr()
    for command in (["explain"], ["launch", "--engine", "vllm", "--out", "start"]):
        assert run([command[0], "frontier.csv", "--best", *command[1:]]) == 2
        assert "column 'model' has 'evil/name', which is no name" in capsys.readouterr().err
    assert asked == []


def test_without_the_library_a_name_of_the_hub_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        InputError, match="no such file; a name of the Hugging Face hub needs huggingface_hub: pip install"
    ):
        import_model("own/Small-8B")
