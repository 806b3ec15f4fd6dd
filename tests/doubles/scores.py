"""A program that has segments judged with plans of a bundle over the doubles of this folder, and with its CPU graphs.

    scores.py BUNDLE BACKEND[,BACKEND..] [MUTATION..]   prints one JSON line: what probes said in each way of judging

Of each backend of plans also how often so many bytes were read from the device, and how many blocks of its memory were
in use after one round and after two. A mutation breaks one thing between a pass and a probe; of each, the scores of the
last prompt alone.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pytest import MonkeyPatch

from semspec import LLM, SamplingParams, SpecConfig
from semspec.runtime import windows
from semspec.runtime.backends.base import Backend, Tensor
from semspec.runtime.backends.cuda import DeviceTensor, Gpu
from semspec.runtime.errors import SemspecError
from semspec.runtime.pooled import HeldPooled
from semspec.runtime.records import Array, Floats

WAYS = {
    "predictor": SpecConfig(mode="semantic"),
    "paper": SpecConfig(mode="semantic", preset="paper"),
}
PROMPTS = ("a b", "one two three four")
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, seed=3)
SCORES = ("score", "s_target", "s_draft")
driver = ctypes.CDLL("libcuda.so.1")


def judged(llm: LLM, prompts: Sequence[str] = PROMPTS) -> dict[str, Any]:
    """Way -> scores of every segment that a probe was asked about; drafted tokens; bytes read -> how often."""
    found: dict[str, Any] = {}
    with MonkeyPatch.context() as patch:
        sizes: Counter[int] = Counter()
        right = Gpu.read

        def read(self: Gpu, address: int, out: Array) -> None:
            sizes[out.nbytes] += 1
            right(self, address, out)

        patch.setattr(Gpu, "read", read)
        for way, spec in WAYS.items():
            sizes.clear()
            answers = [llm.generate(prompt, GREEDY, spec=spec) for prompt in prompts]
            figures = [one.figures for answer in answers for one in answer.judged]
            found[way] = {
                "scores": [[own[name] for name in SCORES if name in own] for own in figures if own],
                "drafted": sum(answer.stats.num_draft_tokens for answer in answers),
                "read": {str(size): times for size, times in sizes.items()},
            }
    return found


def scores(bundle: Path, backend: str) -> dict[str, Any]:
    """Way -> what is judged in it; blocks of device memory after one round and after two."""
    with LLM(bundle, backend=backend, spec=WAYS["paper"]) as llm:
        found = judged(llm)
        blocks = driver.double_live()
        again = judged(llm)
        same = all(found[way]["scores"] == again[way]["scores"] for way in WAYS)
        return {"ways": found, "blocks": [blocks, driver.double_live()], "same": same}


def stale(patch: MonkeyPatch) -> None:
    """States are gathered for the first segment, and never again."""
    right, done = HeldPooled.copy_to, list[bool]()

    def wrong(self: HeldPooled, buffer: Tensor, layers: Sequence[int]) -> None:
        if not done:
            right(self, buffer, layers)
        done.append(True)

    patch.setattr(HeldPooled, "copy_to", wrong)


def reversed_layers(patch: MonkeyPatch) -> None:
    right = HeldPooled.copy_to
    patch.setattr(HeldPooled, "copy_to", lambda self, buffer, layers: right(self, buffer, layers[::-1]))


def first_layer(patch: MonkeyPatch) -> None:
    right = HeldPooled.copy_to
    patch.setattr(HeldPooled, "copy_to", lambda self, buffer, layers: right(self, buffer, [0] * len(layers)))


def other_model(patch: MonkeyPatch) -> None:
    """States are taken from where the draft left its own."""
    make, right = HeldPooled.__init__, HeldPooled.copy_to
    made: list[HeldPooled] = []

    def keep(self: HeldPooled, tensor: Tensor, backend: Backend) -> None:
        make(self, tensor, backend)
        made.append(self)

    def wrong(self: HeldPooled, buffer: Tensor, layers: Sequence[int]) -> None:
        others = [one for one in made if one is not self and one._tensor is not None]
        right(others[-1] if others else self, buffer, layers)

    patch.setattr(HeldPooled, "__init__", keep)
    patch.setattr(HeldPooled, "copy_to", wrong)


def begins_anew(patch: MonkeyPatch) -> None:
    """The draft's sum is lost between two of its passes."""

    def feed(self: HeldPooled) -> Floats:
        return np.zeros((1, *self.shape), np.float32)

    patch.setattr(HeldPooled, "feed", property(feed))


def no_copy(patch: MonkeyPatch) -> None:
    """What a session is fed from the device does not arrive."""
    right = Gpu.write

    def wrong(self: Gpu, values: Array | DeviceTensor, to: int) -> None:
        if not isinstance(values, DeviceTensor):
            right(self, values, to)

    patch.setattr(Gpu, "write", wrong)


def sum_for_mean(patch: MonkeyPatch) -> None:
    patch.setattr(windows, "_pool", lambda n: np.append(np.ones(n, np.float32), np.float32(0)))


def nothing(patch: MonkeyPatch) -> None:
    """As it is."""


MUTATIONS: dict[str, Callable[[MonkeyPatch], None]] = {
    break_it.__name__: break_it
    for break_it in (
        nothing,
        stale,
        reversed_layers,
        first_layer,
        other_model,
        begins_anew,
        no_copy,
        sum_for_mean,
    )
}


def broken(bundle: Path, backend: str, mutation: str) -> dict[str, Any]:
    with MonkeyPatch.context() as patch:
        MUTATIONS[mutation](patch)
        try:
            with LLM(bundle, backend=backend, spec=WAYS["paper"]) as llm:
                return {"ways": judged(llm, PROMPTS[-1:])}
        except SemspecError as error:
            return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    bundle, backends, mutations = Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:]
    if mutations:
        line = {mutation: broken(bundle, backends[0], mutation) for mutation in mutations}
    else:
        line = {backend: scores(bundle, backend) for backend in backends}
    sys.stdout.write(json.dumps(line))


if __name__ == "__main__":
    main()
