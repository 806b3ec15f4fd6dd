"""llama.cpp through llama-cpp-python: the GGUF file as it is, plain or with prompt look-up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

import numpy as np

from semspec.calibration.bench.workers.engine import Ask, Counts, Engine, Opening
from semspec.runtime.records import Floats

__all__ = ["open_engine"]


def open_engine(opening: Opening) -> Engine:
    """opening.model: a GGUF file."""
    return _Llama(opening)


class _Llama:
    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._lookup = _Counted() if opening.drafts == "ngram" else None
        self._llama = self._open(draft_model=self._lookup)
        self._rows: Any = None  # the same, keeping the logits of every row; opened when they are asked for
        self._counts = Counts()

    def _open(self, **options: Any) -> Any:
        from llama_cpp import Llama

        return Llama(
            model_path=self._opening.model,
            n_ctx=self._opening.max_context + 1,
            n_threads=self._opening.threads,
            n_threads_batch=self._opening.threads,
            verbose=False,
            **options,
        )

    def versions(self) -> Mapping[str, str]:
        return {"llama-cpp-python": metadata.version("llama-cpp-python")}

    def forget(self) -> None:
        self._llama.reset()

    def generate(self, ask: Ask, on_first: Callable[[], None]) -> list[int]:
        """Its sampler cuts by top_k and top_p before it divides by the temperature, ours after."""
        self._llama.reset()
        self._llama.set_seed(ask.seed)
        if self._lookup is not None:
            self._lookup.start(ask.n_draft)
        tokens = self._llama.generate(
            list(ask.ids),
            temp=ask.temperature,
            top_k=ask.top_k,
            top_p=ask.top_p,
            min_p=0.0,
            repeat_penalty=1.0,
        )
        written: list[int] = []
        for token in tokens:
            written.append(int(token))
            if len(written) == 1:
                on_first()
            if token in ask.stop_ids or len(written) == ask.max_tokens:
                break
        tokens.close()
        if self._lookup is not None:
            self._counts = self._lookup.counts(len(written))
        return written

    def counts(self) -> Counts:
        return self._counts

    def logits(self, ids: Sequence[int]) -> Floats:
        if self._rows is None:
            self._rows = self._open(logits_all=True)
        self._rows.reset()
        self._rows.eval(list(ids))
        found: Floats = np.array(self._rows.scores[: len(ids)], np.float32)
        return found


class _Counted:
    """LlamaPromptLookupDecoding, and how its drafts fared: it is asked once a pass of the target."""

    def __init__(self) -> None:
        self.start(None)

    def start(self, n_draft: int | None) -> None:
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        options = {} if n_draft is None else {"num_pred_tokens": n_draft}
        self._draft = LlamaPromptLookupDecoding(**options)
        self._rounds = self._drafted = 0

    def __call__(self, input_ids: Any, /, **options: Any) -> Any:
        found = self._draft(input_ids, **options)
        self._rounds += 1
        self._drafted += len(found)
        return found

    def counts(self, n_written: int) -> Counts:
        """A pass adds its drafts that were right and one token more; the first token came of the prompt. What a stop
        cut off is drafted and not accepted."""
        accepted = n_written - 1 - self._rounds if self._rounds else 0
        return Counts(rounds=self._rounds, drafted=self._drafted, accepted=max(accepted, 0))
