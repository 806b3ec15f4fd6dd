"""Agreement: does a backend say what the same graph says on the CPU, and the same however a text is cut?

Nothing is called exact on a GPU: what differs is counted, each with its margin, by which the CPU preferred its own
token. Small margins are rounding; a large one, or rows far apart, is a fault in positions, masks or caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from semspec.export.engine_graphs import CUT_KL
from semspec.export.verify import closeness
from semspec.runtime.config import SamplingParams, SpecConfig
from semspec.runtime.errors import BackendError
from semspec.runtime.llm import LLM
from semspec.runtime.model import CachedModel, common_prefix
from semspec.runtime.records import Floats

__all__ = ["Rows", "compare_answers", "compare_models", "compare_rows", "verdict"]

TEXT = 290  # tokens: more than one span of the cache
LAST = 24  # of them read one by one
PIECES = (3, 5, 1, 7, 2, 6, 4)
ANSWER = 32
PROMPTS = ("x", "one two three four five six seven " * 10)
MOST_GAP = 0.02  # of states and pooled sums, in parts of the largest
MOST_MARGIN = 0.1  # logits; those of the pair have a deviation near 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Logits of the same rows, twice. kl: mean, in nats. different: rows whose likeliest token is another; margin: the
    largest distance between these two tokens' logits, as expected, 0 where none differs. gap: of any two logits."""

    rows: int
    kl: float
    different: int
    margin: float
    gap: float


def compare_rows(expected: Floats, found: Floats) -> Rows:
    """Both (S, V). Raises BackendError where what was found is no number."""
    if not np.isfinite(found).all():
        raise BackendError("the engine's logits are not finite numbers")
    kl, _ = closeness(expected, found)
    ours, theirs = expected.argmax(axis=-1), found.argmax(axis=-1)
    places = np.arange(len(expected))
    margins = (expected[places, ours] - expected[places, theirs])[ours != theirs]
    return Rows(
        rows=len(expected),
        kl=max(kl, 0.0),
        different=len(margins),
        margin=float(margins.max(initial=0.0)),
        gap=float(np.abs(expected - found).max()),
    )


def compare_models(expected: CachedModel, found: CachedModel) -> dict[str, Any]:
    """One graph on the CPU and on a backend, over a random text: `cpu`, each way of reading against the CPU's one
    pass; `itself`, against the backend's own; `gaps` of states and pooled sums, in parts of the largest."""
    ids = np.random.default_rng(0).integers(0, 256, TEXT).tolist()
    expected.rewind(0)
    truth = _logits(expected, ids)
    ways = _read_ways(found, ids)
    own = ways["one pass"]
    cuts = {way: logits for way, logits in ways.items() if way != "one pass"}
    right, states = _read_states(expected, ids), _read_states(found, ids)
    gaps = {
        name: float(np.abs(state - right[name]).max() / np.abs(right[name]).max())
        for name, state in states.items()
    }
    return {
        "cpu": {way: asdict(compare_rows(truth[-len(rows) :], rows)) for way, rows in ways.items()},
        "itself": {way: asdict(compare_rows(own[-len(rows) :], rows)) for way, rows in cuts.items()},
        "gaps": gaps,
    }


def compare_answers(expected: LLM, found: LLM) -> list[dict[str, Any]]:
    """Greedy answers of a pair: the CPU's target alone, against the backend's, alone and with a draft.

    Where they part: `at`, the token's place in the answer, and `margin`, by which the CPU's target preferred its own.
    """
    compared = []
    for prompt in _prompts(expected):
        right = _answer(expected, prompt, "autoregressive")
        for mode in ("autoregressive", "lossless"):
            ids = _answer(found, prompt, mode)
            at = common_prefix(right, ids)
            fact: dict[str, Any] = {"prompt": len(prompt), "mode": mode, "tokens": len(right)}
            if at < len(right):
                fact |= {"at": at, "margin": _margin(expected, [*prompt, *right[:at]], right[at], ids[at])}
            compared.append(fact)
    return compared


def verdict(models: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> str:
    """What is beyond rounding, "" where nothing is."""
    wrong = []
    for against in ("cpu", "itself"):
        for way, rows in models[against].items():
            if rows["kl"] > CUT_KL:
                wrong.append(f"{way}: {rows['kl']:.3g} nats from {against}")
    wrong += [f"{name}: {gap:.3g} apart" for name, gap in models["gaps"].items() if gap > MOST_GAP]
    margins = [answer.get("margin", 0.0) for answer in answers]
    if margins and max(margins) > MOST_MARGIN:
        wrong.append(f"an answer leaves the CPU's at a margin of {max(margins):.3g}")
    return "; ".join(wrong)


def _read_ways(model: CachedModel, ids: Sequence[int]) -> dict[str, Floats]:
    """Way of reading -> logits (S, V), of all rows or of the last ones."""
    last = len(ids) - LAST
    model.rewind(0)
    found = {"one pass": _logits(model, ids)}
    model.rewind(0)
    model.forward(ids[::-1])  # rows of another text, which a mask must hide
    model.rewind(0)
    pieces: list[Floats] = []
    while model.length < len(ids):
        size = PIECES[len(pieces) % len(PIECES)]
        pieces.append(_logits(model, ids[model.length : model.length + size]))
    found["pieces"] = np.concatenate(pieces)
    model.rewind(last)
    found["one by one"] = np.concatenate([_logits(model, [token]) for token in ids[last:]])
    model.rewind(last)
    model.forward(ids[: LAST // 2])  # wrong ones
    model.rewind(last)
    found["after a rewind"] = _logits(model, ids[last:])
    return found


def _logits(model: CachedModel, ids: Sequence[int]) -> Floats:
    return model.forward(ids, rows=range(len(ids))).logits.copy()


def _read_states(model: CachedModel, ids: Sequence[int]) -> dict[str, Floats]:
    """Hidden states of all rows; the pooled sum of the last ones, in one pass and summed up one by one."""
    last = len(ids) - LAST
    model.rewind(0)
    hidden = model.forward(ids, hidden=model.spec.hidden_layers).hidden
    found = {f"state {index}": state.copy() for index, state in hidden.items()}
    model.rewind(last)
    found["pooled"] = _pooled(model, ids[last:], None)
    model.rewind(last)
    total: Floats | None = None
    for token in ids[last:]:
        total = _pooled(model, [token], total)
    assert total is not None
    return found | {"pooled one by one": total}


def _pooled(model: CachedModel, ids: Sequence[int], before: Floats | None) -> Floats:
    pooled = model.forward(ids, pool=np.ones(len(ids), np.float32), pooled=before).pooled
    assert pooled is not None
    return pooled.copy()


def _prompts(llm: LLM) -> list[list[int]]:
    """A short one, a long one, and that with its answer and more: a second turn, whose beginning is remembered."""
    short, long = (llm.tokenizer.encode(text) for text in PROMPTS)
    return [short, long, [*long, *_answer(llm, long, "autoregressive"), *short]]


def _answer(llm: LLM, prompt: Sequence[int], mode: str) -> tuple[int, ...]:
    greedy = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
    return llm.generate(prompt, greedy, spec=SpecConfig(mode=mode)).token_ids


def _margin(llm: LLM, read: Sequence[int], ours: int, theirs: int) -> float:
    """By which the CPU's target prefers its own token, asked in one pass."""
    llm.target.rewind(0)
    logits = llm.target.forward(read).logits[-1]
    return float(logits[ours] - logits[theirs])
