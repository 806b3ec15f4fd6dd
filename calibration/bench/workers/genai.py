"""onnxruntime-genai: its own int4 export, plain or with a draft model of its own speculation."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

import numpy as np

from semspec.calibration.bench.workers.engine import Ask, Counts, Engine, Opening
from semspec.runtime.records import Floats

__all__ = ["open_engine"]


def open_engine(opening: Opening) -> Engine:
    """opening.model: a folder with genai_config.json, which names the draft where there is one."""
    return _Genai(opening)


class _Genai:
    def __init__(self, opening: Opening) -> None:
        import onnxruntime_genai as og

        self._og = og
        og.disable_telemetry_events()
        config = og.Config(opening.model)
        session = {"session_options": {"intra_op_num_threads": opening.threads}}
        roles = ("decoder", "draft") if opening.drafts == "model" else ("decoder",)
        config.overlay(json.dumps({"model": dict.fromkeys(roles, session)}))
        self._drafts = opening.drafts
        self._model = og.Model(config)
        self._generator: Any = None

    def versions(self) -> Mapping[str, str]:
        return {"onnxruntime-genai": metadata.version("onnxruntime-genai")}

    def forget(self) -> None:
        self._generator = None

    def generate(self, ask: Ask, on_first: Callable[[], None]) -> list[int]:
        params = self._og.GeneratorParams(self._model)
        params.set_search_options(
            max_length=len(ask.ids) + ask.max_tokens,
            min_length=0,
            do_sample=ask.temperature > 0,
            temperature=ask.temperature or 1.0,
            top_k=ask.top_k,
            top_p=ask.top_p,
            repetition_penalty=1.0,
            random_seed=ask.seed,
            batch_size=1,
            num_beams=1,
        )
        if self._drafts is not None:
            params.set_speculative_options(**self._speculation(ask))
        self._generator = generator = self._og.Generator(self._model, params)
        generator.append_tokens(np.asarray(ask.ids, np.int32))
        written: list[int] = []
        while not generator.is_done() and len(written) < ask.max_tokens:
            generator.generate_next_token()
            written.append(int(generator.get_next_tokens()[0]))
            if len(written) == 1:
                on_first()
            if written[-1] in ask.stop_ids:
                break
        return written

    def _speculation(self, ask: Ask) -> dict[str, int]:
        """genai's own defaults but for the length; its n-grams are off unless asked for, 3 as its guide begins with."""
        wanted = {"ngram_size": 3} if self._drafts == "ngram" else {}
        return wanted if ask.n_draft is None else {**wanted, "max_draft_tokens": ask.n_draft}

    def counts(self) -> Counts:
        if self._drafts is None:
            return Counts()
        stats = self._generator.get_speculative_stats()
        return Counts(
            rounds=int(stats["target_forward_passes"] + stats["standard_fallback_steps"]),
            drafted=int(stats["draft_tokens_proposed"]),
            accepted=int(stats["draft_tokens_accepted"]),
        )

    def logits(self, ids: Sequence[int]) -> Floats:
        params = self._og.GeneratorParams(self._model)
        params.set_search_options(max_length=len(ids) + 1, batch_size=1)
        generator = self._og.Generator(self._model, params)
        generator.append_tokens(np.asarray(ids, np.int32))
        found: Floats = np.asarray(generator.get_output("logits"), np.float32)
        return found.reshape(-1, found.shape[-1])
