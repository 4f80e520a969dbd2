"""Parse YAML text into plain values, within bounds: no tags that make objects, no exponential aliases."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import yaml

from disagg_sim.errors import quoted

#: Largest file. [B]
MOST_BYTES = 16 * 10**6
#: Values of a document, each alias counted with all that it stands for; the largest shipped file has 5,000. [1]
MOST_VALUES = 200_000
#: Lists and mappings inside each other; the shipped files have five. [1]
DEEPEST = 50
_TOO_DEEP = f"more than {DEEPEST} lists and mappings inside each other"
#: Characters that no text may hold: controls but tab and line ends, and those that turn the direction of reading.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x84\x86-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
#: Whole numbers that YAML 1.1 takes for octal.
_OCTAL = re.compile("[-+]?0[0-9_]+")
#: What a reader of one scalar raises for a text that is none.
_NO_VALUE = (ValueError, KeyError, AttributeError, IndexError, OverflowError)


def parse_yaml(text: str) -> object:
    """Content of a YAML document: mappings with text keys, lists, texts, numbers, true, false and null."""
    try:
        _require_bounds(text)
        return yaml.load(text, Loader=_loader())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        before = text[: mark.index] if mark and isinstance(error, yaml.scanner.ScannerError) else ""
        # some parsers refuse many open brackets with words of their own, before any event of them
        looked_ahead = sum(map(before.count, "[{")) - sum(map(before.count, "]}")) > DEEPEST
        raise ValueError(f"broken YAML: {place}{_TOO_DEEP if looked_ahead else error.problem}") from None
    except yaml.YAMLError as error:
        reason = " ".join(str(getattr(error, "reason", error)).split())
        raise ValueError(f"not a YAML file: {reason}") from None


def _fault(problem: str, mark: Any) -> Exception:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def _require_bounds(text: str) -> None:
    """Reject a document that is nested too deeply or expands to too much, before any object is made.

    The events of the parser come one by one, without recursion, so that neither the stack nor the memory is at risk.
    """
    sizes: dict[str, int] = {}  # of what an anchor stands for
    open_: list[tuple[str | None, int]] = []  # anchor and values before, of every list and mapping around
    values = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _ in open_):
                raise _fault(f"alias {quoted(f'*{event.anchor}')} contains itself", event.start_mark)
            values += sizes.get(str(event.anchor), 1)
        elif isinstance(event, yaml.ScalarEvent):
            values += 1
            if event.anchor:
                sizes[event.anchor] = 1
            if found := _CONTROL.search(event.value):
                raise _fault(f"a text holds the control character {found[0]!r}", event.start_mark)
        elif isinstance(event, yaml.CollectionStartEvent):
            open_.append((event.anchor, values))
            values += 1
            if len(open_) > DEEPEST:
                raise _fault(_TOO_DEEP, event.start_mark)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_.pop()
            if anchor:
                sizes[anchor] = values - before
        if values > MOST_VALUES:
            raise _fault(f"more than {MOST_VALUES} values with aliases expanded", event.start_mark)


def _ambiguous(node: Any) -> str:
    """What is wrong with a number that YAML 1.1 reads in base 60 or 8, where hardly anybody means that."""
    if not str(node.tag).endswith((":int", ":float")):
        return ""
    base = "60" if ":" in node.value else "8" if _OCTAL.fullmatch(node.value) else ""
    said = "write the number without ':' or leading 0, or the text in quotation marks"
    return f"{quoted(node.value)} is a number in base {base} to YAML; {said}" if base else ""


@cache
def _loader() -> Any:
    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(base):  # type: ignore[misc]
        """SafeLoader that rejects duplicate and non-string keys and keeps dates as strings."""

        def construct_object(self, node: Any, deep: bool = False) -> Any:
            if isinstance(node, yaml.ScalarNode) and (told := _ambiguous(node)):
                raise _fault(told, node.start_mark)
            try:
                return super().construct_object(node, deep)
            except _NO_VALUE:
                kind = str(node.tag).rpartition(":")[2]
                raise _fault(f"{quoted(node.value)} cannot be read as {kind}", node.start_mark) from None

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[str, Any]:
            seen: set[str] = set()
            for key_node, _ in node.value:
                if key_node.tag == "tag:yaml.org,2002:merge":
                    continue
                key = self.construct_object(key_node, deep=True)
                if not isinstance(key, str):
                    raise _fault(f"key {quoted(key)} is not text", key_node.start_mark)
                if "\n" in key or "\x85" in key:
                    raise _fault(f"key {quoted(key)} has a line end in it", key_node.start_mark)
                if key in seen:
                    raise _fault(f"key {quoted(key)} is given twice", key_node.start_mark)
                seen.add(key)
            result: dict[str, Any] = super().construct_mapping(node, deep)
            return result

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in pairs if tag != "tag:yaml.org,2002:timestamp"]
        for first, pairs in base.yaml_implicit_resolvers.items()
    }
    return Loader
