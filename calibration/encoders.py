"""Neural encoders that read texts: sentence vectors, and the logits of a cross-encoder for pairs.

A folder of transformers' kind is exported through Optimum to ONNX in a temporary folder and run on a backend of ours;
torch is gone by then. It knows tokens, passes and pooling; what a distance means is equivalence_neural.py's. Only
safetensors are read, code of a repository is never run.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from semspec.export.recipes import HubSource
from semspec.export.sources import LocalSource, fetch, parse_source
from semspec.runtime.backends import open_backend
from semspec.runtime.backends.base import Session
from semspec.runtime.bundle import sha256_of
from semspec.runtime.errors import BackendError, CalibrationError, SourceError
from semspec.runtime.records import Floats, Ints

__all__ = ["POOLINGS", "Encoder", "PairEncoder", "SentenceEncoder", "encoder_sha256"]

POOLINGS = ("mean", "cls")


def encoder_sha256(source: str | Path) -> str:
    """One hash of all that is read of the encoder at `source`: weights, config, tokenizer, pooling.

    Raises SourceError: not found, unreadable, no safetensors. A hub id is downloaded.
    """
    folder = _folder(source)
    paths = [*folder.glob("*.safetensors"), *folder.glob("*.json"), folder / "1_Pooling" / "config.json"]
    try:
        said = sorted(
            (path.relative_to(folder).as_posix(), sha256_of(path)) for path in paths if path.is_file()
        )
    except OSError as error:
        raise SourceError(f"{folder} cannot be read: {error.strerror or error}") from None
    return hashlib.sha256(json.dumps(said).encode("ascii")).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """An exported encoder: its tokenizer, its opened graph and its config.json. max_tokens: of one pass."""

    tokenizer: Tokenizer
    session: Session
    config: dict[str, Any]
    max_tokens: int

    @classmethod
    def open(cls, source: str | Path, task: str, *, threads: int | None = None) -> Encoder:
        """Export and open the encoder at `source`: a folder, or a hub id `org/name`, downloaded then.

        task: Optimum's name for what is wanted of it. Raises SourceError: not found, unreadable, of another kind;
        CalibrationError: the extra is missing; BackendError: the engine refuses the graph. Takes seconds.
        """
        folder = _folder(source)
        config = _read_json(folder / "config.json")
        with tempfile.TemporaryDirectory(prefix="semspec-encoder-") as temporary:
            out = Path(temporary)
            _export(folder, out, task)
            try:
                tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
            except Exception as error:  # tokenizers raises bare Exception
                raise SourceError(f"{folder} has no tokenizer that can be read: {_line(error)}") from error
            session = open_backend("cpu", threads=threads).open(out / "model.onnx")
        max_tokens = config.get("max_position_embeddings")
        if not isinstance(max_tokens, int) or max_tokens < 8:
            raise SourceError(
                f"{folder}/config.json: max_position_embeddings must be 8 or more, got {max_tokens!r}"
            )
        if config.get("model_type") in ("roberta", "xlm-roberta", "camembert", "mpnet"):
            max_tokens -= 2  # their positions begin at 2
        tokenizer.no_padding()
        return cls(tokenizer=tokenizer, session=session, config=config, max_tokens=max_tokens)

    def close(self) -> None:
        """Release the engine."""
        self.session.close()

    def run(self, ids: Ints, type_ids: Ints, output: str) -> Floats:
        """One text or pair (n,) through the graph: the first row of `output`, copied."""
        given = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": type_ids}
        wanted = [spec.name for spec in self.session.inputs]
        if unknown := set(wanted) - given.keys():
            raise BackendError(
                f"the encoder's graph asks for {', '.join(sorted(unknown))}, which nobody gives it"
            )
        feeds = {name: given[name][None] for name in wanted}
        found: Floats = self.session.run(feeds, [output])[output].numpy()[0].astype(np.float32)
        return found


class SentenceEncoder:
    """Texts to vectors of length 1; call it."""

    def __init__(self, encoder: Encoder, pooling: str) -> None:
        self._encoder, self._pooling = encoder, pooling

    @classmethod
    def open(
        cls, source: str | Path, *, pooling: str | None = None, threads: int | None = None
    ) -> SentenceEncoder:
        """See Encoder.open. pooling: one of POOLINGS; None: what 1_Pooling/config.json in a local folder says.

        Raises CalibrationError too: a pooling that is neither, or not told by anybody (hub downloads hold no
        sub-folders).
        """
        chosen = pooling or _told_pooling(_folder(source))
        if chosen not in POOLINGS:
            raise CalibrationError(f"pooling must be one of {', '.join(POOLINGS)}, got {chosen!r}")
        return cls(Encoder.open(source, "feature-extraction", threads=threads), chosen)

    def __call__(self, texts: Sequence[str]) -> Floats:
        """(n, width). A text longer than a pass is read in windows, each weighing as many tokens as it has."""
        vectors = [self._vector(text) for text in texts]
        return np.stack(vectors) if vectors else np.zeros((0, 0), np.float32)

    def close(self) -> None:
        """Release the engine."""
        self._encoder.close()

    def _vector(self, text: str) -> Floats:
        encoder, total = self._encoder, None
        for ids, type_ids in _windows(encoder.tokenizer, text, encoder.max_tokens):
            states = encoder.run(ids, type_ids, "last_hidden_state")
            part = states.sum(axis=0) if self._pooling == "mean" else states[0] * len(ids)
            total = part if total is None else total + part
        length = 0.0 if total is None else float(np.linalg.norm(total))
        if total is None or not 0 < length < np.inf:
            raise CalibrationError(
                f"the encoder makes no vector of {text[:40]!r} (length {length}); use another encoder"
            )
        vector: Floats = (total / length).astype(np.float32)
        return vector


class PairEncoder:
    """A cross-encoder that classifies pairs: premise and hypothesis in one pass."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        labels = encoder.config.get("id2label")
        if not isinstance(labels, dict) or sorted(map(str, labels)) != sorted(map(str, range(len(labels)))):
            raise SourceError("a cross-encoder's config.json must name its classes 0.. in id2label")
        self.labels = tuple(str(labels.get(str(number), "")).lower() for number in range(len(labels)))

    @classmethod
    def open(cls, source: str | Path, *, threads: int | None = None) -> PairEncoder:
        """See Encoder.open. Raises SourceError too for a config without names of classes."""
        return cls(Encoder.open(source, "text-classification", threads=threads))

    def __call__(self, premise: str, hypothesis: str) -> Floats:
        """(classes,) logits. Raises CalibrationError for a pair longer than a pass; half a pair says nothing."""
        encoder = self._encoder
        encoder.tokenizer.no_truncation()
        read = encoder.tokenizer.encode(premise, hypothesis)
        if len(read.ids) > encoder.max_tokens:
            raise CalibrationError(
                f"two segments have {len(read.ids)} tokens together, and the encoder reads {encoder.max_tokens}: use "
                "another relation, or a smaller segment cap"
            )
        return encoder.run(np.array(read.ids, np.int64), np.array(read.type_ids, np.int64), "logits")

    def close(self) -> None:
        """Release the engine."""
        self._encoder.close()


def _folder(source: str | Path) -> Path:
    """The local folder of `source`, its weights in safetensors."""
    parsed = parse_source(str(source))
    if not isinstance(parsed, LocalSource | HubSource):
        raise SourceError(f"an encoder is a folder or a hub id org/name, got {source}")
    folder = fetch(parsed)
    if not folder.is_dir() or not any(folder.glob("*.safetensors")):
        raise SourceError(
            f"{folder} holds no *.safetensors, the only weights that are read; name another encoder"
        )
    return folder


def _told_pooling(folder: Path) -> str:
    path = folder / "1_Pooling" / "config.json"
    if not path.is_file():
        raise CalibrationError(
            f"{folder} does not tell its pooling; give pooling as one of {', '.join(POOLINGS)}"
        )
    modes = {name for name, on in _read_json(path).items() if name.startswith("pooling_mode_") and on is True}
    names = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
    if len(modes) != 1 or not modes <= names.keys():
        raise CalibrationError(
            f"{path} asks for {', '.join(sorted(modes)) or 'nothing'}; known: {', '.join(names)}"
        )
    return names[modes.pop()]


def _export(folder: Path, out: Path, task: str) -> None:
    try:
        exporter = importlib.import_module("optimum.exporters.onnx")
    except ImportError as error:
        raise CalibrationError(
            f"encoders need optimum-onnx, which cannot be imported ({error}); install it with: pip install "
            "'semspec[calibrate]'"
        ) from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's tracer warns of constants that are meant as such
            exporter.main_export(
                str(folder),
                output=out,
                task=task,
                library_name="transformers",
                local_files_only=True,
                trust_remote_code=False,
                do_validation=False,
            )
    except Exception as error:  # transformers, torch and Optimum raise what they like
        raise SourceError(
            f"{folder} cannot be exported as {task}: {_line(error)}; name another encoder"
        ) from error


def _windows(tokenizer: Tokenizer, text: str, max_tokens: int) -> Iterator[tuple[Ints, Ints]]:
    """Ids and type ids of `text` in passes of at most max_tokens, special tokens in each."""
    tokenizer.enable_truncation(max_tokens)
    read = tokenizer.encode(text)
    for window in (read, *read.overflowing):
        yield np.array(window.ids, np.int64), np.array(window.type_ids, np.int64)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{path} cannot be read: {_line(error)}") from error
    if not isinstance(found, dict):
        raise SourceError(f"{path} must hold an object")
    return found


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__
