"""Find the serving policies that a scenario may name: registered ones, and those of the user's Python files."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path

from disagg_sim.errors import DisaggSimError, PolicyError, SpecError, UnknownNameError, given_twice, nearest, quoted
from disagg_sim.facts.yaml_files import shown
from disagg_sim.scenario.option_values import Form
from disagg_sim.scenario.policy_text import PolicyText, form_of, python_file, read_policies, text_of
from disagg_sim.simulation.faults import is_own, own_faults
from disagg_sim.simulation.policies.registry import policies


def load_policies(path: str) -> None:
    """Import a file that registers serving policies, once in a process."""
    path = str(Path(path).absolute())  # one file, imported once, however it is named
    if _imported(path) != text_of(Path(path)):
        said = "written since this process imported it; start the process, or the workers of the cluster, again"
        raise SpecError(f"{shown(Path(path))}: {said}")


@cache
def _imported(path: str) -> bytes:
    """Import a policy file; its text then."""
    file, text = python_file(Path(path)), text_of(Path(path))
    name = f"disagg_sim_policies_{file.stem}"
    found = importlib.util.spec_from_file_location(name, file)
    assert found is not None, "Python loads .py"
    assert found.loader is not None, "Python loads .py"
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        with own_faults(shown(file), name):
            found.loader.exec_module(module)
    except PolicyError as error:
        cause = error.__cause__
        if isinstance(cause, SyntaxError) and Path(cause.filename or "").resolve() == file.resolve():
            raise SpecError(f"{shown(file)}: line {cause.lineno}: {cause.msg}") from None
        if isinstance(cause, DisaggSimError):
            raise SpecError(f"{shown(file)}: {cause}") from None
        raise SpecError(str(error)) from cause
    return text


class KnownPolicies:
    """Policies that a scenario may name."""

    def __init__(self, run: bool) -> None:
        self.run = run
        self._texts: list[PolicyText] = []
        self._open = False  # whether there may be policies that are not known
        there = {name: kind for name, kind in policies().items() if run or not is_own(kind.__module__)}
        self._forms = {name: form_of(name, kind) for name, kind in there.items()}

    def take(self, path: str) -> None:
        """Add the policies of a policy file; ``SpecError`` for its faults."""
        before, self._open = self._open, True  # a file that has faults may hold any policy
        if self.run:
            load_policies(path)
            self._forms = {name: form_of(name, kind) for name, kind in policies().items()}
            self._open = before
        else:
            text = read_policies(Path(path))
            if twice := given_twice([*self._forms, *(form.name for form in text.forms)]):
                raise SpecError(f"{shown(text.path)}: policy {quoted(twice)} is registered twice")
            self._texts.append(text)
            self._forms |= {form.name: form for form in text.forms}
            self._open = before or not text.whole

    def form(self, name: str) -> Form | None:
        """What may be said of a policy; None for one that cannot be known; ``UnknownNameError`` where there is none."""
        if name not in self._forms and not self._open:
            known = ", ".join(sorted(self._forms))
            raise UnknownNameError(f"unknown policy {quoted(name)}{nearest(name, self._forms)}; known: {known}")
        return self._forms.get(name)

    def needs(self, name: str) -> tuple[str, ...]:
        """Parts of a deployment that a policy takes; empty where that is not known."""
        form = self._forms.get(name)
        return (form.needs if form is not None else None) or ()

    def notes(self) -> tuple[str, ...]:
        """A line a file on what its text did not tell."""
        return tuple(_note(text) for text in self._texts)


def _note(text: PolicyText) -> str:
    names = ", ".join(form.name for form in text.forms) or "no policy by its text"
    open_ = [f"the options of {form.name}" for form in text.forms if not form.whole]
    open_ += [f"{form.name}.{key}" for form in text.forms for key, known in form.options.items() if known is None]
    open_ += [f"the parts that {form.name} takes" for form in text.forms if form.needs is None]
    open_ += [] if text.whole else ["names that it registers as it runs"]
    beside = f" {', '.join(open_)}," if open_ else ""
    return (
        f"{shown(text.path)}: read, not run (registers {names}); not checked:{beside} whether it can be imported, "
        "and what it decides"
    )
