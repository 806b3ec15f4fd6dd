"""Where a block ends an answer, what is counted, and what the next request finds: all as without drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_tokenizers
from decoding import Letters, Stub, habits, run, start
from graphs import Graph, build_graph, tiny_variant
from numpy.testing import assert_array_equal
from scripted import Law, ScriptedModel, scattered

from semspec.runtime.model import CachedModel
from semspec.runtime.records import Floats, Step
from semspec.runtime.stats import Ledger, Summary
from semspec.runtime.tokenizer import Tokenizer

V = 99
PROMPT = [3, 1, 4, 1, 5]
WORDS = Letters(pieces=[f"<{token}>" for token in range(V)])
PENALTIES: dict[str, dict[str, float]] = {
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 0.7},
    "frequency": {"frequency_penalty": 0.7},
    "all": {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.7},
}


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    _, spec, weights = tiny_variant("llama-default-untied")
    return build_graph(tmp_path_factory.mktemp("tiny") / "graph", weights, spec)


@pytest.fixture(scope="module")
def models(graph: Graph) -> Iterator[tuple[CachedModel, CachedModel]]:
    """A target and the same model as its draft: everything is kept, so stops fall inside blocks."""
    with graph.open() as target, graph.open() as draft:
        yield target, draft


def writes(ids: Sequence[int], size: int = V) -> Law:
    """After n tokens comes ids[n], round and round, whatever they were."""
    return lambda context: 9 * np.eye(size)[ids[len(context) % len(ids)]]


def whole(steps: Iterator[Step]) -> tuple[str, list[int], str | None, list[float]]:
    """Text, ids, reason and log-probabilities of an answer."""
    found = list(steps)
    ids = [token for step in found for token in step.ids]
    logprobs = [value for step in found for value in step.logprobs]
    return "".join(step.text for step in found), ids, found[-1].finish_reason, logprobs


# Stops


@pytest.mark.parametrize("gamma", range(2, 9))
def test_end_token_ends_the_answer_wherever_it_falls(
    models: tuple[CachedModel, CachedModel], gamma: int
) -> None:
    """D01: every token that is new in the text is declared the end once."""
    target, draft = models
    plain, _ = run(target, PROMPT, vocab_size=V, max_tokens=40)
    for at, end in enumerate(plain):
        if end in plain[:at]:
            continue
        ledger = Ledger()
        options: dict[str, Any] = {"draft": draft, "gamma": gamma, "ledger": ledger, "text": WORDS}
        steps = start(target, PROMPT, vocab_size=V, max_tokens=40, end_ids=[end], logprobs=True, **options)
        text, ids, reason, logprobs = whole(steps)
        assert (ids, reason) == (plain[: at + 1], "stop")
        assert text == WORDS.push(ids[:-1])
        assert len(logprobs) == ledger.summary().generated_tokens == at + 1
        assert target.tokens == [*PROMPT, *ids[:-1]]
        assert draft.tokens == target.tokens[: draft.length]


def test_end_token_that_the_draft_alone_wants_ends_only_the_draft() -> None:
    """D01: nothing follows an end, so drafting stops there; the target goes on where it disagrees."""
    target, draft = ScriptedModel(writes([1, 2, 3, 4, 5, 6])), ScriptedModel(writes([1, 2, 7, 4, 5, 6]))
    ledger = Ledger()
    options: dict[str, Any] = {"draft": draft, "gamma": 4, "end_ids": [7], "ledger": ledger}
    ids, reason = run(target, [1], vocab_size=V, max_tokens=12, **options)
    assert (ids, reason) == ([2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 1], "length")
    # 2 7 | 4 5 6 1 | 7 | 4 5 6: behind each 7 nothing was drafted
    assert ledger.summary().acceptance_lengths == (1, 1, 0, 1, 1)
    assert ledger.summary().num_draft_tokens == len(draft.calls) == 10


@pytest.mark.parametrize("gamma", range(1, 9))
def test_stop_string_is_found_in_any_block(models: tuple[CachedModel, CachedModel], gamma: int) -> None:
    """D02, D18: completed by any token of a block, spread over three; streamed text never shows a part of it."""
    target, draft = models
    plain, _ = run(target, PROMPT, vocab_size=V, max_tokens=24)
    text = WORDS.push(plain)
    for at in range(3, 24):
        stop = text[len(WORDS.push(plain[: at - 2])) + 1 : len(WORDS.push(plain[: at + 1])) - 1]
        options: dict[str, Any] = {"stop": (stop,), "max_tokens": 24, "logprobs": True, "text": WORDS}
        expected = whole(start(target, PROMPT, vocab_size=V, **options))
        ledger = Ledger()
        steps = start(target, PROMPT, vocab_size=V, draft=draft, gamma=gamma, ledger=ledger, **options)
        assert whole(steps) == expected
        assert expected[0] == text[: text.index(stop)] and expected[2] == "stop"
        summary = ledger.summary()
        assert summary.num_accepted_draft_tokens <= summary.num_draft_tokens <= summary.generated_tokens
        assert summary.generated_tokens == len(expected[1])
        assert target.tokens == [*PROMPT, *expected[1][:-1]]


@pytest.mark.parametrize("gamma", range(1, 9))
def test_cap_is_met_exactly(gamma: int) -> None:
    """A block that could pass max_tokens is shortened; where an end token is the last allowed one, it is a stop."""
    law = writes([1, 2, 3, 4, 5, 6])
    for cap in range(1, 13):
        plain = [(n + 1) % 6 + 1 for n in range(cap)]
        options: dict[str, Any] = {"vocab_size": V, "max_tokens": cap, "gamma": gamma}
        target = ScriptedModel(law)
        assert run(target, [1], draft=ScriptedModel(law), **options) == (plain, "length")
        assert max(at + len(ids) for at, ids in target.calls) <= cap
        if cap <= 6:
            found = run(ScriptedModel(law), [1], draft=ScriptedModel(law), end_ids=[plain[-1]], **options)
            assert found == (plain, "stop")


@pytest.mark.parametrize("decoder", ["llama", "metaspace"])
@pytest.mark.parametrize("gamma", [1, 2, 3, 8])
def test_spaces_of_a_sentencepiece_text_survive_in_blocks(tmp_path: Path, decoder: str, gamma: int) -> None:
    """D19: decode(all) less decode(prompt), however the text is cut, the space at its start included."""
    tokenizer = Tokenizer.open(tiny_tokenizers.save(tmp_path, tiny_tokenizers.sentencepiece(decoder=decoder)))
    text = "a b  c 日 é b"
    ids = tokenizer.encode(text)
    for n_prompt in range(1, len(ids)):
        prompt = ids[:n_prompt]
        law = writes(ids, tokenizer.vocab_size)
        options: dict[str, Any] = {
            "vocab_size": tokenizer.vocab_size,
            "max_tokens": len(ids) - n_prompt,
            "text": tokenizer.stream(prompt),
            "draft": ScriptedModel(law),
            "gamma": gamma,
        }
        steps = start(ScriptedModel(law), prompt, **options)
        assert tokenizer.decode(prompt) + whole(steps)[0] == text


# Statistics


def counted(drafts: Sequence[Sequence[int]], **options: Any) -> Summary:
    """Statistics where the target writes 1 2 3 .. and a stub proposes the next of `drafts` in every round."""
    law = writes(range(V))
    left = iter(drafts)
    ledger = Ledger()
    drafter = Stub(habit=lambda committed, limit: next(left, ()))
    run(ScriptedModel(law, max_context=200), [0], vocab_size=V, draft=drafter, ledger=ledger, **options)
    return ledger.summary()


def test_drafts_are_counted_as_by_hand() -> None:
    """D15: 3 of 4, 0 of 4, 4 of 4, then the end at place 2 of 4: 1-4, 5, 6-10, 11-12."""
    drafts = [(1, 2, 3, 9), (9, 9, 9, 9), (6, 7, 8, 9), (11, 12, 13, 14)]
    summary = counted(drafts, end_ids=[12])
    assert (summary.num_rounds, summary.num_drafts) == (4, 4)
    assert (summary.num_draft_tokens, summary.num_accepted_draft_tokens) == (14, 9)
    assert summary.generated_tokens == 12
    assert summary.acceptance_lengths == (1, 0, 1, 1, 1)
    assert summary.draft_acceptance_rate == 9 / 14
    assert summary.mean_acceptance_length == 3


def test_the_free_token_is_no_accepted_draft() -> None:
    """D15: all of a draft kept gives a token more, which nobody drafted."""
    summary = counted([(1, 2)], max_tokens=3)
    assert (summary.num_draft_tokens, summary.num_accepted_draft_tokens) == (2, 2)
    assert (summary.generated_tokens, summary.num_rounds) == (3, 1)


def test_rounds_without_a_draft_are_no_failed_drafts() -> None:
    """D15: none drafted is `None`, no division and no rate of zero."""
    summary = counted([], max_tokens=5)
    assert (summary.num_rounds, summary.num_drafts, summary.num_draft_tokens) == (5, 0, 0)
    assert summary.draft_acceptance_rate is None and summary.acceptance_lengths == ()
    assert summary.mean_acceptance_length == 1


def test_steps_say_who_wrote_what() -> None:
    """The sum over steps is that of the statistics, also where a stop cuts the block."""
    law = writes(range(V))
    drafter = Stub(habit=habits(range(V), V)["third wrong"])
    ledger = Ledger()
    steps = list(
        start(ScriptedModel(law), [0], vocab_size=V, draft=drafter, ledger=ledger, end_ids=[10], gamma=4)
    )
    assert [(step.ids, step.n_from_draft) for step in steps] == [
        ((1, 2, 3), 2),
        ((4, 5, 6), 2),
        ((7, 8, 9), 2),
        ((10,), 1),
    ]
    assert ledger.summary().num_accepted_draft_tokens == 7


# The next request


def end_of_turn(kind: str, plain: Sequence[int]) -> dict[str, Any]:
    """What ends the first turn in the middle of a block of 8, or just at its end."""
    return {
        "end id": {"end_ids": [plain[11]]},
        "stop string": {"stop": (WORDS.push(plain[10:12])[2:],)},
        "cap": {"max_tokens": 12},
        "abandoned": {"max_tokens": 12},
    }[kind]


@pytest.mark.parametrize("kind", ["end id", "stop string", "cap", "abandoned"])
def test_second_turn_is_that_of_a_fresh_model(
    graph: Graph, models: tuple[CachedModel, CachedModel], kind: str
) -> None:
    """D11: nothing behind the end stays in a memory, and what is common to both turns is not read again."""
    target, draft = models
    target.rewind(0), draft.rewind(0)
    plain, _ = run(target, PROMPT, vocab_size=V, max_tokens=12)
    assert plain[11] not in plain[:11]
    options = {"max_tokens": 40, **end_of_turn(kind, plain)}
    steps = start(target, PROMPT, vocab_size=V, draft=draft, gamma=8, text=WORDS, **options)
    first = [token for step in ([next(steps)] if kind == "abandoned" else steps) for token in step.ids]
    assert first == plain[: len(first)] and len(first) in (9, 12)
    assert target.tokens == [*PROMPT, *first[:-1]]
    prompt = [*PROMPT, *first, 7, 8, 9, 10, 11]
    again = whole(start(target, prompt, vocab_size=V, draft=draft, gamma=8, max_tokens=30, logprobs=True))
    with graph.open() as fresh:
        assert again == whole(start(fresh, prompt, vocab_size=V, max_tokens=30, logprobs=True))


@pytest.mark.parametrize("length", [0, 1, 9])
def test_rewound_after_a_turn_and_read_on(
    graph: Graph, models: tuple[CachedModel, CachedModel], length: int
) -> None:
    """D11: tokens, positions and mask agree after any rewind; logits are those of a fresh run, to the bit."""
    rest = [7, 8, 9, 10, 11]

    def logits_after(model: CachedModel, ids: Sequence[int]) -> Floats:
        return model.forward(ids, rows=range(len(ids))).logits[-5:].copy()

    for model in models:
        run(models[0], PROMPT, vocab_size=V, draft=models[1], gamma=8, max_tokens=12)
        model.rewind(length)
        with graph.open() as fresh:
            expected = logits_after(fresh, [*model.tokens, *rest])
            assert_array_equal(logits_after(model, rest), expected)


def test_known_text_is_not_read_again() -> None:
    """A conversation grows at its end: each turn costs what is new in it."""
    target, draft = ScriptedModel(scattered(V)), ScriptedModel(scattered(V))
    first, _ = run(target, PROMPT, vocab_size=V, draft=draft, max_tokens=6)
    target.calls.clear(), draft.calls.clear()
    run(target, [*PROMPT, *first, 1, 2, 3], vocab_size=V, draft=draft, max_tokens=6)
    assert target.calls[0] == (10, (first[-1], 1, 2))
    assert draft.calls[0][0] == 8  # of its four drafts the last was never read, and then there was no room


# Penalties, processors, log-probabilities


class Ban:
    """Forbids ids."""

    def __init__(self, *ids: int) -> None:
        self.ids = list(ids)

    def mask(self, logits: Floats) -> Floats:
        changed = logits.copy()
        changed[self.ids] = -np.inf
        return changed

    def accept(self, token: int) -> None: ...

    def rollback(self, n: int) -> None: ...


class NoEcho:
    """Forbids what was written three tokens ago: a mask for every history, so a wrong one shows in the text."""

    def __init__(self) -> None:
        self.text: list[int] = []

    def mask(self, logits: Floats) -> Floats:
        changed = logits.copy()
        changed[self.text[-3:-2]] = -np.inf
        return changed

    def accept(self, token: int) -> None:
        self.text.append(token)

    def rollback(self, n: int) -> None:
        assert 0 < n <= len(self.text)
        del self.text[-n:]


class Bias(Ban):
    """Adds to logits."""

    def mask(self, logits: Floats) -> Floats:
        changed = logits.copy()
        changed[self.ids] += 2
        return changed


PROCESSORS: dict[str, Callable[[], list[Any]]] = {
    "no processor": list,
    "ban": lambda: [Ban(2, 3)],
    "bias": lambda: [Bias(6)],
    "all": lambda: [Ban(2), Bias(6), NoEcho()],
}


def loop(context: tuple[int, ...]) -> Floats:
    """0 1 2 3 and again from 0 by a clear lead, of 12 ids: a model that repeats itself until it is told not to."""
    logits = np.asarray(scattered(12, spread=0.4)(context), np.float32)
    logits[(context[-1] + 1) % 4] += 1.5
    return logits


@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("penalties", ["no penalty", *PENALTIES])
def test_penalties_and_processors_see_each_place_with_its_own_history(
    penalties: str, processors: str
) -> None:
    """D14: each alone and all together: the history of a drafted token is what stands before it, each once."""
    options: dict[str, Any] = {**PENALTIES.get(penalties, {}), "vocab_size": 12, "max_tokens": 40}
    plain = run(ScriptedModel(loop), [1, 2], processors=PROCESSORS[processors](), **options)
    if (penalties, processors) != ("no penalty", "no processor"):
        assert plain != run(ScriptedModel(loop), [1, 2], vocab_size=12, max_tokens=40)
    for gamma in range(1, 9):
        for draft in (ScriptedModel(loop), Stub(habit=habits([1, 2, *plain[0]], 12)["third wrong"])):
            used = PROCESSORS[processors]()
            found = run(ScriptedModel(loop), [1, 2], processors=used, draft=draft, gamma=gamma, **options)
            assert found == plain
            assert all(p.text == plain[0] for p in used if isinstance(p, NoEcho))


def test_drafts_follow_the_penalties_too() -> None:
    """D14: the draft is chosen from as the target is: the same model with the same settings is always right."""
    ledger = Ledger()
    options: dict[str, Any] = {**PENALTIES["all"], "vocab_size": 12, "max_tokens": 40, "ledger": ledger}
    run(ScriptedModel(loop), [1, 2], draft=ScriptedModel(loop), processors=[NoEcho()], **options)
    assert ledger.summary().draft_acceptance_rate == 1


@pytest.mark.parametrize("gamma", [0, 1, 4, 8])
def test_log_probabilities_are_those_of_the_target_itself(
    graph: Graph, models: tuple[CachedModel, CachedModel], gamma: int
) -> None:
    """Log-softmax over the tokenizer's ids, before penalties and temperature, the same in all modes."""
    target, draft = models
    options: dict[str, Any] = {"temperature": 1.5, "top_p": 0.9, "seed": 1, **PENALTIES["all"]}
    steps = start(
        target, PROMPT, vocab_size=90, max_tokens=30, logprobs=True, draft=draft, gamma=gamma, **options
    )
    _, ids, _, found = whole(steps)
    with graph.open() as fresh:
        rows = (
            fresh.forward([*PROMPT, *ids[:-1]], rows=range(4, 4 + len(ids))).logits[:, :90].astype(np.float64)
        )
    expected = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(found, expected[np.arange(len(ids)), ids], rtol=0, atol=1e-12)


def test_no_log_probabilities_unless_asked_for() -> None:
    """They cost a pass over the vocabulary for each token."""
    steps = list(start(ScriptedModel(scattered(8)), [1], vocab_size=8, max_tokens=3))
    assert all(step.logprobs == () for step in steps)
