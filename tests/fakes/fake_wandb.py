"""A wandb that keeps runs in memory and writes the folders that the real one writes offline. Put into `sys.modules`."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any


class Error(Exception):
    pass


class Settings:
    def __init__(self, **fields: Any) -> None:
        self.fields = fields


class Artifact:
    def __init__(self, name: str, type: str) -> None:
        self.name, self.type, self.files = name, type, list[str]()

    def add_file(self, path: str) -> None:
        self.files.append(path)


class Run:
    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields
        self.rows: list[dict[str, Any]] = []
        self.starting_step = 0
        self.summary: dict[str, Any] = {}
        self.axes: dict[str, str] = {}
        self.artifacts: list[Artifact] = []
        self.exit_code: int | None = None

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes[name] = step_metric

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def log_artifact(self, artifact: Artifact) -> None:
        self.artifacts.append(artifact)

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


class FakeWandb(types.ModuleType):
    """`runs` by folder. broken: every run is refused, as without a network."""

    Error, Settings, Artifact = Error, Settings, Artifact

    def __init__(self) -> None:
        super().__init__("wandb")
        self.broken = False
        self._made: dict[str, Run] = {}

    @property
    def runs(self) -> list[Run]:
        return [run for folder, run in self._made.items() if Path(folder).is_dir()]

    def init(self, **fields: Any) -> Run:
        if self.broken:
            raise Error("no route to host, with key sk-abcdefghijkl")
        for earlier in self.runs:
            if fields["resume"] == "allow" and earlier.fields["id"] == fields["id"]:
                earlier.starting_step = len(earlier.rows)
                return earlier
        folder = Path(fields["dir"]) / "wandb" / f"offline-run-{len(self._made):08}-{fields['id']}"
        folder.mkdir(parents=True)
        self._made[str(folder)] = Run(fields)
        return self._made[str(folder)]
