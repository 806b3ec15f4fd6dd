"""transformers: generate() on the CPU, plain, assisted by a draft model, or by n-grams of prompt and answer (look-up).

Weights are the same fp32 numbers, or these rounded to bfloat16 where this processor multiplies that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from semspec.calibration.bench.workers.engine import Ask, Counts, Engine, Opening
from semspec.runtime.records import Floats

__all__ = ["open_engine"]

CPUINFO = Path("/proc/cpuinfo")
LOOKUP = (
    10  # tokens of a draft by look-up where transformers decides; asked for by name, so it has to be said
)
BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}  # x86, x86 with tiles, Arm


def open_engine(opening: Opening) -> Engine:
    """opening.model, draft: folders as Hugging Face has them."""
    return _Transformers(opening)


class _Transformers:
    def __init__(self, opening: Opening) -> None:
        torch.set_num_threads(opening.threads)
        dtype = _faster_dtype() if opening.dtype is None else getattr(torch, opening.dtype)
        self._model = _load(opening.model, dtype)
        self._draft = None if opening.draft is None else _load(opening.draft, dtype)
        self._drafts = opening.drafts
        self._passes = _count_passes(self._model)
        self._draft_passes = None if self._draft is None else _count_passes(self._draft)
        self._counts = Counts()

    def versions(self) -> Mapping[str, str]:
        dtype = str(self._model.dtype).removeprefix("torch.")
        return {"torch": torch.__version__, "transformers": transformers.__version__, "dtype": dtype}

    def forget(self) -> None:
        """generate() makes a cache for each answer and drops it."""

    def generate(self, ask: Ask, on_first: Callable[[], None]) -> list[int]:
        options: dict[str, Any] = {}
        if self._draft is not None:
            options["assistant_model"] = self._draft
            if ask.n_draft is not None:
                self._draft.generation_config.num_assistant_tokens = ask.n_draft
        if self._drafts == "ngram":
            options["prompt_lookup_num_tokens"] = LOOKUP if ask.n_draft is None else ask.n_draft
        self._passes.clear()
        if self._draft_passes is not None:
            self._draft_passes.clear()
        ids = torch.tensor([ask.ids])
        torch.manual_seed(ask.seed)
        watch = _Watch(on_first)
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=_settings(ask),
                streamer=watch,
                **options,
            )
        self._counts = self._count(ask, watch.ids)
        return watch.ids

    def _count(self, ask: Ask, written: Sequence[int]) -> Counts:
        if self._drafts is None:
            return Counts()
        rounds = len(self._passes)
        if self._draft_passes is not None:
            drafted = len(self._draft_passes)
        else:  # a pass reads the prompt, or one token more, and what was looked up
            drafted = sum(self._passes) - len(ask.ids) - (rounds - 1)
        return Counts(rounds=rounds, drafted=drafted, accepted=max(len(written) - rounds, 0))

    def counts(self) -> Counts:
        return self._counts

    def logits(self, ids: Sequence[int]) -> Floats:
        with torch.inference_mode():
            found: Floats = self._model(torch.tensor([list(ids)])).logits[0].float().numpy()
        return np.ascontiguousarray(found)


class _Watch:
    """A streamer: ids as generate() finds them, after the prompt, which comes first."""

    def __init__(self, on_first: Callable[[], None]) -> None:
        self.ids: list[int] = []
        self._on_first, self._prompt = on_first, True

    def put(self, value: Any) -> None:
        if self._prompt:
            self._prompt = False
            return
        if not self.ids:
            self._on_first()
        self.ids += value.flatten().tolist()

    def end(self) -> None:
        """Nothing to finish."""


def _faster_dtype() -> Any:
    """bfloat16 where the processor multiplies it (measured there: half the time of a step), else float32.

    By its flags and not by a trial, so that a run that is resumed has the same numbers.
    """
    try:
        flags = set(CPUINFO.read_text("utf-8", errors="replace").split())
    except OSError:
        return torch.float32
    return torch.bfloat16 if flags & BFLOAT16 else torch.float32


def _load(folder: str, dtype: Any) -> Any:
    auto: Any = transformers.AutoModelForCausalLM  # its methods have no types
    model = auto.from_pretrained(folder, dtype=dtype, local_files_only=True)
    # the model's own settings would fill in what an Ask leaves at a library's default
    model.generation_config = _new_settings()
    return model.eval()


def _new_settings(**options: Any) -> Any:
    make: Any = transformers.GenerationConfig
    return make(**options)


def _settings(ask: Ask) -> Any:
    chance = {"temperature": ask.temperature, "top_k": ask.top_k, "top_p": ask.top_p}
    return _new_settings(
        max_new_tokens=ask.max_tokens,
        do_sample=ask.temperature > 0,
        eos_token_id=list(ask.stop_ids) or None,
        pad_token_id=0,  # of a batch's shorter texts; there is one text
        **(chance if ask.temperature else {}),
    )


def _count_passes(model: Any) -> list[int]:
    """A list that grows by the length of its input at every pass of the model."""
    passes: list[int] = []

    def note(module: Any, arguments: Any, options: Mapping[str, Any]) -> None:
        passes.append(int(options["input_ids"].shape[1]) if options.get("input_ids") is not None else 0)

    model.register_forward_pre_hook(note, with_kwargs=True)
    return passes
