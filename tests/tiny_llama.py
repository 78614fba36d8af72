"""A tiny random Llama with a real tokenizer and a chat template with tools, made on the spot in about a second."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.models.folder import ModelFolder, fingerprint_of, sha256_of, weight_files

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = Path(__file__).resolve().parents[1] / "swarm" / "models" / "chat_template.jinja"
_CORPUS = (
    "You are a helpful assistant. Answer with the number only. What is one plus two? The answer is three.",
    "system user assistant tool call name arguments function weather city colour red green blue word please",
    "What is 1+2? What is 3+4? 0 1 2 3 4 5 6 7 8 9 10 11 12 Say it again. Name a colour. Repeat after me:",
)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """2 layers, 128 wide, bfloat16 on disk; its answers are noise, but the same noise each time."""
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    make_tiny_llama(path)
    hashes = {file.name: sha256_of(file) for file in weight_files(path)}
    return ModelFolder(path=path, name="tiny-llama", fingerprint=fingerprint_of(hashes))


def make_tiny_llama(
    path: Path, *, dtype: str = "bfloat16", seed: int = 0, context: int = 2048, tokenizer: Path | None = None
) -> None:
    """Write the checkpoint to `path`. Sharp enough that log-probabilities differ, with heads that vLLM can serve.

    context: tokens that it holds; its positions rotate slowly enough for them. tokenizer: a model's folder whose tokenizer it has,
    for prompts of agents: its own has a token for nearly each letter.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    vocabulary = _write_tokenizer(path) if tokenizer is None else _copy_tokenizer(tokenizer, path)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=context,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0 * max(1.0, context / 2048)},
        initializer_range=0.08,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(getattr(torch, dtype))  # type: ignore[no-untyped-call]
    model.save_pretrained(path)


def _copy_tokenizer(model: Path, path: Path) -> int:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = _TEMPLATE.read_text(encoding="utf-8")
    tokenizer.save_pretrained(path)
    return len(tokenizer)


def _write_tokenizer(path: Path) -> int:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=448,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = _TEMPLATE.read_text(encoding="utf-8")
    fast.save_pretrained(path)
    return len(fast)
