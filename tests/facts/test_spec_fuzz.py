"""However a file is spoilt, it loads or is refused with faults in one line each; never a traceback."""

import copy
import random

import pytest
import yaml

from disagg_sim.errors import SpecError
from disagg_sim.facts.load import check_file
from disagg_sim.facts.yaml_files import spec_files

JUNK = [
    None,
    "",
    "x",
    "1 GB",
    "-5 ms",
    "1e400",
    -1,
    0,
    10**30,
    1.5,
    float("inf"),
    float("nan"),
    True,
    [],
    [[1]],
    {},
    {"x": 1},
    {1: 2},
    ["a", None],
]
FILES = [
    ("hardware", "h100_sxm"),
    ("efficiency", "a100_sxm_80gb"),
    ("efficiency", "h800_sxm"),
    ("precision", "fp8"),
    ("precision", "nvfp4_fp8kv"),
    ("profile", "measured"),
    ("model", "deepseek_r1"),
    ("model", "gpt_oss_120b"),
    ("traffic", "mooncake_long_prompts"),
    ("traffic", "short_answers"),
]


def places(node, path=()):
    if isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield (*path, key)
            yield from places(value, (*path, key))


def spoil(data, rng):
    data = copy.deepcopy(data)
    *outer, key = rng.choice(list(places(data)))
    node = data
    for each in outer:
        node = node[each]
    action = rng.choice(("replace", "replace", "remove", "rename"))
    if action == "replace":
        node[key] = rng.choice(JUNK)
    elif action == "remove":
        del node[key]
    elif isinstance(node, dict):
        node[rng.choice([f"{key}s", 7, None, True])] = node.pop(key)
    return data


def refusal(path):
    try:
        check_file(path)
    except SpecError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("kind", "name"), FILES)
def test_a_spoilt_file_is_refused_without_a_traceback(tmp_path, kind, name):
    original = yaml.safe_load(spec_files(kind)[name].read_text(encoding="utf-8"))
    directory = tmp_path / spec_files(kind)[name].parent.relative_to(spec_files("model")["kimi_k2"].parents[1])
    directory.mkdir(parents=True)
    for seed in range(20):
        path = directory / f"{seed}.yaml"
        rng = random.Random(seed)
        data = spoil(original, rng)
        path.write_text(yaml.safe_dump(spoil(data, rng) if data else data), encoding="utf-8")
        text = refusal(path)
        if text:
            first, *others = text.splitlines()
            assert first.startswith(f"{path}:")
            assert all(line.startswith("  - ") for line in others)
            assert "pydantic" not in text
