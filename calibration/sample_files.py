"""One context with its samples as one safetensors file: arrays for what the models made of them, JSON for the rest.

    draft.draft.pooled (n, K * E)    draft.draft.signals (n, 5)     the draft's segments, read by the draft
    draft.target.pooled ..           target.target.pooled ..        read by the target; the target's own

Rows are in the order of the samples of that author. Signals are stored in fp32. It knows one file; which files there
are is collection.py's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from semspec.calibration.records import Context, Sample
from semspec.export.rows import StoredTensor, read_rows
from semspec.export.safetensors_file import read_safetensors_header, read_safetensors_metadata
from semspec.export.safetensors_writer import write_safetensors
from semspec.runtime.errors import CalibrationError, SourceError
from semspec.runtime.readings import Reading, Signals
from semspec.runtime.records import Floats
from semspec.runtime.typed import read_typed

__all__ = ["read_samples", "write_samples"]

READERS: Mapping[str, tuple[str, ...]] = {"draft": ("draft", "target"), "target": ("target",)}
"""Author -> who reads its segments."""

N_SIGNALS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredContext:
    """A Context in JSON; answers: one, or none where nobody knows it."""

    id: str
    question: str
    ids: tuple[int, ...]
    answers: tuple[str, ...]
    written_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredSample:
    """A Sample in JSON; how: `greedy` or `drawn`."""

    author: str
    how: str
    ids: tuple[int, ...]
    text: str


def write_samples(
    path: Path, context: Context | None, samples: Sequence[Sample], *, fingerprint: str
) -> None:
    """context: None says that there is none. fingerprint: of the run. Raises OSError; see write_safetensors."""
    tensors: dict[str, Floats] = {}
    for author, roles in READERS.items():
        for role in roles:
            readings = [sample.readings[role] for sample in samples if sample.author == author]
            if readings:
                pooled = np.stack([reading.pooled.reshape(-1) for reading in readings])
                signals = np.array([astuple(reading.signals) for reading in readings], np.float32)
                tensors |= {f"{author}.{role}.pooled": pooled, f"{author}.{role}.signals": signals}
    contexts = [] if context is None else [asdict(_stored_context(context))]
    said = {
        "contexts": contexts,
        "run": fingerprint,
        "samples": [asdict(_stored_sample(sample)) for sample in samples],
    }
    write_safetensors(path, tensors, {name: json.dumps(value) for name, value in said.items()})


def read_samples(
    path: Path, *, fingerprint: str, shapes: Mapping[str, tuple[int, int]]
) -> tuple[Context | None, tuple[Sample, ...]]:
    """What write_samples wrote. shapes: role -> (K, E). Raises CalibrationError: damaged, or of another run."""
    try:
        said = {name: json.loads(text) for name, text in read_safetensors_metadata(path).items()}
        if said.get("run") != fingerprint:
            raise CalibrationError(f"{path} is of another run than its run.json; take it out of there")
        contexts = read_typed(tuple[_StoredContext, ...], said.get("contexts"), "contexts")
        stored = read_typed(tuple[_StoredSample, ...], said.get("samples"), "samples")
        if not contexts:
            return None, ()
        context = _context(contexts[0])
        readings = _read_readings(read_safetensors_header(path), stored, shapes)
        samples = [_sample(context, one, found) for one, found in zip(stored, readings, strict=True)]
    except (SourceError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:160]
        raise CalibrationError(
            f"{path} is damaged ({reason}); remove it and run the same command again"
        ) from None
    return context, tuple(samples)


def _read_readings(
    tensors: Mapping[str, StoredTensor],
    stored: Sequence[_StoredSample],
    shapes: Mapping[str, tuple[int, int]],
) -> list[dict[str, Reading]]:
    """The readings of each sample. Raises ValueError and SourceError."""
    found: list[dict[str, Reading]] = [{} for _ in stored]
    for author, roles in READERS.items():
        places = [place for place, sample in enumerate(stored) if sample.author == author]
        for role in roles if places else ():
            n_layers, width = shapes[role]
            pooled = _rows(tensors, f"{author}.{role}.pooled", (len(places), n_layers * width))
            signals = _rows(tensors, f"{author}.{role}.signals", (len(places), N_SIGNALS))
            for row, place in enumerate(places):
                found[place][role] = Reading(
                    pooled=pooled[row].reshape(n_layers, width), signals=Signals(**_named(signals[row]))
                )
    return found


def _rows(tensors: Mapping[str, StoredTensor], name: str, shape: tuple[int, int]) -> Floats:
    if name not in tensors or tensors[name].shape != shape:
        raise ValueError(f"it lacks {name} of shape {shape}")
    return read_rows(tensors[name])


def _named(values: Floats) -> dict[str, Any]:
    return dict(zip(Signals.__dataclass_fields__, values.tolist(), strict=True))


def _stored_context(context: Context) -> _StoredContext:
    return _StoredContext(
        id=context.id,
        question=context.question,
        ids=context.ids,
        answers=() if context.answer is None else (context.answer,),
        written_by=context.written_by,
    )


def _context(stored: _StoredContext) -> Context:
    return Context(
        id=stored.id,
        question=stored.question,
        ids=stored.ids,
        answer=stored.answers[0] if stored.answers else None,
        written_by=stored.written_by,
    )


def _stored_sample(sample: Sample) -> _StoredSample:
    how = "greedy" if sample.greedy else "drawn"
    return _StoredSample(author=sample.author, how=how, ids=sample.ids, text=sample.text)


def _sample(context: Context, stored: _StoredSample, readings: Mapping[str, Reading]) -> Sample:
    if stored.author not in READERS or stored.how not in ("greedy", "drawn") or not stored.ids:
        raise ValueError(f"a sample of {stored.author!r}, {stored.how!r}, {len(stored.ids)} ids")
    return Sample(
        context=context.id,
        author=stored.author,
        greedy=stored.how == "greedy",
        ids=stored.ids,
        text=stored.text,
        readings=readings,
    )
