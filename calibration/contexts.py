"""Where segments are collected: a question's prompt alone, and prefixes of answers to it that the models write.

At run time a draft's segment follows what target and draft wrote before, so calibration must see such texts: at most
three contexts a question, `prompt`, `target` and `mixed`, each going on where the one before ends: what was written
there serves as the beginning here. It knows no files; questions come from bench.data.read_problems or
problems.generate_problems.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from semspec.calibration.bench.answering import chat_of
from semspec.calibration.bench.records import Problem
from semspec.calibration.pair import Pair, rng_for
from semspec.calibration.records import Context
from semspec.calibration.writing import draw_segment
from semspec.runtime.errors import CalibrationError
from semspec.runtime.tokenizer import Tokenizer

__all__ = ["SLOTS", "Start", "check_prompts", "make_context", "prompt_ids"]

SLOTS = ("prompt", "target", "mixed")


def prompt_ids(tokenizer: Tokenizer, problem: Problem) -> list[int]:
    """What a model is asked, as the benchmark asks it: a chat, or plain text where the model has no chat template."""
    messages = chat_of(problem)
    if tokenizer.has_chat_template:
        return tokenizer.encode_chat(messages)
    return tokenizer.encode(f"{messages[0]['content']}\n\n")


def check_prompts(pair: Pair, problems: Sequence[Problem]) -> None:
    """Raise CalibrationError for a question that leaves no room for a segment, or that the draft cannot read."""
    for problem in problems:
        ids = prompt_ids(pair.tokenizer, problem)
        if len(ids) > pair.longest_context:
            raise CalibrationError(
                f"question {problem.id!r} has {len(ids)} tokens, and at most {pair.longest_context} leave room for a "
                f"segment of {pair.segmenter.boundary.max_tokens}; leave it out, or export with a larger --max-context"
            )
        if unknown := [token for token in ids if token >= pair.n_ids("draft")]:
            raise CalibrationError(
                f"question {problem.id!r} holds id {unknown[0]}, which the draft model does not have; leave it out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a prefix may begin. ids: a context. drawn: author -> a segment that it has drawn there already, for the
    first one; that is not drawn again."""

    ids: tuple[int, ...]
    drawn: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def make_context(
    pair: Pair,
    problem: Problem,
    slot: str,
    *,
    max_segments: int,
    seed: int,
    starts: Sequence[Start] = (),
) -> Context | None:
    """One of SLOTS of a question; the same for the same seed, models and `starts`.

    `prompt`: the question alone. `target`: and 1 to half of `max_segments` segments drawn from the target, as many as
    chance says. `mixed`: and behind these up to as many by whom a coin says, the last by the draft; behind the question
    where the target's leave no room. Fewer where the answer ends, the context is full, or the target writes an id that
    the draft lacks; None where that leaves no segment of its own.

    starts: the first that leaves room for a segment counts. None given: all is drawn here.
    """
    prompt = tuple(prompt_ids(pair.tokenizer, problem))
    if slot == "prompt":
        return _context(problem, slot, prompt, "nobody")
    authors = _plan(problem, slot, max_segments=max_segments, seed=seed)
    if not starts:
        starts = [Start(ids=prompt)]
        if slot == "mixed" and max_segments > 1:
            before = make_context(pair, problem, "target", max_segments=max_segments, seed=seed)
            starts = [*([] if before is None else [Start(ids=before.ids)]), *starts]
    for start in starts:
        segments = _write(pair, problem, slot, start, authors, seed=seed)
        if segments:
            ids = (*start.ids, *(token for segment in segments for token in segment))
            written_by = "mixed" if "draft" in authors[: len(segments)] else "target"
            return _context(problem, slot, ids, written_by)
    return None


def _write(
    pair: Pair, problem: Problem, slot: str, start: Start, authors: Sequence[str], *, seed: int
) -> list[tuple[int, ...]]:
    """The segments that `authors` write one after another, as far as others can follow."""
    ids, segments = list(start.ids), list[tuple[int, ...]]()
    for number, author in enumerate(authors):
        segment = start.drawn.get(author) if number == 0 else None
        segment = segment or draw_segment(
            pair.models[author],
            ids,
            rng_for(seed, problem.id, slot, "segment", number),
            segmenter=pair.segmenter,
            sampling=pair.sampling,
            n_ids=pair.n_ids(author),
        )
        if segment[-1] in pair.segmenter.stop_ids or max(segment) >= pair.n_ids("draft"):
            break
        if len(ids) + len(segment) > pair.longest_context:
            break
        ids += segment
        segments.append(segment)
    return segments


def _context(problem: Problem, slot: str, ids: tuple[int, ...], written_by: str) -> Context:
    return Context(
        id=f"{problem.id}/{slot}",
        question=problem.id,
        ids=ids,
        answer=problem.answer,
        written_by=written_by,
    )


def _plan(problem: Problem, slot: str, *, max_segments: int, seed: int) -> list[str]:
    """Who writes each segment."""
    rng = rng_for(seed, problem.id, slot, "plan")
    most = (max_segments + 1) // 2 if slot == "target" else max(max_segments // 2, 1)
    n = int(rng.integers(1, most + 1))
    if slot == "target":
        return ["target"] * n
    return [*(("target", "draft")[int(coin)] for coin in rng.integers(0, 2, n - 1)), "draft"]
