"""Study files: YAML or TOML parsed into plain data, with the line of each key, and the spec made from that data.

Values are read as people write them: `1e-5` is a number, `on` a word, `22:00-07:00` a text.
"""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from foundation.strict import explain
from researcher.instruments.catalogue import declaration_in
from researcher.refusals import PlanningRefused, SpecRefused
from researcher.study.spec import StudySpec
from swarm.models.catalogue import find

_INSTRUMENT_KEYS = frozenset({"workflow", "factors", "metrics", "defaults"})
_CONTRAST = {"compare", "arms", "model", "design"}
_LONGEST_NUMBER = 100
_FUNCTION = re.compile(r".+\.py:[A-Za-z_]\w*")
"""`FILE.py:NAME`: a level that is a user's function."""
_TABLE = re.compile(r"\s*\[+\s*([^\]]+?)\s*\]+\s*(?:#.*)?$")
_KEY = re.compile(r"\s*((?:[\w-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[\w-]+|\"[^\"]*\"|'[^']*'))*)\s*=")


@dataclass(frozen=True, slots=True)
class Lines:
    """Line numbers of the keys in a file.

    `name` is the file's name as given. `lines` has line numbers from 1, by dotted path. `options` are command-line options that
    overrule the file, by dotted path.
    """

    name: str
    lines: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)

    def overruled(self, options: Mapping[str, str]) -> Lines:
        return replace(self, options=options)

    def at(self, path: str) -> str:
        """Return the line of the key, or of the nearest enclosing key: `study.yaml:7`."""
        while path and path not in self.lines:
            path = path.rpartition(".")[0]
        return f"{self.name}:{self.lines[path]}" if path else self.name

    def located(self, refused: SpecRefused) -> str:
        """Return a text with every problem and the line of its field, or the option that overrules the file there."""
        return "; ".join(f"{self._place(field)}: {problem}" for field, problem in refused.problems)

    def _place(self, path: str) -> str:
        above = path
        while above and above not in self.options:
            above = above.rpartition(".")[0]
        return self.options[above] if above else f"{self.at(path)}: {path}"

    @contextmanager
    def named(self) -> Iterator[None]:
        """Add the line of each field to the SpecRefused that the body raises."""
        try:
            yield
        except SpecRefused as refused:
            refused.args = (self.located(refused),)
            raise


class _AliasFound(yaml.MarkedYAMLError):
    pass


class _Loader(yaml.SafeLoader):
    """A loader with YAML 1.2's core scalars. It refuses aliases, because a few lines of them can stand for gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            alias = self.peek_event()  # type: ignore[no-untyped-call]
            problem = f"*{alias.anchor} repeats an earlier value, which is not allowed here; write the value out"
            raise _AliasFound(problem=problem, problem_mark=alias.start_mark)
        return super().compose_node(parent, index)


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"null|Null|NULL|~|", "nN~\0"),
    ("int", r"[-+]?[0-9]+(?:_[0-9]+)*", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))


def _whole(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    """Read an integer as decimal. YAML 1.1 would read 010 as eight."""
    text = loader.construct_scalar(node)
    if len(text) > _LONGEST_NUMBER:
        raise yaml.constructor.ConstructorError(None, None, f"a number with {len(text)} digits", node.start_mark)
    return int(text)


_Loader.add_constructor("tag:yaml.org,2002:int", _whole)


def scalar(text: str) -> Any:
    """Read a value as a study file would: `1e-5` is a number, `true` a boolean, `grpo` a word."""
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        return text
    return value if isinstance(value, bool | int | float) else text


def read_study_file(path: Path) -> tuple[dict[str, Any], Lines]:
    """Return the file's data, not yet validated, and the lines of its keys. Raises: PlanningRefused."""
    data, lines = read_data_file(path, "a study file")
    if _INSTRUMENT_KEYS & data.keys() and "compare" not in data:
        raise PlanningRefused(
            f"{path} describes an instrument, not a study; to run a study on it: `researcher start --instrument {path.parent} "
            "--vary FACTOR=A,B`"
        )
    return data, lines


def read_study_text(text: str, folder: Path, kind: str = "a study file") -> tuple[dict[str, Any], Lines]:
    """Parse YAML text as `read_study_file` parses a file. `folder` is the base of relative paths. Raises: PlanningRefused."""
    return _data(Path("the text"), text, kind, folder)


def read_data_file(path: Path, kind: str) -> tuple[dict[str, Any], Lines]:
    """Read a mapping from YAML or TOML, and resolve relative paths. `kind` says what the file should be, for messages.

    Raises: PlanningRefused.
    """
    writes = "; `researcher draft` writes one" if kind == "a study file" else ""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PlanningRefused(f"{path} is not a UTF-8 text file") from error
    except OSError as error:
        if " " in path.name and not path.suffix and not path.exists():
            raise PlanningRefused(
                f"there is no file {str(path)!r}; if this is a question, put --topic before it: --topic {shlex.quote(str(path))}"
            ) from error
        raise PlanningRefused(f"{path} cannot be read: {error.strerror}{writes}") from error
    return _data(path, text, kind, path.parent)


def _data(path: Path, text: str, kind: str, folder: Path) -> tuple[dict[str, Any], Lines]:
    writes = "; `researcher draft` writes one" if kind == "a study file" else ""
    data, lines = _toml(path, text) if path.suffix == ".toml" else _yaml(path, text)
    if not isinstance(data, dict):
        raise PlanningRefused(f"{path} is not {kind}: it has no keys{writes}")
    return _placed("", data, folder), Lines(str(path), lines)


def _placed(name: str, value: Any, folder: Path, depth: int = 5) -> Any:
    """Resolve relative paths of models, instruments, JSON lines files and functions (FILE.py:NAME) against the study file's folder,
    if they exist there.

    `depth` is the maximum depth of nesting to search; no path is deeper (`compare.data.levels.0`).
    """
    if isinstance(value, Mapping) and depth:
        return {key: _placed(str(key), each, folder, depth - 1) for key, each in value.items()}
    if isinstance(value, list) and depth:
        return [_placed(name, each, folder, depth - 1) for each in value]
    if not isinstance(value, str) or not value or name == "question":
        return value
    place = folder / value
    if name in ("model", "instrument"):
        is_there = os.path.isdir(place) and (
            find(value) is None if name == "model" else declaration_in(place) is not None
        )
    else:
        file, colon, _ = value.rpartition(":") if _FUNCTION.fullmatch(value) else (value, "", "")
        is_there = (value.endswith(".jsonl") or bool(colon)) and os.path.isfile(folder / file)
    return str(place.absolute()) if is_there else value


def checked_spec(fields: Mapping[str, Any]) -> tuple[StudySpec | None, list[SpecRefused]]:
    """Return the spec, and a refusal for every wrong field.

    The spec leaves wrong fields out, so that the rest can be checked further. It is None if the rest is not a valid spec.
    """
    refused: list[SpecRefused] = []
    wrong: set[str] = set()
    while True:
        rest = {name: value for name, value in fields.items() if name not in wrong}
        try:
            return StudySpec.model_validate({"question": "?", **rest} if wrong else rest), refused
        except ValidationError as error:
            for problem in explain(error, StudySpec):
                name = problem.field.partition(".")[0]
                # The fields that define the arms count as one: without a wrong one, the others may look wrong.
                if name not in wrong and not (name in _CONTRAST and wrong & _CONTRAST):
                    said = str(problem).removeprefix(f"{problem.field}: ")
                    refused.append(SpecRefused(problem.field, said, [problem.nearest] if problem.nearest else []))
            found = {problem.field.partition(".")[0] for problem in explain(error, StudySpec)}
            if found <= wrong:
                return None, refused
            wrong |= found


def _yaml(path: Path, text: str) -> tuple[Any, dict[str, int]]:
    try:
        node = yaml.compose(text, Loader=_Loader)
        lines: dict[str, int] = {}
        if node is not None and (problems := list(_mark(node, "", lines))):
            raise PlanningRefused("; ".join(f"{path}:{line}: {problem}" for line, problem in problems))
        return yaml.load(text, Loader=_Loader), lines
    except RecursionError as error:
        raise PlanningRefused(f"{path} is nested too deeply for a study file") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        what = "" if isinstance(error, _AliasFound) else "this is not YAML: "
        raise PlanningRefused(f"{place}: {what}{error.problem}") from error
    except yaml.YAMLError as error:
        raise PlanningRefused(f"{path}: this is not YAML: {error}") from error


def _mark(node: yaml.Node, path: str, lines: dict[str, int]) -> Iterator[tuple[int, str]]:
    """Record the line of each key. Yields the line and problem of each key that is not text or is repeated."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.tag != "tag:yaml.org,2002:str":
                yield line, f"{key.value} is not a string; put it in quotes if you mean the text"
                continue
            name = f"{path}.{key.value}" if path else str(key.value)
            if name in lines:
                yield line, f"{name} is given twice; first in line {lines[name]}"
                continue
            lines[name] = line
            yield from _mark(value, name, lines)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            lines[f"{path}.{number}"] = value.start_mark.line + 1
            yield from _mark(value, f"{path}.{number}", lines)


def _toml(path: Path, text: str) -> tuple[Any, dict[str, int]]:
    try:
        data = tomllib.loads(text)
    except ValueError as error:  # also for numbers with thousands of digits
        raise PlanningRefused(f"{path}: this is not TOML: {error}") from error
    except RecursionError as error:
        raise PlanningRefused(f"{path} is nested too deeply for a study file") from error
    table, lines = "", dict[str, int]()
    for number, line in enumerate(text.splitlines(), start=1):
        if (found := _TABLE.match(line)) is not None:
            table = _plain(found[1])
            lines.setdefault(table, number)
        elif (found := _KEY.match(line)) is not None:
            lines.setdefault(f"{table}.{_plain(found[1])}" if table else _plain(found[1]), number)
    for name in _long_numbers("", data):
        raise PlanningRefused(
            f"{Lines(str(path), lines).at(name)}: {name}: a number with more than {_LONGEST_NUMBER} digits"
        )
    return data, lines


def _long_numbers(name: str, value: Any) -> Iterator[str]:
    """Yield the dotted path of each integer that is too long."""
    if isinstance(value, int) and abs(value) >= 10**_LONGEST_NUMBER:
        yield name
    elif isinstance(value, Mapping | list):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, each in items:
            yield from _long_numbers(f"{name}.{key}" if name else str(key), each)


def _plain(key: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in key.split("."))
