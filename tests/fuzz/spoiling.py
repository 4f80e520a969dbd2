"""Ways to spoil a document, a table, a file and a command line; each takes the random stream that decides."""

import copy
import datetime
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import yaml

#: What a hostile string says when it is run: the judge looks for the file afterwards.
CANARY = "canary"

#: Strings that are read as something else somewhere: numbers, paths, code, formats, markup, other scripts.
STRINGS = (
    *("", " ", "x", "nan", "inf", "-inf", "1e400", "-1", "0", "1_000", "0x10", "1,5", "\u0661\u0662", "1 GB", "-5 ms"),
    *(
        "4 TB/s",
        "none",
        "null",
        "~",
        "true",
        "../../x",
        "/dev/null",
        "a/b",
        "a\nb",
        "a\tb",
        "a\x00b",
        "\ufeff",
        "\u202e",
    ),
    *(
        "\u00e9\u0301",
        "x" * 3000,
        "%s%n",
        "{0.__class__}",
        "[red]x[/red]",
        "=1+1",
        "'",
        '"',
        "`",
        "#",
        "*",
        "&a",
        "!!x",
    ),
    *(
        "llama_3_1_8b",
        "deepseek_r1",
        "h100_sxm",
        "gb200_nvl72",
        "fp8",
        "nvfp4_fp8kv",
        "measured",
        "vllm",
        "disaggregated",
    ),
    f"$(touch {CANARY})",
    f"; touch {CANARY}",
    f"__import__('os').system('touch {CANARY}')",
    f"@__import__('os').system('touch {CANARY}')",
    f"(lambda: __import__('os').system('touch {CANARY}'))()",
)

#: Values of YAML that a key does not expect.
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, -1, 3, 7, 1000, 10**7, 10**30, 2**63, -(2**63)),
    *(1.5, 0.0, -0.0, 1e-9, 5e-324, 1e308, float("inf"), float("-inf"), float("nan")),
    *([], {}, [[]], [{}], [None], {"x": 1}, {1: 2}, ["a", None], [1, 2, 3], {"kind": "x"}, {"isl": 8, "osl": 8}),
    *(list(range(50)), datetime.date(2026, 1, 2), b"\x00\xff"),
    *STRINGS,
)

#: Nine aliases of nine of nine ...: a file of a few lines that unfolds to nine to the eighth.
_NINE_FOLD = [("*" + "abcdefgh"[i - 1] if i else "x", name) for i, name in enumerate("abcdefgh")]
#: Lines of YAML that a loader may expand, or take for a call.
YAML_LINES = (
    f'evil: !!python/object/apply:os.system ["touch {CANARY}"]',
    f'? !!python/object/new:os.system ["touch {CANARY}"]\n: 1',
    "\n".join(f"{name}: &{name} [{', '.join([before] * 9)}]" for before, name in _NINE_FOLD),
    "self: &self {again: *self}",
    "merged: {<<: {name: x}}",
    "deep: " + "[" * 2000 + "]" * 2000,
    "%YAML 9.9",
    "---",
    "\tname: x",
    "name: [",
    "name: x",
    "name: {a: 1, a: 2}",
    "stamp: 2026-13-45",
    "big: 1" + "0" * 5000,
    "time: 1:2:3",
    "? [a, b]\n: 1",
    "set: !!set {a, b}",
    "binary: !!binary ////",
    "...",
)


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place below the root of a document."""
    if isinstance(node, dict | list):
        for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
            yield (*path, key)
            yield from places(value, (*path, key))


def spoilt_document(document: Any, rng: Random) -> Any:
    """A copy with one place replaced, removed, renamed, wrapped, repeated or swapped with another."""
    document = copy.deepcopy(document)
    there = list(places(document))
    if not there:
        return rng.choice(VALUES)
    *outer, key = rng.choice(there)
    node = document
    for each in outer:
        node = node[each]
    action = rng.choice((*("replace",) * 3, "remove", "rename", "list", "mapping", "repeat", "scale", "add"))
    if action == "replace":
        node[key] = copy.deepcopy(rng.choice(VALUES))
    elif action == "remove":
        del node[key]
    elif action == "list":
        node[key] = [node[key], copy.deepcopy(rng.choice(VALUES))]
    elif action == "mapping":
        node[key] = {rng.choice(STRINGS): node[key]}
    elif action == "scale" and isinstance(node[key], int | float):
        node[key] = node[key] * rng.choice((0, -1, 0.5, 1e-6, 1e6, 1e12, 3))
    elif action == "repeat" and isinstance(node[key], list):
        node[key] = node[key] * rng.choice((2, 5))
    elif isinstance(node, dict):
        name = rng.choice((f"{key}s", str(key).upper(), 7, None, True, *STRINGS))
        node[name] = node[key] if action == "add" else node.pop(key)
    return document


def spoilt_yaml(document: Any, rng: Random) -> bytes:
    """A document spoilt once or twice, and one file in four spoilt as text, too."""
    for _ in range(rng.choice((1, 1, 2))):
        document = spoilt_document(document, rng)
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    if rng.random() < 0.15:
        text += rng.choice(YAML_LINES) + "\n"
    data = text.encode("utf-8", "surrogatepass")
    return spoilt_bytes(data, rng) if rng.random() < 0.15 else data


def spoilt_bytes(data: bytes, rng: Random) -> bytes:
    """A file cut, emptied, recoded, or with bytes put in, taken out, turned or repeated."""
    at = rng.randrange(len(data) + 1)
    some = rng.randrange(1, 40)
    noise = rng.choice((b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\r", b'"', b"\n\n", b",,,,", b"\x1b[31m", b"9" * 400))
    return rng.choice(
        (
            data[:at],
            data[:at] + noise + data[at:],
            data[:at] + data[at + some :],
            data[: at + some] + data[at:],
            b"",
            b"\n",
            noise * 50,
            data.replace(b"\n", b"\r\n"),
            data.decode("latin-1").encode("utf-16"),
            b"\xef\xbb\xbf" + data,
            bytes(reversed(data)),
            data + b"\x1a",
            b"PK\x03\x04" + data,
            b"\x1f\x8b" + data,
        )
    )


def spoilt_table(text: str, rng: Random) -> bytes:
    """A CSV with cells, columns or lines replaced, removed or repeated; one in five spoilt as bytes."""
    rows = [line.split(",") for line in text.splitlines()]
    for _ in range(rng.choice((1, 1, 2, 3))):
        row = rng.choice(rows)
        column = rng.randrange(len(row))
        action = rng.choice(("cell", "cell", "cell", "drop", "extra", "column", "line", "again", "head"))
        if action == "cell":
            row[column] = rng.choice((*STRINGS, "1e9", "1e-9", "1e18", "-3.5", "99999999999999999999"))
        elif action == "drop":
            del row[column]
        elif action == "extra":
            row.insert(column, rng.choice(STRINGS))
        elif action == "column":
            for each in rows:
                del each[column : column + 1]
        elif action == "line" and len(rows) > 1:
            rows.remove(row)
        elif action == "again":
            rows.append(list(row))
        elif action == "head":
            rows[0][min(column, len(rows[0]) - 1) :][:1] = [rng.choice(STRINGS)]
        rows = [each or [""] for each in rows]
    data = "\n".join(",".join(row) for row in rows).encode("utf-8", "surrogatepass") + b"\n"
    return spoilt_bytes(data, rng) if rng.random() < 0.2 else data


def spoilt_content(name: str, content: bytes, rng: Random) -> bytes:
    """A file spoilt in the way of its format, which the end of its name says."""
    match Path(name).suffix:
        case ".yaml":
            return spoilt_yaml(yaml.safe_load(content), rng)
        case ".json":
            deep = rng.random() < 0.05
            document = spoilt_document(json.loads(content), rng)
            return b'{"a":' * 20_000 if deep else json.dumps(document, default=str).encode()
        case ".jsonl":
            rows = content.splitlines()
            at = rng.randrange(len(rows))
            rows[at] = json.dumps(spoilt_document(json.loads(rows[at]), rng), default=str).encode()
            return b"\n".join(rows)
    data = spoilt_table(content.decode(), rng)
    if rng.random() < 0.2:  # numbers that nothing can be computed with
        number = rng.choice((b"9" * 400, b"1e-320", b"1e308", b"-0.0", b"1e400"))
        data = data.replace(rng.choice((b"0", b"1", b"2", b"5")), number, rng.choice((1, 3)))
    return data


def spoilt_arguments(arguments: list[str], options: tuple[str, ...], rng: Random) -> list[str]:
    """A command line with words replaced, removed, repeated or added; never an absolute path to write to."""
    words = list(arguments)
    junk = (*STRINGS, "-", "--", "-h", "--help", "\udcff\udcfe", "-9" * 200, "missing.yaml", "here", "1", "2", "1e3")
    safe = tuple(word for word in junk if not word.startswith("/") and "\x00" not in word and ".." not in word)
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.randrange(1, len(words) + 1) if words else 0
        action = rng.choice(("replace", "remove", "option", "option", "flag", "again", "word"))
        if action == "replace" and at < len(words):
            words[at] = rng.choice(safe)
        elif action == "remove" and at < len(words):
            del words[at]
        elif action == "option":
            words[at:at] = [rng.choice(options), rng.choice(safe)]
        elif action == "flag":
            words.append(rng.choice((*options, "--nothing", "--jobs=0", "--rtol=nan", "--price=h100_sxm=nan")))
        elif action == "again" and at < len(words):
            words.append(words[at])
        elif action == "word":
            words.insert(at, rng.choice(safe))
    return words
