"""Instruments on this machine: finds them, reads `instrument.toml`, validates and hashes them.

Looks in `studies/` of the clone and in the folders listed in `RESEARCHER_STUDIES`. A folder may also be given directly.
"""

from __future__ import annotations

import hashlib
import os
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from foundation.nearest import a_few, nearest
from foundation.paths import shipped, visible_files
from foundation.strict import explain
from researcher.instruments.declaration import instrument_of, misfits
from researcher.instruments.instrument import Instrument
from researcher.refusals import PlanningRefused

DECLARATION, OLD_DECLARATION = "instrument.toml", "study.toml"
"""The file that makes a folder an instrument, and its name in earlier versions."""
OWN_STUDIES = shipped("studies")


@dataclass(frozen=True, slots=True)
class InstrumentFolder:
    """An instrument on this machine. `code` is the SHA-256 over the files of its folder."""

    instrument: Instrument
    path: Path
    code: str


def available(environ: Mapping[str, str] | None = None) -> list[InstrumentFolder]:
    """Return every instrument, sorted by name.

    Raises: PlanningRefused for an invalid declaration, two instruments with the same name, or a missing folder of
    RESEARCHER_STUDIES.
    """
    paths = dict.fromkeys(path.resolve() for root in _roots(environ) for path in _declared(root))
    found = [read_instrument(path) for path in paths]
    twice = [name for name, count in Counter(each.instrument.name for each in found).items() if count > 1]
    if twice:
        places = ", ".join(str(each.path) for each in found if each.instrument.name == twice[0])
        raise PlanningRefused(f"two instruments are called {twice[0]!r} ({places}); rename one in its {DECLARATION}")
    return sorted(found, key=lambda each: each.instrument.name)


def open_instrument(name: str, environ: Mapping[str, str] | None = None) -> InstrumentFolder:
    """Open an instrument by name or folder. Raises: PlanningRefused with the nearest names."""
    if declaration_in(Path(name)) is not None:
        return read_instrument(Path(name))
    if os.sep in name:
        raise PlanningRefused(f"no instrument in {name!r}: the folder contains no {DECLARATION}")
    known = {each.instrument.name: each for each in available(environ)}
    if name in known:
        return known[name]
    guess, shown = nearest(name, known), a_few(name, known)
    if guess is not None:
        raise PlanningRefused(f"no instrument is called {name!r}; did you mean {guess!r}?", [guess])
    more = f" and {len(known) - len(shown)} more" if len(known) > len(shown) else ""
    there = f"there are {', '.join(shown) or 'none'}{more} (`researcher instruments`)"
    raise PlanningRefused(f"no instrument is called {name!r}; {there}", shown)


def as_frozen(folder: InstrumentFolder, code: str) -> InstrumentFolder:
    """Return the folder with the digest that a plan recorded, if the declaration lists that digest as an earlier version's."""
    return replace(folder, code=code) if code in folder.instrument.earlier else folder


def read_instrument(path: Path) -> InstrumentFolder:
    """Read and check one folder.

    Raises: PlanningRefused, which names the file and each bad field; for a misspelt field, also the nearest name.
    """
    file = declaration_in(path) or path / DECLARATION
    try:
        instrument = instrument_of(tomllib.loads(file.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        raise PlanningRefused(f"{file} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise PlanningRefused(f"{file} is not valid TOML: {error}") from error
    except ValidationError as error:
        problems = [str(problem) for problem in explain(error, Instrument)]
        raise PlanningRefused(f"{file}: {'; '.join(problems)}", problems) from error
    problems = list(misfits(instrument))
    for what, name in (("workflow", instrument.workflow), ("requirements", instrument.requirements)):
        if name is not None and not (path / name).is_file():
            problems.append(f"{what}: there is no file {name!r} in the folder")
    if problems:
        raise PlanningRefused(f"{file}: {'; '.join(problems)}", problems)
    return InstrumentFolder(instrument, path.resolve(), folder_digest(path))


def declaration_in(folder: Path) -> Path | None:
    """Return the folder's declaration file, or None. Raises: PlanningRefused when there are two."""
    found = [folder / name for name in (DECLARATION, OLD_DECLARATION) if (folder / name).is_file()]
    if len(found) > 1:
        raise PlanningRefused(
            f"{folder} contains both {DECLARATION} and its old form {OLD_DECLARATION}; keep one of them"
        )
    return found[0] if found else None


def folder_digest(path: Path) -> str:
    """Return the SHA-256 over the names and contents of the folder's files."""
    return files_digest((name, file.read_bytes()) for name, file in visible_files(path))


def files_digest(files: Iterable[tuple[str, bytes]]) -> str:
    """Return the digest of a folder from the names and contents of its files, which must be sorted by name."""
    digest = hashlib.sha256()
    for name, content in files:
        digest.update(f"{name}\0{hashlib.sha256(content).hexdigest()}\n".encode())
    return digest.hexdigest()


def _roots(environ: Mapping[str, str] | None) -> list[Path]:
    env = os.environ if environ is None else environ
    further = [Path(part).expanduser() for part in env.get("RESEARCHER_STUDIES", "").split(os.pathsep) if part]
    for root in further:
        if not root.is_dir():
            raise PlanningRefused(f"RESEARCHER_STUDIES names {root}, which is not a folder")
    return [OWN_STUDIES, *further]


def _declared(root: Path) -> Iterable[Path]:
    if declaration_in(root) is not None:
        return [root]
    return sorted(folder for folder in root.glob("*") if declaration_in(folder) is not None)
