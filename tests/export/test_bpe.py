"""A byte-level vocabulary of a GGUF file is rebuilt by the rules the file names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_tokenizers as tiny
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from semspec.export.bpe import rebuild_tokenizer
from semspec.export.gguf import read_header


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-2", "It's 1234 ok", ["It", "'s", " 1234", " ok"]),
        ("smollm", "It's 1234 ok", ["It", "'s", " ", "1", "2", "3", "4", " ok"]),
        ("qwen2", "It'S 1234 ok\n\n", ["It", "'S", " ", "1", "2", "3", "4", " ok", "\n\n"]),
        ("llama-bpe", "It'S 1234 ok\n\n", ["It", "'S", " ", "123", "4", " ok", "\n\n"]),
    ],
)
def test_words_are_cut_by_the_named_rule(name: str, text: str, expected: list[str]) -> None:
    """D26: the same vocabulary under another rule gives other ids, and a model that is nearly right."""
    backend = Backend.from_str(
        json.dumps(rebuild_tokenizer({**tiny.GGUF_METADATA, "tokenizer.ggml.pre": name}))
    )
    words = [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert words == expected


def test_rebuilt_vocabulary_equals_an_independent_building(smollm2_gguf: Path) -> None:
    """The same tokenizer put together with tokenizers' own classes gives the same ids."""
    metadata = read_header(smollm2_gguf).metadata
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    judge = Backend(
        models.BPE(
            vocab={token: number for number, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in merges],
        )
    )
    judge.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    judge.decoder = decoders.ByteLevel()
    judge.post_processor = processors.ByteLevel(trim_offsets=False)
    judge.add_special_tokens(tokens[:17])
    ours = Backend.from_str(json.dumps(rebuild_tokenizer(metadata)))
    for text in tiny.TEXTS:
        assert ours.encode(text).ids == judge.encode(text).ids
