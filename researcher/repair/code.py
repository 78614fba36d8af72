"""Static checks of an instrument's files: they parse, and they keep their public names."""

from __future__ import annotations

import ast
import difflib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from foundation.paths import synchronise, visible_files
from researcher.executor.blueprint import Code
from researcher.executor.errors import InstrumentChanged
from researcher.instruments.catalogue import folder_digest

ENTRIES = ("tasks", "rollout")
_LARGEST = 200_000
"""Maximum length of a file, in characters."""


class Unfit(ValueError):
    """The code cannot be used. The message tells its author why."""


def parsed(name: str, text: str) -> ast.Module:
    """Parse the file. Raises: Unfit, with the line number."""
    if len(text) > _LARGEST:
        raise Unfit(f"{name} has {len(text)} characters; at most {_LARGEST} are allowed")
    try:
        return ast.parse(text, name)
    except SyntaxError as error:
        raise Unfit(f"{name}:{error.lineno}: does not parse: {error.msg}") from error
    except ValueError as error:
        raise Unfit(f"{name}: does not parse: {error}") from error


def check_changes(old: Mapping[str, str], new: Mapping[str, str], workflow: str) -> None:
    """Check a repair. `new` maps changed files to their texts; `old` maps all files of the instrument.

    Raises: Unfit for a file outside the instrument, one that does not parse, or a lost public name.
    """
    if not new or all(old.get(name) == text for name, text in new.items()):
        raise Unfit("nothing was changed")
    for name, text in new.items():
        if name not in old:
            known = ", ".join(each for each in sorted(old) if each.endswith(".py"))
            raise Unfit(f"{name!r} is not a file of the instrument; you may only change these files: {known}")
        if not name.endswith(".py"):
            raise Unfit(f"{name} may not be changed: change only code, not the instrument's declaration")
        _check_public(name, old[name], parsed(name, text))
    check_entries(workflow, new.get(workflow, old[workflow]))


def check_entries(workflow: str, text: str) -> None:
    """Check that the workflow defines the names that a client calls. Raises: Unfit."""
    found = public(parsed(workflow, text))
    for name in ENTRIES:
        if name not in found:
            raise Unfit(f"{workflow} defines no function {name!r}")
    if not found["rollout"].startswith("async def"):
        raise Unfit(f"{workflow}: rollout must be `async def rollout(episode, task)`")


def public(tree: ast.Module) -> dict[str, str]:
    """Return a module's public names and what each one is: a function with its arguments, a class, or a value."""
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
            found[node.name] = f"{word} {node.name}({', '.join(_arguments(node.args))})"
        elif isinstance(node, ast.ClassDef):
            found[node.name] = f"class {node.name}"
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: target.id for target in targets if isinstance(target, ast.Name)}
    return {name: what for name, what in found.items() if not name.startswith("_")}


def diff(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """Return the unified diff of all files that differ."""
    lines: list[str] = []
    for name in sorted({*old, *new}):
        before, after = old.get(name, ""), new.get(name, "")
        lines += difflib.unified_diff(before.splitlines(), after.splitlines(), f"a/{name}", f"b/{name}", lineterm="")
    return "\n".join(lines)


def _check_public(name: str, old: str, new: ast.Module) -> None:
    try:
        before = public(ast.parse(old))
    except SyntaxError:
        return  # a file that did not parse has no public names to lose
    after = public(new)
    for each, what in before.items():
        if after.get(each) != what:
            now = after.get(each)
            raise Unfit(f"{name}: `{what}` must stay as it is; it {f'became `{now}`' if now else 'is gone'}")


def _arguments(arguments: ast.arguments) -> list[str]:
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    if arguments.vararg or arguments.kwonlyargs:
        names.append(f"*{arguments.vararg.arg if arguments.vararg else ''}")
    names += [each.arg for each in arguments.kwonlyargs]
    return names + ([f"**{arguments.kwarg.arg}"] if arguments.kwarg else [])


class Versions:
    """Stored versions of the code, in `root`: the folder `code` of the study. Each version's folder is named after its hash and
    never changes.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def folder(self, version: str) -> Path:
        return self._root / version[:16]

    def keep(self, folder: Path, changes: Mapping[str, str] | None = None) -> tuple[str, Path]:
        """Store a durable copy of the folder with these changes. Return its version and its folder."""
        self._root.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(dir=self._root, prefix=".new-"))
        try:
            for name, file in visible_files(folder):
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, place / name)
            for name, text in (changes or {}).items():
                (place / name).write_text(text, encoding="utf-8")
            version = folder_digest(place)
            if not self.folder(version).exists():
                place.chmod(0o755)
                for path in (*place.rglob("*"), place):
                    synchronise(path)
                os.rename(place, self.folder(version))
                synchronise(self._root)
        finally:
            shutil.rmtree(place, ignore_errors=True)
        return version, self.folder(version)

    def kept(self, version: str) -> Path | None:
        """Return the folder of a stored version, or None. Raises: InstrumentChanged if its files were changed."""
        folder = self.folder(version)
        if not folder.is_dir():
            return None
        if folder_digest(folder) != version:
            raise InstrumentChanged(f"the files in {folder} were changed after the study adopted them; restore them")
        return folder

    def mended(self, version: str) -> Code:
        """Return a version that an LLM wrote. Raises: InstrumentChanged when its files are gone."""
        folder = self.kept(version)
        if folder is None:
            raise InstrumentChanged(
                f"the study's repaired code, version {version[:12]}, is gone from {self.folder(version)}"
            )
        return Code(folder=folder, version=version, sandboxed=True)


def texts(folder: Path) -> dict[str, str]:
    """Return the folder's text files by name."""
    found = {}
    for name, file in visible_files(folder):
        try:
            found[name] = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
    return found
