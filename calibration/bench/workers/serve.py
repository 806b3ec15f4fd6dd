"""The loop of a peer's process: a question a line on stdin, an answer a line on stdout, until stdin ends.

    python -m semspec.calibration.bench.workers.serve LIBRARY

    {"op": "open", "model": .., "draft": .., "threads": .., "max_context": ..}     {"ok": true, "versions": {..}}
    {"op": "forget"}                                                               {"ok": true}
    {"op": "generate", "ids": [..], ..}          {"ok": true, "ids": [..], "seconds": .., "ttft_s": .., counts ..}
    {"op": "logits", "ids": [..], "out": FILE}   {"ok": true}; FILE is a .npy of (S, V) float32
    whatever goes wrong                          {"ok": false, "error": ".."}, and its traceback on stderr

Libraries that write to stdout reach stderr: the wire is a copy of stdout that they do not know.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO

import numpy as np

from semspec.calibration.bench.workers.engine import Engine, Opening, read_ask
from semspec.runtime.stats import peak_mib

__all__ = ["main", "serve"]

ENGINES = {
    "genai": "semspec.calibration.bench.workers.genai",
    "llama": "semspec.calibration.bench.workers.llama",
    "transformers": "semspec.calibration.bench.workers.hf",
}


def main() -> None:
    """Entry point of a worker: its first argument is the library."""
    wire = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    serve(sys.argv[1], sys.stdin, wire)


def serve(library: str, questions: TextIO, answers: TextIO) -> None:
    """Answer until the questions end. Nothing a library raises ends the loop."""
    worker = Worker(library)
    for line in questions:
        try:
            fields = json.loads(line)
            answer = {"ok": True, **worker.answer(fields.pop("op"), fields)}
        except Exception as error:  # noqa: BLE001 - libraries raise what they like, and it is told, not hidden
            traceback.print_exc()
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class Worker:
    """One library, opened once."""

    def __init__(self, library: str) -> None:
        self._library = library
        self._engine: Engine | None = None

    def answer(self, op: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """What to say to a question, beside that it went well."""
        if op == "open":
            opening: Callable[[Opening], Engine] = import_module(ENGINES[self._library]).open_engine
            self._engine = opening(Opening(**fields))
            return {"versions": self._engine.versions(), "peak_mib": peak_mib()}
        if self._engine is None:
            raise ValueError(f"{op!r} before 'open'")
        if op == "forget":
            self._engine.forget()
            gc.collect()
            return {}
        if op == "logits":
            np.save(Path(fields["out"]), self._engine.logits(fields["ids"]).astype(np.float32, copy=False))
            return {"peak_mib": peak_mib()}
        if op == "generate":
            return _generate(self._engine, fields)
        raise ValueError(f"unknown question {op!r}")


def _generate(engine: Engine, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    ask = read_ask(fields)
    first: list[float] = []
    started = perf_counter()
    ids = engine.generate(ask, lambda: first.append(perf_counter()))
    seconds = perf_counter() - started
    ends = [place for place, token in enumerate(ids, 1) if token in ask.stop_ids]
    ids = ids[: min([*ends, ask.max_tokens])]
    return {
        "ids": ids,
        "seconds": seconds,
        "ttft_s": first[0] - started if first else None,
        "finish_reason": "stop" if ids and ids[-1] in ask.stop_ids else "length",
        "peak_mib": peak_mib(),
        **asdict(engine.counts()),
    }


if __name__ == "__main__":
    main()
