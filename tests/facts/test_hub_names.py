"""Names of the Hugging Face hub: fetched from a server of our own, then found in the cache without one."""

import json
import os
import subprocess
import sys
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from test_hub_import import LLAMA

from disagg_sim.cli.main import run
from disagg_sim.errors import InputError
from disagg_sim.facts.hub.imported import import_model

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
