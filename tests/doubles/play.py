"""A program that decodes with the plans of a bundle over the doubles of this folder, and with its CPU graphs.

    play.py BUNDLE [MUTATION]      prints one JSON line: what each backend answered, or the error

Runs in a process of its own: the double of the driver must not be found by anything else. A mutation breaks one thing
that the backend must do right, so that a test sees whether it would be noticed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from semspec import LLM, SamplingParams, SpecConfig
from semspec.runtime import model as model_module
from semspec.runtime.backends.cuda import DeviceTensor, Gpu
from semspec.runtime.backends.trt import TrtSession
from semspec.runtime.contract import SPAN_STEP
from semspec.runtime.errors import SemspecError

PLANS = "tensorrt-rtx"
LONG = "one two three four five six seven " * 10  # more than a chunk of the plan, and more than one span


def answers(bundle: Path, backend: str) -> dict[str, Any]:
    """Ids of greedy, drafted, sampled and semantic answers, of a conversation, and states of a long text."""
    greedy = SamplingParams(max_tokens=24, temperature=0.0, seed=3)
    sampled = SamplingParams(max_tokens=24, temperature=0.8, seed=3)
    found: dict[str, Any] = {}
    with LLM(bundle, backend=backend, spec=SpecConfig(num_draft_tokens=5)) as llm:
        chat = [{"role": "user", "content": LONG}]
        first = llm.chat(chat, greedy)
        chat += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "and more"}]
        found["conversation"] = [first.token_ids, llm.chat(chat, greedy).token_ids]
        found["rejected"] = first.stats.num_draft_tokens - first.stats.num_accepted_draft_tokens
        found["alone"] = llm.generate("x", greedy, spec=SpecConfig(mode="autoregressive")).token_ids
        found["sampled"] = llm.generate("some text", sampled).token_ids
        ways = [SpecConfig(mode="semantic", preset=name) for name in ("paper", "strict")]
        semantic = [llm.generate("a b", greedy, spec=way) for way in ways]
        found["semantic"] = [answer.token_ids for answer in semantic]
        found["kept"] = sum(answer.stats.num_accepted_segments for answer in semantic)
        found["judged"] = sum(answer.stats.num_segments for answer in semantic)
    return found


def states(bundle: Path, backend: str) -> list[float]:
    """Of the last row of a text, after another text was read and forgotten."""
    with LLM(bundle, backend=backend, spec=SpecConfig(draft="ngram")) as llm:
        llm.states("z" * 290)
        found = llm.states(LONG[:280])
        return [round(float(value), 3) for state in found.values() for value in state[-1]]


def shift_rows() -> None:
    right = Gpu.write_rows
    Gpu.write_rows = lambda self, rows, buffer, at: right(self, rows, buffer, at + 1)  # type: ignore[method-assign]


def narrow_stride() -> None:
    right = Gpu.write_rows

    def wrong(self: Gpu, rows: DeviceTensor, buffer: DeviceTensor, at: int) -> None:
        *outer, capacity, size = buffer.shape
        right(self, rows, buffer.shaped((*outer, capacity - 1, size)), at)

    Gpu.write_rows = wrong  # type: ignore[method-assign]


def two_buffers() -> None:
    right = TrtSession.bind

    def wrong(self: TrtSession, input_name: str, output_name: str, tensor: DeviceTensor) -> None:
        right(self, input_name, output_name, tensor)
        if output_name:
            self._bound[output_name] = self._backend.zeros(tensor.shape, tensor.dtype)

    TrtSession.bind = wrong  # type: ignore[method-assign]


def short_span() -> None:
    model_module.span_of = lambda spec, length: SPAN_STEP  # type: ignore[attr-defined]


def wrong_part() -> None:
    right = DeviceTensor.part
    DeviceTensor.part = lambda self, index: right(self, index ^ 1)  # type: ignore[method-assign]


def stale_shape() -> None:
    right = DeviceTensor.shaped
    DeviceTensor.shaped = lambda self, shape: right(self, (*shape[:-2], 1, *shape[-1:]))  # type: ignore[method-assign]


def nothing() -> None:
    """As it is."""


MUTATIONS: dict[str, Callable[[], None]] = {
    break_it.__name__: break_it
    for break_it in (nothing, shift_rows, narrow_stride, two_buffers, short_span, wrong_part, stale_shape)
}


def main() -> None:
    bundle = Path(sys.argv[1])
    try:
        if len(sys.argv) > 2:
            MUTATIONS[sys.argv[2]]()
            line: dict[str, Any] = {"states": states(bundle, PLANS)}
        else:
            line = {backend: answers(bundle, backend) for backend in ("cpu", PLANS)}
            with LLM(bundle, backend="auto") as llm:
                line["auto"] = [llm.backend, llm.backend_why]
            line["states"] = {backend: states(bundle, backend) for backend in ("cpu", PLANS)}
    except SemspecError as error:
        line = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.write(json.dumps(line))


if __name__ == "__main__":
    main()
