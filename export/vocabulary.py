"""The tokenizer folder of a bundle, from a checkpoint folder or a GGUF file; and the model's licence.

Knows where each kind of source keeps its tokenizer, chat template, end tokens and sampling defaults. Does
not know how a GGUF vocabulary is rebuilt (bpe.py) nor how text is encoded (runtime/tokenizer.py). The same
source gives the same bytes.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semspec.export.bpe import adds_bos, id_of, rebuild_tokenizer, token_of
from semspec.export.gguf import read_header
from semspec.export.safetensors_file import file_inside, read_folder_json
from semspec.runtime.errors import BundleError, SourceError
from semspec.runtime.tokenizer import (
    CHAT_TEMPLATE,
    CONFIG,
    GENERATION_CONFIG,
    TOKENIZER,
    Tokenizer,
    parse_tokenizer,
)

__all__ = ["copy_licence", "write_tokenizer"]

logger = logging.getLogger(__name__)

_LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*")
_NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
_GGUF_ROLES = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
_GGUF_END_ROLES = ("eos", "eot", "eom")
_GGUF_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vocabulary:
    """What the four files say. adds_bos: None leaves it to the post-processor."""

    tokenizer: str
    names: Mapping[str, str | None]
    adds_bos: bool | None
    generation: Mapping[str, Any]
    template: str | None


def write_tokenizer(source: Path, out: Path, *, config: Mapping[str, Any]) -> None:
    """Write tokenizer.json, tokenizer_config.json, generation_config.json and, where the model has one,
    chat_template.jinja into the folder `out`, which is made when all of them have been read.

    config: the model's config.json, or what stands for it; its end ids and vocab_size count. eos_token_id of
    generation_config.json becomes the sorted union of every end id of the source; its other keys are kept as
    given. Raises SourceError: no usable tokenizer, a broken file, a link out of the folder, a GGUF key that
    is missing or unknown.
    """
    try:
        vocabulary = _read_folder(source, config) if source.is_dir() else _read_gguf(source, config)
        _write(out, vocabulary)
        tokenizer = Tokenizer.open(out)
    except BundleError as error:
        raise SourceError(f"{source}: {error}") from error
    n_rows = config.get("vocab_size")
    if isinstance(n_rows, int) and tokenizer.vocab_size > n_rows:
        logger.warning(
            "%s: the tokenizer knows %d ids, the model only %d", source, tokenizer.vocab_size, n_rows
        )


def copy_licence(source: Path, out: Path) -> tuple[Path, ...]:
    """Copy the licence files of a folder into the folder `out`; of a GGUF file, write the licence it names.

    Returns what was written, none where the source says nothing. Raises SourceError: a link out of the
    folder.
    """
    out.mkdir(parents=True, exist_ok=True)
    if not source.is_dir():
        return _write_licence_name(source, out)
    names = sorted({path.name for pattern in _LICENCES for path in source.glob(pattern)})
    for name in names:
        (out / name).write_bytes(file_inside(source, name).read_bytes())
    return tuple(out / name for name in names)


def _read_folder(source: Path, config: Mapping[str, Any]) -> _Vocabulary:
    if not os.path.lexists(source / TOKENIZER):
        raise SourceError(
            f"{source}: has no {TOKENIZER}; write one with transformers: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    text = _read_text(source, TOKENIZER)
    given = _read_object_if_any(source, CONFIG)
    where = source / CONFIG
    names = _read_names({**_read_object_if_any(source, "special_tokens_map.json"), **given}, where)
    adds_bos = given.get("add_bos_token")
    if adds_bos is not None and not isinstance(adds_bos, bool):
        raise SourceError(f"{where}: add_bos_token must be true or false, found {adds_bos!r}")
    eos = names["eos_token"]
    eos_id = None if eos is None else parse_tokenizer(text, TOKENIZER).token_to_id(eos)
    if eos_id is None and eos is not None:
        raise SourceError(f"{where}: eos_token {eos!r} is not in the vocabulary of {TOKENIZER}")
    generation = _read_object_if_any(source, GENERATION_CONFIG)
    ends = [config.get("eos_token_id"), generation.get("eos_token_id"), eos_id]
    if os.path.lexists(source / CHAT_TEMPLATE):
        template: str | None = _read_text(source, CHAT_TEMPLATE)
    else:
        template = _pick_template(given.get("chat_template"), f"{where}: chat_template")
    return _Vocabulary(
        tokenizer=text,
        names=names,
        adds_bos=adds_bos,
        generation={**generation, "eos_token_id": _unite_ends(ends, source)},
        template=template,
    )


def _read_gguf(source: Path, config: Mapping[str, Any]) -> _Vocabulary:
    metadata = read_header(source).metadata
    try:
        content = rebuild_tokenizer(metadata)
        names = {name: token_of(metadata, role) for name, role in _GGUF_ROLES.items()}
        ends = [id_of(metadata, role) for role in _GGUF_END_ROLES]
        adds = adds_bos(metadata)
    except SourceError as error:
        raise SourceError(f"{source}: {error}") from None
    text = json.dumps(content, ensure_ascii=False, sort_keys=True, separators=(",", ":")) + "\n"
    parse_tokenizer(text, "rebuilt tokenizer")
    return _Vocabulary(
        tokenizer=text,
        names=names,
        adds_bos=adds,
        generation={
            **_read_sampling(metadata, source),
            "eos_token_id": _unite_ends([config.get("eos_token_id"), *ends], source),
        },
        template=_pick_template(
            metadata.get("tokenizer.chat_template"), f"{source}: tokenizer.chat_template"
        ),
    )


def _read_sampling(metadata: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """The sampling defaults a GGUF file may carry; having any means that sampling is the default."""
    sampling: dict[str, Any] = {}
    for name, key in _GGUF_SAMPLING.items():
        value = metadata.get(f"general.sampling.{name}")
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise SourceError(f"{source}: general.sampling.{name} must be a number, found {value!r}")
        sampling[key] = value
    if sampling:
        sampling["do_sample"] = sampling.get("temperature", 1.0) > 0
    return sampling


def _write_licence_name(source: Path, out: Path) -> tuple[Path, ...]:
    metadata = read_header(source).metadata
    keys = ("general.license", "general.license.name", "general.license.link")
    lines = [str(metadata[key]) for key in keys if metadata.get(key)]
    if not lines:
        return ()
    written = out / "LICENSE"
    written.write_bytes(("\n".join(lines) + "\n").encode("utf-8"))
    return (written,)


def _read_names(given: Mapping[str, Any], where: Path) -> dict[str, str | None]:
    """Special tokens by role; written as a string or as an object with its content."""
    names: dict[str, str | None] = {}
    for name in _NAMED_TOKENS:
        value = given.get(name)
        token = value.get("content") if isinstance(value, dict) else value
        if token is not None and not isinstance(token, str):
            raise SourceError(f"{where}: {name} must be a token, found {value!r}")
        names[name] = token
    return names


def _unite_ends(ends: Iterable[Any], source: Path) -> list[int]:
    """Sorted union of ids, lists of ids and nothing."""
    united: set[int] = set()
    for value in ends:
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is None:
                continue
            if type(token_id) is not int or token_id < 0:
                raise SourceError(f"{source}: eos_token_id must be an id or a list of ids, found {value!r}")
            united.add(token_id)
    return sorted(united)


def _pick_template(template: Any, where: str) -> str | None:
    """template: text, or a list of named texts, of which the one named default is taken."""
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        if "default" not in named:
            raise SourceError(f"{where} has {sorted(map(str, named))}, but none named 'default'")
        template = named["default"]
    if template is not None and not isinstance(template, str):
        raise SourceError(f"{where} must be text, found {type(template).__name__}")
    return template


def _read_object_if_any(source: Path, name: str) -> dict[str, Any]:
    return read_folder_json(source, name) if os.path.lexists(source / name) else {}


def _read_text(source: Path, name: str) -> str:
    path = file_inside(source, name)
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{source / name}: is not UTF-8 ({error}); the file is damaged, get it again"
        ) from None


def _write(out: Path, vocabulary: _Vocabulary) -> None:
    """Texts as they are, no newline added or translated: a template's last character counts."""
    config = {
        **vocabulary.names,
        "add_bos_token": vocabulary.adds_bos,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    files = {
        TOKENIZER: vocabulary.tokenizer,
        CONFIG: _to_json({key: value for key, value in config.items() if value is not None}),
        GENERATION_CONFIG: _to_json(vocabulary.generation),
        CHAT_TEMPLATE: vocabulary.template,
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        if text is not None:
            (out / name).write_bytes(text.encode("utf-8"))


def _to_json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False, sort_keys=True, indent=2) + "\n"
