"""CachedModel on a tiny real graph: what it remembers, what it returns, and what it refuses."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from graphs import Graph, build_graph, tiny_variant, truth
from numpy.testing import assert_allclose, assert_array_equal
from scripted import ScriptedModel

from semspec.runtime.backends import open_backend
from semspec.runtime.errors import BackendError, BundleError, ConfigError
from semspec.runtime.model import CachedModel, LanguageModel

CONTEXT = 32
STATES = (0, 2, 3)
POOLED = (2, 3)
TEXT = np.random.default_rng(3).integers(0, 99, CONTEXT).tolist()


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    """Three layers, 99 ids, 32 tokens of context; returns states 0, 2 and 3, pools 2 and 3."""
    _, spec, weights = tiny_variant("llama-default-untied")
    folder = tmp_path_factory.mktemp("tiny")
    return build_graph(folder, weights, spec, max_context=CONTEXT, pooled_layers=POOLED, hidden_layers=STATES)


@pytest.fixture
def model(graph: Graph) -> Iterator[CachedModel]:
    with graph.open() as opened:
        yield opened


# What it remembers


@pytest.mark.parametrize("length", [0, 1, 5, 19, 20])
def test_rewound_model_goes_on_as_if_the_rest_had_never_been_read(model: CachedModel, length: int) -> None:
    """Rejected drafts are undone this way; on the CPU graph the agreement is to the bit."""
    expected = model.forward(TEXT[:24], rows=range(24)).logits.copy()
    model.rewind(0)
    model.forward([*TEXT[:length], *([98] * (20 - length))])  # read on with wrong tokens
    model.rewind(length)
    assert model.length == length
    assert_array_equal(model.forward(TEXT[length:24], rows=range(24 - length)).logits, expected[length:])


@pytest.mark.parametrize("length", [-1, 5])
def test_rewind_to_what_was_never_read_is_refused(model: CachedModel, length: int) -> None:
    """The cache holds rubbish beyond its length."""
    model.forward(TEXT[:4])
    with pytest.raises(ConfigError, match=f"rewind to {length} tokens: the model remembers 4"):
        model.rewind(length)
    assert model.length == 4


@pytest.mark.parametrize("pieces", [(32,), (31, 1), (30, 2), (29, 3), (16, 16)], ids=str)
def test_context_can_be_filled_to_the_last_place(model: CachedModel, pieces: tuple[int, ...]) -> None:
    """The spare row of an odd pass needs a place behind the last; the truth is transformers'."""
    at = 0
    for size in pieces:
        logits = model.forward(TEXT[at : at + size]).logits
        at += size
    assert model.length == model.max_context == CONTEXT
    expected, _ = truth(tiny_variant("llama-default-untied")[0], TEXT)
    assert_allclose(logits[0], expected[-1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("n_new", [0, 3, 33])
def test_no_token_or_more_than_fit_are_refused_and_nothing_is_forgotten(
    model: CachedModel, n_new: int
) -> None:
    """A pass that wrote beyond the cache would spoil memory; one that stopped halfway would spoil the text."""
    expected = model.forward(TEXT, rows=(-2, -1)).logits.copy()
    model.rewind(30)
    with pytest.raises(ConfigError, match=rf"cannot read {n_new} tokens after 30: .* 32 .*--max-context"):
        model.forward([0] * n_new)
    assert model.length == 30
    assert_array_equal(model.forward(TEXT[30:], rows=(-2, -1)).logits, expected)


def test_refused_token_is_not_remembered(model: CachedModel) -> None:
    """An engine reads zeros, or from the end of the table, where an id has no row."""
    for ids in ([1, 99], [-1], [1, 2, 10**6]):
        with pytest.raises(ConfigError, match=r"token ids must be in 0\.\.98"):
            model.forward(ids)
    assert model.length == 0


# What it returns


def test_rows_are_those_that_were_asked_for(model: CachedModel) -> None:
    """A prompt needs one row, a review all of them; the default is the last."""
    every = model.forward(TEXT[:9], rows=range(9)).logits.copy()
    assert every.shape == (9, 99)
    for rows, expected in (((), []), ((-1,), [8]), ((0, 3, 8), [0, 3, 8]), ((-9, 4, -1), [0, 4, 8])):
        model.rewind(0)
        assert_array_equal(model.forward(TEXT[:9], rows=rows).logits, every[expected])
    model.rewind(0)
    assert_array_equal(model.forward(TEXT[:9]).logits, every[-1:])


def test_no_rows_still_reads_the_text(model: CachedModel) -> None:
    """Prefill: nothing is wanted but the memory."""
    expected = model.forward(TEXT[:10]).logits.copy()
    model.rewind(0)
    assert model.forward(TEXT[:9], rows=()).logits.shape == (0, 99)
    assert model.length == 9
    assert_array_equal(model.forward(TEXT[9:10]).logits, expected)


@pytest.mark.parametrize("rows", [(3, 1), (9,), (-10,)])
def test_rows_out_of_order_or_range_are_refused(model: CachedModel, rows: tuple[int, ...]) -> None:
    """Over several passes rows come in the order of the text: another order would be answered wrongly."""
    with pytest.raises(ConfigError, match="rows must ascend"):
        model.forward(TEXT[:9], rows=rows)
    assert model.length == 0


@pytest.mark.parametrize("n_tokens", [8, 9, 16, 30])
@pytest.mark.parametrize("rows", [(), (-1,), (0, 7), (7, 8), (1, 5), range(8)], ids=str)
def test_long_text_is_read_in_several_passes_as_in_one(
    model: CachedModel, monkeypatch: pytest.MonkeyPatch, n_tokens: int, rows: Any
) -> None:
    """Wanted rows may lie in any pass, in several, in none; states and the sum go on over passes."""
    rows = [row for row in rows if row < n_tokens]
    pool = np.linspace(-1, 1, n_tokens, dtype=np.float32)
    options = {"rows": rows, "pool": pool, "hidden": STATES}
    expected = copy.deepcopy(model.forward(TEXT[:n_tokens], **options))
    model.rewind(0)
    monkeypatch.setattr("semspec.runtime.model.CHUNK", 8)
    found = model.forward(TEXT[:n_tokens], **options)
    assert model.length == n_tokens
    assert_array_equal(found.logits, expected.logits)
    assert found.hidden.keys() == set(STATES)
    for index in STATES:
        assert_array_equal(found.hidden[index], expected.hidden[index])
    assert found.pooled is not None
    assert_allclose(found.pooled, expected.pooled, rtol=0, atol=1e-4)  # a sum: no bits promised


def test_states_are_those_of_transformers(model: CachedModel) -> None:
    """D42: index 0 is the embedding and the last comes after the final norm; off by one is close but wrong."""
    found = model.forward(TEXT[:20], hidden=STATES).hidden
    _, states = truth(tiny_variant("llama-default-untied")[0], TEXT[:20])
    for index in STATES:
        assert found[index].shape == (20, 48)
        assert_allclose(found[index], states[index], rtol=0, atol=1e-5 * np.abs(states[index]).max())


def test_states_that_were_not_exported_are_named_with_those_that_were(model: CachedModel) -> None:
    """The repair is another export; which states there are is a matter of that export too."""
    with pytest.raises(ConfigError, match=r"\[1, 4\] are not .* \[0, 2, 3\] .*--hidden-layers"):
        model.forward(TEXT[:3], hidden=(4, 0, 1))
    assert model.length == 0


def test_pooled_is_the_weighted_sum_of_the_pooled_states_and_can_be_handed_on(model: CachedModel) -> None:
    """A segment's sum grows over single draft steps: what one call returns the next takes."""
    pool = np.array([0, 0.25, 0.5, 1, -1, 2], np.float32)
    states = model.forward(TEXT[:6], hidden=POOLED).hidden
    expected = np.stack([pool @ states[index] for index in POOLED])  # (K, E)
    model.rewind(0)
    sum_so_far = None
    for at in range(0, 6, 2):
        sum_so_far = model.forward(
            TEXT[at : at + 2], pool=pool[at : at + 2], pooled=sum_so_far
        ).pooled  # not copied: it may be fed while it is about to be overwritten
    assert sum_so_far is not None
    assert sum_so_far.shape == (2, 48)
    assert_allclose(sum_so_far, expected, rtol=0, atol=1e-4)


def test_nothing_is_pooled_unless_asked(model: CachedModel) -> None:
    """And a sum of one call does not leak into the next."""
    model.forward(TEXT[:2], pool=np.ones(2, np.float32))
    assert model.forward(TEXT[2:4]).pooled is None
    zeros = model.forward(TEXT[4:6], pool=np.zeros(2, np.float32)).pooled
    assert_array_equal(zeros, np.zeros((2, 48)))


@pytest.mark.parametrize("pool", [np.ones(2, np.float32), np.ones((1, 3), np.float32)], ids=str)
def test_pool_of_another_length_is_refused(model: CachedModel, pool: Any) -> None:
    """Weights that belong to other rows would give a sum that looks right."""
    with pytest.raises(ConfigError, match="weight for each of 3 tokens"):
        model.forward(TEXT[:3], pool=pool)


def test_what_forward_returned_is_overwritten_by_the_next_call(model: CachedModel) -> None:
    """Said by Forward and CachedModel; who keeps logits over a call copies them. Not a promise: a warning."""
    kept = model.forward(TEXT[:1]).logits
    copied = kept.copy()
    following = model.forward(TEXT[1:2]).logits
    assert_array_equal(kept, following)
    assert not np.array_equal(kept, copied)


def test_two_models_on_one_graph_share_nothing(graph: Graph) -> None:
    """A model may be its own draft."""
    with graph.open() as one, graph.open() as two:
        first = one.forward(TEXT[:5]).logits.copy()
        two.forward(TEXT[10:20])
        assert (one.length, two.length) == (5, 10)
        after = one.forward(TEXT[5:6]).logits.copy()
        one.rewind(0)
        assert_array_equal(one.forward(TEXT[:5]).logits, first)
        assert_array_equal(one.forward(TEXT[5:6]).logits, after)


# What it refuses


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_context": 31}, r"kv\.0\.key is float32.*33.*, expected float32.*32"),
        ({"n_layers": 4}, r"lacks kv\.3\.key"),
        ({"n_layers": 2, "pooled_layers": (1, 2), "hidden_layers": ()}, r"has unknown kv\.2\.key"),
        ({"hidden_layers": (0, 1)}, r"has unknown hidden\.2; .*lacks hidden\.1"),
        ({"vocab_size": 100}, r"logits is float32"),
        ({"pooled_layers": (3,)}, r"pooled_in is float32"),
        ({"cache": "float16"}, r"expected float16"),
    ],
    ids=str,
)
def test_graph_of_other_sizes_is_refused(graph: Graph, changes: dict[str, Any], message: str) -> None:
    """A manifest beside another graph: found when it is opened, not by wrong numbers later."""
    spec = dataclasses.replace(graph.spec, **changes)
    with pytest.raises(BundleError, match=message) as caught:
        CachedModel(open_backend("cpu", threads=1), graph.path, spec)
    assert str(graph.path) in str(caught.value)


def test_closed_model_says_so(graph: Graph) -> None:
    """Leaving the context closes; closing again is harmless; using it is one clear line."""
    with graph.open() as model:
        model.forward(TEXT[:2])
    model.close()
    with pytest.raises(BackendError, match="closed"):
        model.forward(TEXT[2:4])


@pytest.mark.parametrize("double", [CachedModel, ScriptedModel])
@pytest.mark.parametrize("method", ["forward", "rewind"])
def test_models_keep_the_protocol(double: type, method: str) -> None:
    """What is tested with the double must hold for the real one: same names, same defaults."""
    expected = inspect.signature(getattr(LanguageModel, method))
    assert inspect.signature(getattr(double, method)) == expected


def test_models_remember_the_tokens_themselves(model: CachedModel) -> None:
    """What a next request has in common with the last is found by comparing tokens; real and double alike (D11)."""
    for each in (model, ScriptedModel(lambda _: [0.0, 1.0])):
        each.forward([5, 8, 2])
        assert (list(each.tokens), each.length) == ([5, 8, 2], 3)
        each.rewind(1)
        each.forward([7])
        assert (list(each.tokens), each.length) == ([5, 7], 2)
        with pytest.raises(ConfigError):
            each.rewind(3)
        assert list(each.tokens) == [5, 7]
