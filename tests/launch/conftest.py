"""Programs that print their arguments, in the place of those that scripts start."""

import sys

import pytest

PROGRAMS = ("vllm", "python3", "trtllm-serve", "srun", "vllm-router")
RECORDER = (
    f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]))\n"
)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    where = tmp_path_factory.mktemp("bin")
    for name in PROGRAMS:
        (where / name).write_text(RECORDER)
        (where / name).chmod(0o755)
    return where
