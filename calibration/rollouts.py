"""Roll-outs: does the answer stay right? In each context the target goes on greedily, from the draft's greedy segment
and from its own, to the end of the answer; where both segments are the same, one roll-out serves both.

It decides who goes on from what, in which order and until when; files are outcomes.py's, right and wrong is
bench/answers.py's.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np

from semspec.calibration.bench.answers import check_gold, is_correct
from semspec.calibration.bench.records import Problem
from semspec.calibration.collection import Cell, Collection
from semspec.calibration.contexts import SLOTS
from semspec.calibration.outcomes import FORMAT, Outcome, OutcomeRun, Outcomes, RollOut, WritingOutcomes
from semspec.calibration.pair import Pair, open_pairs
from semspec.calibration.records import Context, Sample
from semspec.calibration.sharing import Budget, share_out
from semspec.runtime.bundle import Bundle
from semspec.runtime.chooser import Chooser
from semspec.runtime.config import SamplingParams
from semspec.runtime.drafting import ModelDrafter
from semspec.runtime.errors import CalibrationError
from semspec.runtime.loop import Request, decode
from semspec.runtime.probes import model_hashes
from semspec.runtime.records import Progress
from semspec.runtime.stats import Ledger
from semspec.runtime.stopping import StopWatch

__all__ = ["check_answers", "find_outcomes", "go_on"]

GAMMA = 4  # tokens drafted at once


def check_answers(problems: Sequence[Problem], least: int) -> None:
    """Raise CalibrationError where fewer than `least` of these questions have a known answer, where one cannot be read,
    and where nobody can judge answers. Main thread only, as check_gold."""
    if importlib.util.find_spec("math_verify") is None:
        raise CalibrationError(
            "outcomes need math_verify, which judges answers; install it with: pip install 'semspec[bench]'"
        )
    known = [(problem.id, problem.answer) for problem in problems if problem.answer is not None]
    if len(known) < least:
        raise CalibrationError(
            f"{len(known)} of {len(problems)} questions have a known answer, and outcomes need at least {least}; give "
            "answers, or take another label"
        )
    for name, answer in known:
        try:
            check_gold(answer)
        except CalibrationError as error:
            raise CalibrationError(f"question {name!r}: {error}") from None


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
    right only by what it has put in a box. One context of every question comes first, of every slot by turns. budget:
    minutes, by `clock`; a context that might not be ready in time, by the longest so far, is not begun. threads:
    contexts that are worked on at once, each on a core, None for one a core. The backend is the collection's. Main
    thread only, as is_correct.

    Raises CalibrationError: another bundle than was collected from, an answer that cannot be read, a damaged
    collection, an `out` that cannot be written; ConfigError: settings out of range, an `out` of something else; errors
    of the bundle and its engines. What was found before an error stays.
    """
    allowed = Budget(budget, clock)
    sampling = SamplingParams(max_tokens=max_tokens)
    opened, backend = Bundle.open(bundle), collection.run.backend
    _check_models(opened, collection)
    run = OutcomeRun(
        format=FORMAT, collection=collection.run.fingerprint, max_tokens=max_tokens, backend=backend
    )
    with (
        WritingOutcomes(out, run, collection) as writing,
        open_pairs(
            opened, sampling=sampling, boundary=collection.run.boundary, backend=backend, threads=threads
        ) as pairs,
    ):

        def roll_out_cell(pair: Pair, cell: Cell) -> list[_Ending] | None:
            """None where there was no time for it."""
            if (began := allowed.begin()) is None:
                return None
            context, samples = collection.read(cell)
            endings = []
            if context is not None and context.answer is not None:
                endings = _roll_out(pair, _n_prompt(collection, cell), context, samples)
            allowed.end(began)
            return endings

        missing = sorted(writing.outcomes.missing, key=_turn)
        n_ready = sum(1 for _ in collection.run.cells()) - len(collection.missing)
        n_done = n_ready - len(missing)
        with closing(share_out(pairs, [[cell] for cell in missing], roll_out_cell)) as finished:
            for cell, endings in finished:
                if endings is None:
                    continue
                writing.add(cell, _judge(collection, cell, endings) if endings else None)
                n_done += 1
                if on_progress is not None:
                    on_progress("rolling out", n_done, n_ready)
        return writing.outcomes


def _turn(cell: Cell) -> int:
    """Cut short, there is a context of many questions, rather than all of a few, for intervals are by question; and of
    every slot as many, for a calibration is about all of them."""
    return (SLOTS.index(cell.slot) - cell.question) % len(SLOTS)


def _check_models(bundle: Bundle, collection: Collection) -> None:
    if model_hashes(bundle.manifest) != collection.run.models:
        raise CalibrationError(
            f"{collection.folder} was collected with other models than those of {bundle.path}; give the bundle it is "
            "of, or collect again"
        )


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


def _n_prompt(collection: Collection, cell: Cell) -> int:
    """Tokens of the question's prompt, which is the context of its first slot. Raises CalibrationError where that was
    not collected."""
    first = Cell(cell.question, "prompt")
    context = None if first in collection.missing else collection.read(first)[0]
    if context is None:
        raise CalibrationError(
            f"{collection.folder} lacks {first.file}, the prompt of other contexts in it; collect on"
        )
    return len(context.ids)


class _Ending(NamedTuple):
    """How an answer ends after a segment. text: of the whole answer. whole: it came to an end by itself."""

    segment: tuple[int, ...]
    ids: tuple[int, ...]
    text: str
    whole: bool


def _roll_out(pair: Pair, n_prompt: int, context: Context, samples: Sequence[Sample]) -> list[_Ending]:
    """After each greedy segment of a context. n_prompt: its first so many tokens are the question."""
    endings = []
    for segment in dict.fromkeys(sample.ids for sample in samples if sample.greedy):
        begun = (*context.ids, *segment)
        ids, whole = go_on(pair, begun, pair.sampling.max_tokens)
        stream = pair.tokenizer.stream(begun[:n_prompt])
        text = stream.push((*begun[n_prompt:], *ids)) + stream.finish()
        endings.append(_Ending(segment=segment, ids=ids, text=text, whole=whole))
    return endings


def _judge(collection: Collection, cell: Cell, endings: Sequence[_Ending]) -> Outcome:
    """Which of a context's answers are right."""
    context, samples = collection.read(cell)
    assert context is not None and context.answer is not None
    check_gold(context.answer)
    found = {
        one.segment: RollOut(
            segment=one.segment,
            ids=one.ids,
            whole=one.whole,
            right=is_correct(one.text, context.answer, whole=one.whole),
        )
        for one in endings
    }
    greedy = {sample.author: sample.ids for sample in samples if sample.greedy}
    return Outcome(
        context=context.id,
        question=context.question,
        answer=context.answer,
        after_draft=found[greedy["draft"]],
        after_own=found[greedy["target"]],
    )
