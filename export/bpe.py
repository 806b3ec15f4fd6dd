"""A GGUF file's byte-level BPE vocabulary -> tokenizer.json.

Knows the `tokenizer.ggml.*` keys and, in one table, what their pre-tokenizer names stand for. What the file
does not say is an error that names the key, never a guess: a tokenizer that is nearly right makes a model
nearly wrong. SentencePiece vocabularies are not rebuilt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from semspec.runtime.errors import SourceError

__all__ = ["PRE_TOKENIZERS", "adds_bos", "id_of", "rebuild_tokenizer", "token_of"]

_PREFIX = "tokenizer.ggml."


class _Kind(IntEnum):
    """tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5  # padding of the embedding; the original tokenizer has no such token
    BYTE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """How text is cut before merging.

    pattern: regex whose matches are the words, None for GPT-2's own. digits: each digit is a word. nfc:
    text is composed first. ignore_merges: a word that is a token is taken whole. adds_bos: where the file
    has no add_bos_token.
    """

    pattern: str | None = None
    digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


def _pattern(digits: str) -> str:
    """The pattern of the cl100k kind; families differ in how many digits make a word."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_GPT2 = PreTokenizer()
_DIGITS = PreTokenizer(digits=True)
_LLAMA3 = PreTokenizer(pattern=_pattern(r"\p{N}{1,3}"), ignore_merges=True, adds_bos=True)
_QWEN2 = PreTokenizer(pattern=_pattern(r"\p{N}"), nfc=True)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "deepseek-r1-qwen": _QWEN2,
    "gpt-2": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
}


def rebuild_tokenizer(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a tokenizer.json.

    Raises SourceError, naming the key: another kind of vocabulary, an unknown pre-tokenizer, a key that is
    missing or of the wrong form, a token given twice.
    """
    pre = _read_pre_tokenizer(metadata)
    vocab, added = _read_tokens(metadata)
    bos = token_of(metadata, "bos") if adds_bos(metadata) else None
    if bos is not None and bos not in vocab:
        raise SourceError(f"{_PREFIX}bos_token_id names {bos!r}, an unused token")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": _cutting(pre),
        "post_processor": None if bos is None else _bos_first(bos, vocab[bos]),
        "decoder": _byte_level(),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.ignore_merges,
            "vocab": vocab,
            "merges": _read_merges(metadata),
        },
    }


def adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether the tokenizer puts a BOS before a text. Raises SourceError: it should, but there is none."""
    value = metadata.get(f"{_PREFIX}add_bos_token")
    if value is None:
        value = _read_pre_tokenizer(metadata).adds_bos
    if value and token_of(metadata, "bos") is None:
        raise SourceError(f"{_PREFIX}add_bos_token is true but {_PREFIX}bos_token_id is missing")
    return bool(value)


def id_of(metadata: Mapping[str, Any], role: str) -> int | None:
    """The id of `role` (bos, eos, eot, eom, padding, unknown), None where the file names none.

    Raises SourceError: it is not in the vocabulary.
    """
    key = f"{_PREFIX}{role}_token_id"
    token_id = metadata.get(key)
    if token_id is None:
        return None
    n_tokens = len(_read_list(metadata, "tokens", str))
    if type(token_id) is not int or not 0 <= token_id < n_tokens:
        raise SourceError(f"{key} is {token_id!r}; the vocabulary has ids 0..{n_tokens - 1}")
    return token_id


def token_of(metadata: Mapping[str, Any], role: str) -> str | None:
    """The token of `role`, as id_of."""
    token_id = id_of(metadata, role)
    return None if token_id is None else str(metadata[f"{_PREFIX}tokens"][token_id])


def _read_pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    kind = metadata.get(f"{_PREFIX}model")
    if kind != "gpt2":
        raise SourceError(
            f"{_PREFIX}model is {kind!r}; only 'gpt2' (byte-level BPE) can be rebuilt from GGUF: give the "
            "original folder with its tokenizer.json instead"
        )
    if metadata.get(f"{_PREFIX}add_space_prefix"):
        raise SourceError(f"{_PREFIX}add_space_prefix is true; it cannot be rebuilt for byte-level BPE")
    name = metadata.get(f"{_PREFIX}pre")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise SourceError(
            f"{_PREFIX}pre is {name!r}, an unknown pre-tokenizer; known: {', '.join(PRE_TOKENIZERS)}; for "
            "another, give the original folder with its tokenizer.json"
        )
    return PRE_TOKENIZERS[name]


def _read_tokens(metadata: Mapping[str, Any]) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Vocabulary (added tokens too: that fixes their ids) and the added tokens among it, by id."""
    tokens, kinds = _read_list(metadata, "tokens", str), _read_list(metadata, "token_type", int)
    if len(tokens) != len(kinds):
        raise SourceError(f"{_PREFIX}token_type has {len(kinds)} entries for {len(tokens)} {_PREFIX}tokens")
    vocab: dict[str, int] = {}
    added = []
    for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind == _Kind.UNUSED:
            continue
        if kind not in _Kind.__members__.values():
            raise SourceError(f"{_PREFIX}token_type of id {token_id} is {kind}; known: 1..{max(_Kind)}")
        if token in vocab or not token:
            raise SourceError(
                f"{_PREFIX}tokens: id {token_id}, {token!r}, is empty or the same as id {vocab.get(token)}"
            )
        vocab[token] = token_id
        if kind in (_Kind.CONTROL, _Kind.UNKNOWN, _Kind.USER_DEFINED):
            added.append(_added(token_id, token, special=kind != _Kind.USER_DEFINED))
    return vocab, added


def _read_merges(metadata: Mapping[str, Any]) -> list[list[str]]:
    merges = [merge.split(" ") for merge in _read_list(metadata, "merges", str)]
    for rank, merge in enumerate(merges):
        if len(merge) != 2 or not all(merge):
            raise SourceError(
                f"{_PREFIX}merges: entry {rank} is {' '.join(merge)!r}; expected two tokens and one space"
            )
    return merges


def _read_list(metadata: Mapping[str, Any], name: str, kind: type) -> Sequence[Any]:
    value = metadata.get(_PREFIX + name)
    if value is None:
        raise SourceError(
            f"{_PREFIX}{name} is missing, so the tokenizer cannot be rebuilt; get a complete file, or give "
            "the original folder with its tokenizer.json"
        )
    if not isinstance(value, list) or not value or not all(isinstance(item, kind) for item in value):
        raise SourceError(f"{_PREFIX}{name} must be a list of {kind.__name__}, found {type(value).__name__}")
    return value


def _added(token_id: int, token: str, *, special: bool) -> dict[str, Any]:
    return {
        "id": token_id,
        "content": token,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def _cutting(pre: PreTokenizer) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    if pre.digits:
        parts.append({"type": "Digits", "individual_digits": True})
    if pre.pattern is not None:
        parts.append(
            {"type": "Split", "pattern": {"Regex": pre.pattern}, "behavior": "Isolated", "invert": False}
        )
    parts.append(_byte_level(use_regex=pre.pattern is None))
    return {"type": "Sequence", "pretokenizers": parts}


def _byte_level(*, use_regex: bool = True) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _bos_first(token: str, token_id: int) -> dict[str, Any]:
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    text, second = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, first, second],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }
