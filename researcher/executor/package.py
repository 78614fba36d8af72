"""What a client takes along to a machine that has none of our code: one archive, the same bytes for the same content.

    swarm/client, swarm/protocol, foundation    the client library: pure Python, beside it httpx and pydantic are needed
    instrument/                                 the instrument's code, in the version that is to run

and further files beside them. The folder that it is unpacked in is the client's working directory.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path

from foundation.paths import packages_root, visible_files

INSTRUMENT = "instrument"
_LIBRARY = ("foundation", "swarm/client", "swarm/protocol")
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""Of every file in the archive, so that times do not make it another one."""


def packed(code: Path, files: Mapping[str, bytes]) -> bytes:
    """A zip of the client library, the instrument's folder and `files`, by their names in it. Only its owner may read `files`."""
    data = BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, file in sorted(
            [*_library(), *((f"{INSTRUMENT}/{name}", file) for name, file in visible_files(code))]
        ):
            _add(archive, name, file.read_bytes(), 0o644 | (file.stat().st_mode & 0o111))
        for name, content in sorted(files.items()):
            _add(archive, name, content, 0o600)
    return data.getvalue()


def _library() -> Iterator[tuple[str, Path]]:
    root = packages_root()
    yield "swarm/__init__.py", root / "swarm" / "__init__.py"
    for room in _LIBRARY:
        for name, file in visible_files(root / room):
            yield f"{room}/{name}", file


def _add(archive: zipfile.ZipFile, name: str, content: bytes, mode: int) -> None:
    entry = zipfile.ZipInfo(name, _EPOCH)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = (0o100000 | mode) << 16
    archive.writestr(entry, content)
