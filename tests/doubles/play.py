"""A program that decodes with the plans of a bundle over the doubles of this folder, and with its CPU graphs.

    play.py BUNDLE BACKEND[,BACKEND..] [MUTATION..]     prints one JSON line: what each backend answered, or the error

Runs in a process of its own: the double of the driver must not be found by anything else. A mutation breaks one thing
that the backend must do right, so that a test sees whether it would be noticed; of each, states alone are printed.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pytest import MonkeyPatch

from semspec import LLM, SamplingParams, SpecConfig
from semspec.runtime import model as model_module
from semspec.runtime.backends.cuda import DeviceTensor, Gpu
from semspec.runtime.backends.passes import Pass
from semspec.runtime.backends.trt import TrtSession
from semspec.runtime.contract import SPAN_STEP
from semspec.runtime.errors import SemspecError

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
    """Of the last row of a text, on a cache that held another, after the draft took more memory than the target had.

    Both texts are read in pieces of one shape, over two spans, so that passes are repeated before and after.
    """
    with LLM(bundle, backend=backend, spec=SpecConfig(num_draft_tokens=2)) as llm:
        llm.states("z" * 320)
        llm.generate("x", SamplingParams(max_tokens=3, temperature=0.0))
        found = llm.states(LONG[:320])
        return [round(float(value), 3) for state in found.values() for value in state[-1]]


def counts() -> dict[str, int]:
    """What doubles were asked to do so far, and what of it was not given back."""
    driver = ctypes.CDLL("libcuda.so.1")
    engine = import_module("tensorrt_rtx").COUNTS
    return {**engine, "launches": driver.double_launches(), "graphs": driver.double_graphs()}


def shift_rows(patch: MonkeyPatch) -> None:
    right = Gpu.write_rows
    patch.setattr(Gpu, "write_rows", lambda self, rows, buffer, at: right(self, rows, buffer, at + 1))


def narrow_stride(patch: MonkeyPatch) -> None:
    right = Gpu.write_rows

    def wrong(self: Gpu, rows: DeviceTensor, buffer: DeviceTensor, at: int) -> None:
        *outer, capacity, size = buffer.shape
        right(self, rows, buffer.shaped((*outer, capacity - 1, size)), at)

    patch.setattr(Gpu, "write_rows", wrong)


def two_buffers(patch: MonkeyPatch) -> None:
    right = TrtSession.bind

    def wrong(self: TrtSession, input_name: str, output_name: str, tensor: DeviceTensor) -> None:
        right(self, input_name, output_name, tensor)
        if output_name:
            self._bound[output_name] = self._backend.zeros(tensor.shape, tensor.dtype)

    patch.setattr(TrtSession, "bind", wrong)


def short_span(patch: MonkeyPatch) -> None:
    patch.setattr(model_module, "span_of", lambda spec, length: SPAN_STEP)


def wrong_part(patch: MonkeyPatch) -> None:
    right = DeviceTensor.part
    patch.setattr(DeviceTensor, "part", lambda self, index: right(self, index ^ 1))


def stale_shape(patch: MonkeyPatch) -> None:
    right = DeviceTensor.shaped
    patch.setattr(DeviceTensor, "shaped", lambda self, shape: right(self, (*shape[:-2], 1, *shape[-1:])))


def any_span(patch: MonkeyPatch) -> None:
    """What was recorded for one span is launched for every other."""
    key, fit = TrtSession._key, Pass.fit

    def wrong(self: Pass, shapes: Mapping[str, tuple[int, ...]], memory: DeviceTensor) -> str:
        return fit(self, {**shapes, **({"span": self._shapes["span"]} if self.kept else {})}, memory)

    patch.setattr(
        TrtSession, "_key", lambda self, profile, shapes: key(self, profile, {**shapes, "span": ()})
    )
    patch.setattr(Pass, "fit", wrong)


def old_memory(patch: MonkeyPatch) -> None:
    """What is replayed works where it was recorded, wherever the memory is now."""
    right = Pass.fit

    def wrong(self: Pass, shapes: Mapping[str, tuple[int, ...]], memory: Any) -> str:
        old = SimpleNamespace(address=self._memory, n_bytes=memory.n_bytes)
        return right(self, shapes, old if self.kept else memory)

    patch.setattr(Pass, "fit", wrong)


def old_inputs(patch: MonkeyPatch) -> None:
    """Inputs are copied for what is recorded, and for what is replayed no more."""
    fit, write = Pass.fit, Gpu.write
    latest: list[Pass] = []

    def keep(self: Pass, shapes: Mapping[str, tuple[int, ...]], memory: DeviceTensor) -> str:
        latest[:] = [self]
        return fit(self, shapes, memory)

    patch.setattr(Pass, "fit", keep)
    patch.setattr(Gpu, "write", lambda self, array, to: None if latest[0].kept else write(self, array, to))


def recorded_only(patch: MonkeyPatch) -> None:
    """What is recorded is taken for done."""
    right = Pass.run

    def wrong(self: Pass, gpu: Gpu) -> bool:
        if self.kept:
            gpu.record(lambda: self._ask(gpu))
            return True
        return right(self, gpu)

    patch.setattr(Pass, "run", wrong)


def nothing(patch: MonkeyPatch) -> None:
    """As it is."""


MUTATIONS: dict[str, Callable[[MonkeyPatch], None]] = {
    break_it.__name__: break_it
    for break_it in (
        nothing,
        shift_rows,
        narrow_stride,
        two_buffers,
        short_span,
        wrong_part,
        stale_shape,
        any_span,
        old_memory,
        old_inputs,
        recorded_only,
    )
}


def broken(bundle: Path, backend: str, mutation: str) -> dict[str, Any]:
    with MonkeyPatch.context() as patch:
        MUTATIONS[mutation](patch)
        try:
            return {"states": states(bundle, backend)}
        except (SemspecError, IndexError, ValueError) as error:  # a slip in a mutation is none of these
            return {"error": f"{type(error).__name__}: {error}"}


def played(bundle: Path, backends: list[str]) -> dict[str, Any]:
    line: dict[str, Any] = {backend: answers(bundle, backend) for backend in backends}
    line["states"] = {backend: states(bundle, backend) for backend in backends}
    line["counts"] = counts()
    if "cpu" in backends:
        with LLM(bundle, backend="auto") as llm:
            line["auto"] = [llm.backend, llm.backend_why]
    return line


def main() -> None:
    bundle, backends, mutations = Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:]
    if mutations:
        line = {mutation: broken(bundle, backends[0], mutation) for mutation in mutations}
    else:
        line = played(bundle, backends)
    sys.stdout.write(json.dumps(line))


if __name__ == "__main__":
    main()
