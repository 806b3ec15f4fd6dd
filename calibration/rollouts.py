"""Roll-outs: does the answer stay right? In each context the target goes on greedily, from the draft's greedy segment
and from its own, to the end of the answer; where both segments are the same, one roll-out serves both.

It decides who goes on from what, in which order and until when; files are outcomes.py's, right and wrong is
bench/answers.py's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from semspec.calibration.bench.answers import check_gold, is_correct
from semspec.calibration.collection import Cell, Collection
from semspec.calibration.outcomes import FORMAT, Outcome, OutcomeRun, Outcomes, RollOut, WritingOutcomes
from semspec.calibration.pair import Pair, open_pair
from semspec.calibration.records import Context, Sample
from semspec.runtime.bundle import Bundle
from semspec.runtime.chooser import Chooser
from semspec.runtime.config import SamplingParams
from semspec.runtime.drafting import ModelDrafter
from semspec.runtime.errors import CalibrationError, ConfigError
from semspec.runtime.loop import Request, decode
from semspec.runtime.probes import model_hashes
from semspec.runtime.records import Progress
from semspec.runtime.stats import Ledger
from semspec.runtime.stopping import StopWatch

__all__ = ["find_outcomes", "go_on"]

GAMMA = 4  # tokens drafted at once


def find_outcomes(
    bundle: Path,
    collection: Collection,
    out: Path,
    *,
    max_tokens: int = 400,
    budget: float | None = None,
    threads: int | None = None,
    on_progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcomes:
    """Find, or go on finding, the outcomes of what `collection` holds, in the folder `out`; all else is only read.

    Contexts of questions without a known answer have none. max_tokens: of a roll-out; a longer answer is cut off and
    right only by what it has put in a box. budget: minutes, by `clock`; a context that might not be ready in time, by
    the longest so far, is not begun. The backend is the collection's. Main thread only, as is_correct.

    Raises CalibrationError: another bundle than was collected from, an answer that cannot be read, a damaged
    collection, an `out` that cannot be written; ConfigError: settings out of range, an `out` of something else; errors
    of the bundle and its engines. What was found before an error stays.
    """
    started, longest = clock(), 0.0
    if budget is not None and not budget > 0:
        raise ConfigError(f"the budget must be more than 0 minutes, got {budget}")
    sampling = SamplingParams(max_tokens=max_tokens)
    opened, backend = Bundle.open(bundle), collection.run.backend
    if model_hashes(opened.manifest) != collection.run.models:
        raise CalibrationError(
            f"{collection.folder} was collected with other models than those of {bundle}; give the bundle it is of, or "
            "collect again"
        )
    run = OutcomeRun(
        format=FORMAT, collection=collection.run.fingerprint, max_tokens=max_tokens, backend=backend
    )
    with (
        WritingOutcomes(out, run, collection) as writing,
        open_pair(
            opened, sampling=sampling, boundary=collection.run.boundary, backend=backend, threads=threads
        ) as pair,
    ):
        missing = writing.outcomes.missing
        n_ready = sum(1 for _ in collection.run.cells()) - len(collection.missing)
        prompts = _Prompts(collection)
        for done, cell in enumerate(missing, start=n_ready - len(missing) + 1):
            began = clock()
            if budget is not None and began - started + longest > 60 * budget:
                break
            context, samples = collection.read(cell)
            outcome = None
            if context is not None and context.answer is not None:
                outcome = _find_outcome(pair, prompts.length(cell), context, context.answer, samples)
            writing.add(cell, outcome)
            longest = max(longest, clock() - began)
            if on_progress is not None:
                on_progress("rolling out", done, n_ready)
        return writing.outcomes


def go_on(pair: Pair, ids: Sequence[int], max_tokens: int) -> tuple[tuple[int, ...], bool]:
    """What the target writes after `ids`, greedily, with the draft's help, and whether it came to an end by itself.

    The same tokens as without help where a row has the same bits in every pass, as on the CPU. Nothing where `ids`
    end the answer already.
    """
    tokenizer, sampling = pair.tokenizer, SamplingParams(max_tokens=max_tokens)
    if ids[-1] in tokenizer.eos_ids:
        return (), True
    chooser = Chooser(sampling, tokenizer.vocab_size, ids)
    watch = StopWatch(sampling, tokenizer.eos_ids, tokenizer.stream(ids))
    drafter = ModelDrafter(
        pair.models["draft"], chooser, stop_ids=watch.stop_ids, vocab_size=pair.n_ids("draft")
    )
    request = Request(
        prompt=ids,
        chooser=chooser,
        watch=watch,
        ledger=Ledger(),
        rng=np.random.default_rng(0),
        drafter=drafter,
        num_draft_tokens=GAMMA,
    )
    steps = list(decode(pair.models["target"], request))
    return tuple(token for step in steps for token in step.ids), steps[-1].finish_reason == "stop"


class _Prompts:
    """Tokens of each question's prompt, which is the context of its first slot."""

    def __init__(self, collection: Collection) -> None:
        self._collection = collection
        self._known: tuple[int, int] | None = None  # question, tokens

    def length(self, cell: Cell) -> int:
        """Raises CalibrationError where the question's prompt was not collected."""
        if self._known is None or self._known[0] != cell.question:
            first = Cell(cell.question, "prompt")
            context = None if first in self._collection.missing else self._collection.read(first)[0]
            if context is None:
                raise CalibrationError(
                    f"{self._collection.folder} lacks {first.file}, the prompt of other contexts in it; collect on"
                )
            self._known = cell.question, len(context.ids)
        return self._known[1]


def _find_outcome(
    pair: Pair, n_prompt: int, context: Context, answer: str, samples: Sequence[Sample]
) -> Outcome:
    """Both roll-outs of a context. n_prompt: its first so many tokens are the question."""
    check_gold(answer)
    greedy = {sample.author: sample.ids for sample in samples if sample.greedy}
    found = {
        segment: _roll_out(pair, n_prompt, context, answer, segment)
        for segment in dict.fromkeys(greedy.values())
    }
    return Outcome(
        context=context.id,
        question=context.question,
        answer=answer,
        after_draft=found[greedy["draft"]],
        after_own=found[greedy["target"]],
    )


def _roll_out(pair: Pair, n_prompt: int, context: Context, answer: str, segment: tuple[int, ...]) -> RollOut:
    begun = (*context.ids, *segment)
    ids, whole = go_on(pair, begun, pair.sampling.max_tokens)
    stream = pair.tokenizer.stream(begun[:n_prompt])
    text = stream.push((*begun[n_prompt:], *ids)) + stream.finish()
    return RollOut(segment=segment, ids=ids, whole=whole, right=is_correct(text, answer, whole=whole))
