"""Tiny tokenizers of each kind, made by tokenizers itself, in the folder form of a bundle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from semspec.runtime.pieces import BYTE_LEVEL_CHARACTERS

BOS, EOS = "<s>", "</s>"
BYTES = list(BYTE_LEVEL_CHARACTERS)
GGUF_METADATA: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [*BYTES, "ab", "<s>", "</s>", "<|eot|>", "<tool>", "[PAD261]"],
    "tokenizer.ggml.token_type": [1] * 257 + [3, 3, 3, 4, 5],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 257,
    "tokenizer.ggml.eos_token_id": 258,
}
TEXTS = (
    "Hello world",
    "I'm sure they'LL say: we've DON'T.",
    "x = [i**2 for i in range(10)]\n\tif x:\r\n\t\tprint(f'{x!r}')  # 3.14\n\n\n",
    "1234567890 12,345.67 ½ ²",
    "naïve café — 😊👩‍🚀 ﬁ e\u0301 Å",
    "日本語テスト 中文，你好。 한국어 русский ελληνικά עברית العربية हिन्दी ไทย",
    "  two  spaces   \n  three",
    "<|im_start|>user\nHi<|im_end|>",
)


def byte_level() -> Tokenizer:
    """Ids 0..255 are the bytes, 256 is "ab", 257 is BOS, 258 is EOS, 259 is <tool>: added, not special."""
    vocab = {character: byte for byte, character in enumerate(BYTE_LEVEL_CHARACTERS)}
    tokenizer = Tokenizer(models.BPE(vocab={**vocab, "ab": 256}, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _with_added(tokenizer)


def sentencepiece(*, decoder: str = "llama") -> Tokenizer:
    """Words that carry the space before them, and a token a byte; decoded as llama does or by metaspace."""
    words = ["▁", "▁a", "▁b", "▁c", "a", "b", "c", "▁▁", "日", "é"]
    vocab = {
        word: number for number, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])
    }
    merges = [("▁", "a"), ("▁", "b"), ("▁", "c"), ("▁", "▁")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    if decoder == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement="▁", prepend_scheme="always", split=False
        )
        tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    return _with_added(tokenizer)


def words(*vocabulary: str) -> Tokenizer:
    """Whole words and no decoder: any ids can be made any text."""
    tokenizer = Tokenizer(
        models.WordLevel(vocab={word: n for n, word in enumerate(vocabulary)}, unk_token=vocabulary[0])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def add_bos(tokenizer: Tokenizer) -> Tokenizer:
    """Let the post-processor put BOS before a text."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def save(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    config: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
    template: str | None = None,
) -> Path:
    """Write the four files of a tokenizer folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {"bos_token": BOS, "eos_token": EOS} if tokenizer.token_to_id(BOS) is not None else {}
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, **(config or {})}), encoding="utf-8")
    (folder / "generation_config.json").write_text(
        json.dumps(generation or {"eos_token_id": []}), encoding="utf-8"
    )
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def _with_added(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([BOS, EOS])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer
