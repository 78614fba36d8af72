"""What is decided before vLLM is started: lengths, memory, template, environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foundation.machine import available_memory
from swarm.engine.machine import Device, yielding_threads
from swarm.engine.memory.model import GIB
from swarm.engine.sampling.server import VllmSettings, child_environment
from swarm.engine.seam import EngineDown, EngineError

CONFIG: dict[str, Any] = {
    "max_position_embeddings": 8192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 64,
}
LONG = {"max_position_embeddings": 1 << 18, "num_hidden_layers": 32, "num_attention_heads": 16, "hidden_size": 2048}
CHATML = {"added_tokens": [{"content": "<|im_start|>"}, {"content": "<|im_end|>"}]}


def settings(
    folder: Path,
    template: str = "",
    tokenizer: dict[str, Any] | None = None,
    config: dict[str, Any] = CONFIG,
    **fields: Any,
) -> VllmSettings:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer or {}))
    (folder / "chat_template.jinja").write_text(template)
    return VllmSettings(model_dir=folder, model_name="m", log_path=folder / "log", **fields)


def test_a_boot_that_memory_cannot_hold_is_refused_and_says_how_much_is_missing(tmp_path: Path) -> None:
    available = available_memory()
    assert available is not None
    with pytest.raises(EngineDown, match=r"needs about .* GiB of memory to boot, .* GiB are free"):
        settings(tmp_path, kv_cache_bytes=available + GIB).check_memory()


def test_the_context_is_the_models_own_at_most(tmp_path: Path) -> None:
    assert settings(tmp_path).model_len == 4096
    assert settings(tmp_path, max_model_len=8192).model_len == 8192
    with pytest.raises(EngineError, match="holds at most 8192 tokens"):
        _ = settings(tmp_path, max_model_len=9000).model_len


def test_a_model_with_two_sets_of_rotations_is_served_with_one_of_them(tmp_path: Path) -> None:
    factors = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    for config in (
        CONFIG | {"original_max_position_embeddings": 2048, "rope_scaling": factors},
        CONFIG | {"rope_parameters": factors | {"original_max_position_embeddings": 2048}},
    ):
        assert settings(tmp_path, config=config).model_len == 2048
        assert settings(tmp_path, config=config, max_model_len=2048).model_len == 2048
        with pytest.raises(EngineError, match="serve with --max-model-len 2048"):
            _ = settings(tmp_path, config=config, max_model_len=2049).model_len
    one = CONFIG | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}}
    assert settings(tmp_path, config=one).model_len == 4096


def test_dynamic_rotations_are_served_where_inference_and_trainer_agree_on_them(tmp_path: Path) -> None:
    rotation = {"rope_type": "dynamic", "factor": 2.0}
    for scaled in (rotation, {"type": "dynamic", "factor": 2.0}):
        assert settings(tmp_path, config=CONFIG | {"rope_scaling": scaled}).model_len == 4096
    for other in ({"alpha": 1000.0}, {"max_trained_positions": 2048}):
        for config in ({"rope_scaling": rotation | other}, {"rope_parameters": {"full_attention": rotation | other}}):
            with pytest.raises(EngineError, match=f"{next(iter(other))}.*log-probabilities would differ"):
                _ = settings(tmp_path, config=CONFIG | config).model_len


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_one_whole_sequence_has_room_however_long_it_is(tmp_path: Path, device: Device) -> None:
    made = settings(tmp_path, device=device, dtype="bfloat16", max_model_len=(1 << 18) - 1, config=LONG)
    blocks = made.kv_bytes // (32 * 2048 * 2 * 2 * 32)
    assert blocks >= (1 << 18) // 32 + 1  # one is vLLM's own
    assert settings(tmp_path, device=device, max_model_len=1024).kv_bytes == GIB // 2


def test_memory_for_a_sequence_that_is_longer_than_usual_is_asked_for_before_the_boot(tmp_path: Path) -> None:
    usual, longer = (settings(tmp_path, dtype="bfloat16", max_model_len=n, config=LONG) for n in (4096, 1 << 18))
    assert usual.kv_bytes == 2 * GIB
    assert longer.memory_needed() - usual.memory_needed() == longer.kv_bytes - usual.kv_bytes > 0


def test_a_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="not a model checkpoint"):
        _ = VllmSettings(model_dir=tmp_path, model_name="m", log_path=tmp_path / "log").model_len


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_a_file_that_was_cut_short_is_named(tmp_path: Path, file: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / file).write_text('{"chat_template": "x", ')
    with pytest.raises(EngineError, match=f"{file} is not JSON .*copy the model again"):
        VllmSettings(model_dir=tmp_path, model_name="m", log_path=tmp_path / "log").command(tmp_path / "socket", None)


def test_our_template_stands_in_where_the_models_own_knows_no_tools(tmp_path: Path) -> None:
    without_tools = settings(tmp_path, "{{ messages }}", CHATML)
    assert without_tools.chat_template is not None
    assert without_tools.chat_template.exists()
    assert "hermes" in without_tools.command(tmp_path / "s").argv
    assert settings(tmp_path, "{{ messages }}").chat_template is None  # no ChatML: nothing of ours would fit
    own = settings(tmp_path, "{{ tools }}[TOOL_CALLS]", CHATML)
    assert own.chat_template is None
    assert "mistral" in own.command(tmp_path / "s").argv


def test_the_child_gets_no_keys(tmp_path: Path) -> None:
    env = child_environment({"OPENAI_API_KEY": "x", "SWARM_ADMIN_TOKEN": "y", "HOME": "/h", "PYTHONPATH": "/p"})
    assert not {"OPENAI_API_KEY", "SWARM_ADMIN_TOKEN"} & set(env)
    assert env["HOME"] == "/h"
    assert env["PYTHONPATH"].endswith(":/p")
    assert env["OMP_WAIT_POLICY"] == "PASSIVE"


def test_compiled_code_outlives_the_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)

    def kept() -> str | None:
        env = settings(tmp_path).command(tmp_path / "s").env
        assert env is not None
        return env.get("TORCHINDUCTOR_CACHE_DIR")

    folder = kept()
    assert folder is not None
    assert Path(folder).is_dir()
    assert Path(folder).is_relative_to(tmp_path / "cache")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    assert kept() == "/mine"


def test_without_a_cache_compiled_code_lies_among_the_childs_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file where the cache should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert "TORCHINDUCTOR_CACHE_DIR" not in (settings(tmp_path).command(tmp_path / "s").env or {})


def test_the_core_is_forked_where_its_threads_bear_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Intel's runtime does, unless they are bound to cores; a GPU's server is vLLM's own, which forks by itself."""

    def forks(device: Device = "cpu") -> bool:
        return "swarm.engine.local.forking_server" in settings(tmp_path, device=device).command(tmp_path / "s").argv

    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    assert forks() == bool(yielding_threads({}))
    assert not forks("cuda")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "auto")
    assert not forks()
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("LD_PRELOAD", "/lib/libgomp.so.1")
    assert not forks()
