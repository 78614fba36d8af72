"""Small repositories with one defect, which a test shows: made by number, the same each time.

A repository is a package of a few modules with tests beside it. Its hidden tests are other calls and what they must return: they
never lie in a folder, so that neither the agent nor the code that it wrote can read them.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .defects import KINDS, broken
from .functions import FUNCTIONS, Function

ANY = "any"
MODULES = sorted({function.module for function in FUNCTIONS})
PACKAGES = ("toolbox", "almanac", "workshop", "kit", "ledger", "shop")
HELD_OUT_SHARE = 4
"""One place of a defect in this many is never trained on."""
OF_BROKEN, OF_OTHERS, SHOWN = 16, 3, 2
"""Hidden cases of the function with the defect, and of each other one; those of each function that the repository's tests show."""


LEAST_UNSEEN = 2
"""Hidden cases in which the defect shows, at the least: mending what a test shows is not enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A call and its result. expected: JSON of {"value": …} or {"raises": name}. fails: the defect shows in it."""

    module: str
    function: str
    arguments: list[Any]
    expected: str
    fails: bool

    def call(self) -> dict[str, Any]:
        return {"module": self.module, "function": self.function, "arguments": self.arguments}


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """files: text by path. package: the folder that holds the code. failing: the test that fails. hidden: what decides."""

    files: dict[str, str]
    package: str
    defect: str
    """Where it is and of which kind; equal ones are the same defect."""
    failing: str
    hidden: tuple[Case, ...]

    @property
    def held_out(self) -> bool:
        """Whether this defect is kept for evaluation. Depends on nothing else."""
        return hashlib.sha256(f"heldout:{self.defect}".encode()).digest()[0] % HELD_OUT_SHARE == 0

    def write(self, folder: Path) -> None:
        for path, text in self.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)


def repository(defect: str, modules: int, number: int) -> Repository:
    """The repository of this number. defect: one of `KINDS`, or `any`. modules: how many there are, from 1 to 9."""
    rng = random.Random(f"{defect}/{modules}/{number}")
    while True:
        kind = rng.choice(KINDS) if defect == ANY else defect
        chosen = rng.sample(MODULES, modules)
        sources = {
            each: ast.unparse(ast.parse(each.written(rng))) + "\n" for each in FUNCTIONS if each.module in chosen
        }
        victim = rng.choice(list(sources))
        for place, source in enumerate(broken(sources[victim], kind, random.Random(0))):
            cases = _cases(rng, victim, sources[victim], OF_BROKEN, source)
            if sum(case.fails for case in cases) > LEAST_UNSEEN and rng.random() < 0.5:
                others = [
                    case
                    for each in sources
                    if each is not victim
                    for case in _cases(rng, each, sources[each], OF_OTHERS)
                ]
                name = f"{victim.module}.{victim.name}:{kind}:{place}"
                return _assembled(rng.choice(PACKAGES), sources | {victim: source}, name, victim, [*cases, *others])


def _cases(rng: random.Random, function: Function, source: str, count: int, defective: str | None = None) -> list[Case]:
    """Different calls, those first in which the defect shows."""
    cases: dict[str, Case] = {}
    for _ in range(count * 4):
        arguments = function.arguments(rng)
        called = json.dumps(arguments)
        expected = result(source, function.name, called)
        fails = defective is not None and not same(result(defective, function.name, called), expected)
        cases.setdefault(
            called,
            Case(
                module=function.module,
                function=function.name,
                arguments=json.loads(called),
                expected=expected,
                fails=fails,
            ),
        )
    ordered = sorted(cases.values(), key=lambda case: not case.fails)
    most = count * 3 // 4  # the defect shows in so many at most: the others say what must stay as it is
    return [*ordered[:most], *[case for case in ordered[most:] if not case.fails]][:count]


def result(source: str, name: str, arguments: str) -> str:
    """What a function of ours returns for JSON arguments, as JSON. Not for code that an agent wrote: it runs here."""
    try:
        return json.dumps({"value": _compiled(source, name)(*json.loads(arguments))}, sort_keys=True)
    except Exception as error:  # noqa: BLE001 - that it raises, whatever it is, is the result
        return json.dumps({"raises": type(error).__name__})


@functools.lru_cache(maxsize=1024)
def _compiled(source: str, name: str) -> Callable[..., Any]:
    room: dict[str, Any] = {}
    exec(source, room)
    return room[name]  # type: ignore[no-any-return]


def same(one: str, other: str) -> bool:
    """Whether two results are equal, as Python compares them: 2 is 2.0."""
    try:
        return bool(json.loads(one) == json.loads(other))
    except (ValueError, RecursionError):  # what the agent's code wrote is no JSON
        return False


def _assembled(
    package: str, sources: dict[Function, str], defect: str, victim: Function, cases: Sequence[Case]
) -> Repository:
    files = {"README.md": _readme(package, sources), f"{package}/__init__.py": "", "tests/__init__.py": ""}
    for module in sorted({function.module for function in sources}):
        own = [function for function in sources if function.module == module]
        code = "\n\n".join(sources[function] for function in own)
        files[f"{package}/{module}.py"] = f'"""The {module} of {package}."""\n\n\n{code}'
        files[f"tests/test_{module}.py"] = _tests(package, module, own, cases)
    failing = f"tests.test_{victim.module}.{_class_of(victim)}.test_1"
    shown = [case for function in sources for case in _shown(_of(cases, function))]
    hidden = tuple(case for case in cases if case not in shown)
    return Repository(files=files, package=package, defect=defect, failing=failing, hidden=hidden)


def _readme(package: str, sources: dict[Function, str]) -> str:
    lines = [f"- `{function.module}.{function.name}`" for function in sources]
    return "\n".join([f"# {package}", "", *lines, "", "`python -m unittest` runs the tests.", ""])


def _tests(package: str, module: str, functions: Sequence[Function], cases: Sequence[Case]) -> str:
    text = f"import unittest\n\nfrom {package} import {module}\n"
    for function in functions:
        text += f"\n\nclass {_class_of(function)}(unittest.TestCase):\n"
        text += "\n".join(_test(number, case) for number, case in enumerate(_shown(_of(cases, function)), start=1))
    return text


def _of(cases: Sequence[Case], function: Function) -> list[Case]:
    return [case for case in cases if (case.module, case.function) == (function.module, function.name)]


def _shown(cases: Sequence[Case]) -> Iterator[Case]:
    """One in which the defect shows, where there is any, and others."""
    failing, others = [case for case in cases if case.fails], [case for case in cases if not case.fails]
    shown = [*failing[:1], *others, *failing[1:]]
    yield from shown[:SHOWN]


def _test(number: int, case: Case) -> str:
    expected = json.loads(case.expected)
    call, given = f"{case.module}.{case.function}", ", ".join(map(repr, case.arguments))
    if "raises" in expected:
        check = f"self.assertRaises({expected['raises']}, {call}, {given})"
    else:
        check = f"self.assertEqual({call}({given}), {expected['value']!r})"
    return f"    def test_{number}(self):\n        {check}\n"


def _class_of(function: Function) -> str:
    return "".join(word.title() for word in function.name.split("_"))
