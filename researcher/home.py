"""The user data directory with its store, and the processes that work on studies. Importing this opens no database."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from foundation.commandline import UsageError
from foundation.paths import is_full, user_data_dir

if TYPE_CHECKING:
    from researcher.store.store import Store

DATABASE = "researcher.db"
"""SQLite file in the user data directory, used unless another database is configured."""


@dataclass(frozen=True, slots=True)
class Home:
    """The user data directory and the store. The store's database lies in that directory unless another one is configured."""

    root: Path
    store: Store

    @property
    def studies(self) -> Path:
        """Folder that holds one folder per study, with its trials, its report and the state of its own server."""
        return self.root / "studies"

    def worker(self, study_id: str) -> str | None:
        """Return the live process that works on the study, if any."""
        from researcher.ownership import living_owner

        return living_owner(self.store, study_id, time.time())


def data_dir() -> Path:
    """Return the user data directory, created if missing. Raises: UsageError when it cannot be used."""
    root = user_data_dir()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        then = "make room on that disk" if is_full(error) else "set RESEARCHER_HOME"
        raise UsageError(f"the data directory {root} cannot be used ({error.strerror}); {then}") from error
    return root


def open_home() -> Home:
    """Open the store. Raises: StoreError when the database cannot be used; UsageError when its directory cannot."""
    root = data_dir()
    from researcher.store.store import Store  # not at the top: `doctor` must also run where SQLAlchemy is missing

    return Home(root, Store.open())
