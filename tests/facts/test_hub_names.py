"""Names of the Hugging Face hub: fetched from a server of our own, then found in the cache without one."""

import json
import os
import subprocess
import sys
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from disagg_sim.errors import InputError
from disagg_sim.facts.hub.imported import import_model

CONFIG = json.dumps(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
).encode()
FILES = {"/own/Small-8B/resolve/main/config.json": CONFIG}
COMMAND = "import sys; from disagg_sim.cli.main import run; sys.exit(run(sys.argv[1:]))"


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

    def told(name, **others):
        command = [sys.executable, "-c", COMMAND, "model", "import", name]
        done = subprocess.run(
            command, cwd=tmp_path, env=os.environ | own | others, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout, done.stderr

    try:
        first, missing = told("own/Small-8B"), told("own/Missing")
    finally:
        server.shutdown()
        server.server_close()
    assert first[0] == 0, first
    assert 'source: "config.json of own/Small-8B (Hugging Face)"' in first[1]
    assert "8,030,261,248; +0.38% against 8e9 in its name" in first[1]
    assert missing[0] == 2
    assert missing[2].splitlines()[-1].startswith("error: 'own/Missing': no such file, and not fetched from the hub: ")
    assert told("own/Small-8B", HF_HUB_OFFLINE="1")[:2] == first[:2]
    assert told("own/Other", HF_HUB_OFFLINE="1")[0] == 2


def test_without_the_library_a_name_of_the_hub_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        InputError, match="no such file; a name of the Hugging Face hub needs huggingface_hub: pip install"
    ):
        import_model("own/Small-8B")
