"""Where segments are collected: a question's prompt alone, and prefixes of answers to it that the models write.

At run time a draft's segment follows what target and draft wrote before, so calibration must see such texts: at most
three contexts a question, `prompt`, `target` and `mixed`. It knows no files; questions come from
bench.data.read_problems or problems.generate_problems.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from semspec.calibration.bench.answering import chat_of
from semspec.calibration.bench.records import Problem
from semspec.calibration.pair import Pair, rng_for
from semspec.calibration.records import Context
from semspec.calibration.writing import draw_segment
from semspec.runtime.errors import CalibrationError
from semspec.runtime.tokenizer import Tokenizer

__all__ = ["SLOTS", "check_prompts", "make_context", "prompt_ids"]

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


def make_context(
    pair: Pair,
    problem: Problem,
    slot: str,
    *,
    max_segments: int,
    seed: int,
    begun: Mapping[str, tuple[int, ...]] | None = None,
) -> Context | None:
    """One of SLOTS of a question; the same for the same seed, models and `begun`.

    `prompt`: the question alone. `target`: and 1 to `max_segments` segments drawn from the target, as many as chance
    says. `mixed`: the same number by whom a coin says, the last by the draft. Fewer where the answer ends, the context
    is full, or the target writes an id that the draft lacks; None where that leaves no segment.

    begun: author -> a segment that it has drawn after the prompt already, for the first one; that is not drawn again.
    """
    ids = prompt_ids(pair.tokenizer, problem)
    authors = _plan(problem, slot, max_segments=max_segments, seed=seed)
    n_written = 0
    for number, author in enumerate(authors):
        if number == 0 and begun is not None:
            segment = begun[author]
        else:
            segment = draw_segment(
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
        n_written += 1
    if authors and not n_written:
        return None
    written = authors[:n_written]
    return Context(
        id=f"{problem.id}/{slot}",
        question=problem.id,
        ids=tuple(ids),
        answer=problem.answer,
        written_by="mixed" if "draft" in written else "target" if written else "nobody",
    )


def _plan(problem: Problem, slot: str, *, max_segments: int, seed: int) -> list[str]:
    """Who writes each segment."""
    if slot == "prompt":
        return []
    rng = rng_for(seed, problem.id, slot, "plan")
    n = int(rng.integers(1, max_segments + 1))
    if slot == "target":
        return ["target"] * n
    return [*(("target", "draft")[int(coin)] for coin in rng.integers(0, 2, n - 1)), "draft"]
