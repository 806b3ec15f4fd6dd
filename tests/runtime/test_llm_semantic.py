"""LLM in the semantic modes: real engines and probes of a tiny pair, memories to the bit, and what is refused."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_pairs
from commands import one_line, run
from numpy.testing import assert_allclose
from tiny_probes import RATIO, add_probes

from semspec import LLM, BundleError, CalibrationError, ConfigError, SamplingParams, SpecConfig
from semspec.export.probe_graph import Scaling
from semspec.runtime.features import FEATURES
from semspec.runtime.model import CachedModel
from semspec.runtime.records import Floats

PLAIN, LOSSLESS = SpecConfig(mode="autoregressive"), SpecConfig()
PARAMS = SamplingParams(max_tokens=60, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.6, top_p=0.95, seed=4)
SEMANTIC = SpecConfig(mode="semantic", risk=0.2)
COMBINED = SpecConfig(mode="combined", risk=0.2, adaptive="off")  # tiny random models are never sure
PAPER = SpecConfig(mode="semantic", preset="paper")
ALL = (SEMANTIC, COMBINED, PAPER, SpecConfig(mode="semantic", preset="strict"))


@pytest.fixture(scope="module")
def bundle(tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pair with segments of at most 7 tokens, and probes that read states, signals of both and the text."""
    folder = tmp_path_factory.mktemp("calibrated") / "bundle"
    tiny_pairs.bound(tiny_pair, folder, min_tokens=3, max_tokens=7)
    # logits of random weights are far from 0: a straight line puts scores to both sides of the threshold of 0.5
    scaling = Scaling(knots=(-15.0, -9.0), values=(0.0, 1.0))
    add_probes(folder, layers=(3,), features=FEATURES, scaling=scaling)
    return folder


@pytest.fixture(scope="module")
def tiny(bundle: Path) -> Iterator[LLM]:
    with LLM(bundle, threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def fresh(bundle: Path) -> Iterator[LLM]:
    """The same models, for runs over a whole text."""
    with LLM(bundle, threads=1) as llm:
        yield llm


def next_logits(model: CachedModel, ids: list[int]) -> Floats:
    """Logits after `ids`, which begin with what the model remembers; its memory is left as it was."""
    known = model.length
    logits = model.forward(ids[known:]).logits[0].copy()
    model.rewind(known)
    return logits


@pytest.mark.parametrize("spec", [*ALL, replace(COMBINED, adaptive=None, min_confidence=0.1)], ids=str)
@pytest.mark.parametrize("params", [PARAMS, SAMPLED], ids=["greedy", "sampled"])
def test_caches_say_what_a_fresh_run_says_after_every_step(
    tiny: LLM, fresh: LLM, spec: SpecConfig, params: SamplingParams
) -> None:
    """D43: the target to the bit, the draft within 1e-4, whatever was kept, refused or drafted inside."""
    assert tiny.draft is not None and fresh.draft is not None
    ids = tiny.tokenizer.encode("hello")
    for delta in tiny.stream("hello", params, spec=spec):
        ids += delta.token_ids
        assert tiny.target.tokens == ids[:-1]
        assert tiny.draft.tokens == ids[: tiny.draft.length] and tiny.draft.length < len(ids)
        for model, other, atol in ((tiny.target, fresh.target, 0), (tiny.draft, fresh.draft, 1e-4)):
            other.rewind(0)
            assert_allclose(next_logits(model, ids), next_logits(other, ids), rtol=0, atol=atol)


@pytest.mark.parametrize("params", [PARAMS, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("mode", ["combined", "semantic"])
def test_at_risk_0_it_is_lossless_token_by_token(tiny: LLM, mode: str, params: SamplingParams) -> None:
    """The same drafts, chances and rule under the same seed; and no probe is needed for it."""
    exact = tiny.generate("hello", params, spec=LOSSLESS)
    ours = tiny.generate("hello", params, spec=SpecConfig(mode=mode, risk=0))
    assert (ours.token_ids, ours.text, ours.judged) == (exact.token_ids, exact.text, ())
    assert ours.stats.num_rounds == exact.stats.num_rounds and ours.stats.lossy_token_fraction == 0


@pytest.mark.parametrize("spec", ALL, ids=str)
def test_same_seed_same_text(tiny: LLM, spec: SpecConfig) -> None:
    """Scores, decisions and tokens; 60 tokens of more than a bit."""
    one, again, other = (
        tiny.generate("hello", replace(SAMPLED, temperature=1.0, seed=seed), spec=spec) for seed in (1, 1, 2)
    )
    assert (one.token_ids, one.judged) == (again.token_ids, again.judged)
    assert one.token_ids != other.token_ids


def test_every_judged_draft_is_accounted_for(tiny: LLM) -> None:
    """Its length, what was kept and lossy, the figures behind it, and the time it took, by phase."""
    for spec in ALL:
        deltas = list(tiny.stream("hello", SAMPLED, spec=spec))
        judged = [delta.judged for delta in deltas if delta.judged is not None]
        assert judged and {delta.rule for delta in deltas if delta.judged} == {spec.mode}
        assert {delta.rule for delta in deltas if not delta.judged} <= {"target", "lossless"}
        stats = deltas[-1].stats
        assert stats.num_segments == len(judged)
        assert stats.num_segment_tokens == sum(one.n_drafted for one in judged)
        assert stats.num_lossy_tokens == sum(one.n_lossy for one in judged)
        for one in judged:
            assert {"draft", "target", "judge"} <= one.ms.keys() and min(one.ms.values()) > 0
            if one.reason == "ratio":
                assert one.figures.keys() == {"s_target", "s_draft", "ratio"}
            elif one.reason == "score":
                signals = {name for name in FEATURES if not name.startswith("text.")}
                assert one.figures.keys() == {"score", "threshold", *signals}
                assert one.figures["threshold"] == 0.5
                assert (one.n_kept == one.n_drafted) >= (one.figures["score"] >= 0.5)
            else:
                assert one.reason == "exact"


def test_scores_are_those_of_the_graph_over_what_a_fresh_pass_reads(tiny: LLM, fresh: LLM) -> None:
    """D42, D44: states of the rows that predicted the segment, signals of both models, the text and what it follows:
    what calibration reads of the same segment gives the same score."""
    from one_pass import read_segment

    from semspec.runtime.features import segment_text
    from semspec.runtime.probes import Probes

    assert fresh.draft is not None
    probes: Probes = tiny._requests._open_probes(SEMANTIC)
    n_ids, ids, seen = tiny.tokenizer.vocab_size, tiny.tokenizer.encode("hello"), 0
    cut = tiny._requests._segmenter(())
    for delta in tiny.stream("hello", SAMPLED, spec=SEMANTIC):
        if delta.judged is not None and delta.judged.reason == "score" and delta.n_lossy:
            readings = [
                read_segment(model, ids, delta.token_ids, n_ids=n_ids)
                for model in (fresh.target, fresh.draft)
            ]
            text = segment_text(tiny.tokenizer, ids, delta.token_ids, cut)
            assert delta.judged.figures["score"] == pytest.approx(
                probes.score(readings[0], readings[1], text), abs=1e-4
            )
            seen += 1
        ids += delta.token_ids
    assert seen > 0


def test_processors_stops_and_logprobs_go_with_semantic_modes(tiny: LLM) -> None:
    """As with any other mode; a processor that cannot go back is refused."""
    for spec in ALL:
        answer = tiny.generate("hello", replace(PARAMS, logprobs=True, presence_penalty=0.5), spec=spec)
        assert len(answer.logprobs) == len(answer.token_ids) == 60 and np.isfinite(answer.logprobs).all()
        stop = answer.token_ids[20]
        params = replace(PARAMS, presence_penalty=0.5, stop_token_ids=(stop,))
        stopped = tiny.generate("hello", params, spec=spec)
        assert stopped.token_ids[-1] == stop and stop not in stopped.token_ids[:-1]

    class Forgetful:
        def mask(self, logits: Floats) -> Floats:
            return logits

        def accept(self, token: int) -> None:
            pass

    processor: Any = Forgetful()
    with pytest.raises(ConfigError, match="rollback"):
        tiny.generate("hello", PARAMS, spec=COMBINED, processors=[processor])


# What is refused, and said


def test_a_bundle_without_probes_names_the_command(tiny_pair: Path, bundle: Path) -> None:
    """When it is opened for such a mode, or first asked to; exact modes go on."""
    with pytest.raises(
        CalibrationError, match=r"mode 'combined' needs the bundle's probes.*semspec calibrate"
    ):
        LLM(tiny_pair, spec=COMBINED)
    with LLM(tiny_pair, threads=1) as llm:
        for spec in ALL:
            with pytest.raises(CalibrationError, match="semspec calibrate"):
                llm.generate("hello", PARAMS, spec=spec)
        assert llm.generate("hello", PARAMS, spec=SpecConfig(mode="combined", risk=0)).token_ids


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"boundary": "other"}, "segments that end at"),
        ({"models": "other"}, "another target"),
        ({"pooled_layers": {"target": (2,), "draft": (2, 3)}}, "states"),
        ({"backend": "cuda"}, "backend 'cuda'"),
    ],
    ids=str,
)
def test_probes_of_something_else_are_refused(
    changes: dict[str, Any], named: str, bundle: Path, tmp_path: Path
) -> None:
    """D44: another boundary, precision (the graph's own hash), layer or engine, each by name, with the command."""
    from semspec.runtime.bundle import Bundle
    from semspec.runtime.probes import model_hashes
    from semspec.runtime.segments import Boundary

    copy = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    shutil.rmtree(copy / "probes")
    if changes.get("boundary"):
        changes = {"boundary": Boundary(kind="blank-line", min_tokens=3, max_tokens=7)}
    if changes.get("models"):
        hashes = model_hashes(Bundle.open(copy).manifest)
        first = sorted(hashes["target"])[0]
        changes = {"models": {**hashes, "target": {**hashes["target"], first: "0" * 64}}}
    add_probes(copy, features=("target.mean_logprob",), ratio=False, **changes)
    with pytest.raises((CalibrationError, BundleError)) as caught:
        LLM(copy, spec=SEMANTIC)
    message = str(caught.value)
    assert named in message and "calibrate" in message and "\n" not in message


def test_probes_without_what_the_preset_needs_are_refused(bundle: Path, tmp_path: Path) -> None:
    """Two probes of a ratio are no predictor, and the other way round."""
    for name, made, spec in (("ratio", {"predictor": False}, SEMANTIC), ("score", {"ratio": False}, PAPER)):
        copy = Path(shutil.copytree(bundle, tmp_path / name))
        shutil.rmtree(copy / "probes")
        add_probes(copy, **made)  # type: ignore[arg-type]
        with pytest.raises(CalibrationError, match=r"needs .* and .* has .*semspec calibrate"):
            LLM(copy, spec=spec)


def test_a_risk_below_the_table_is_refused_with_what_there_is(bundle: Path) -> None:
    """0.05 and 0.2 were made: 0.1 takes the threshold of 0.05, 0.01 has none."""
    with pytest.raises(ConfigError, match=r"no risk of 0.01; it has 0.05, 0.2"):
        LLM(bundle, spec=SpecConfig(mode="combined", risk=0.01))
    with LLM(bundle, spec=SpecConfig(mode="combined"), threads=1) as llm:
        judged = llm.generate("hello", PARAMS).judged
        assert {one.figures["threshold"] for one in judged if one.reason == "score"} <= {0.8}


def test_what_calibration_found_against_a_setting_is_said_once(
    bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The ratio that accepts more than the models agree on; a temperature that the risk was not measured at."""
    assert RATIO.mean_acceptance > RATIO.overlap + 0.1
    with caplog.at_level(logging.WARNING), LLM(bundle, spec=PAPER, threads=1) as llm:
        llm.generate("hello", SAMPLED)
        assert "accepts 0.90 of segments where the models agree on 0.70" in caplog.text
        caplog.clear()
        llm.generate("hello", SAMPLED)
        llm.generate("hello", SAMPLED, spec=SEMANTIC)
        assert not caplog.text
        llm.generate("hello", PARAMS, spec=SEMANTIC)
        llm.generate("other", PARAMS, spec=SEMANTIC)
        assert caplog.text.count("the risk was measured at temperature 0.6, top-p 0.95") == 1


def test_nothing_is_said_where_calibration_found_nothing_against_it(
    bundle: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A ratio that accepts up to a tenth more than the models agree on; a risk that was measured on greedy segments,
    as a greedy request draws them whatever its top-p is."""
    copy = Path(shutil.copytree(bundle, tmp_path / "copy"))
    shutil.rmtree(copy / "probes")
    ratio = replace(RATIO, mean_acceptance=RATIO.overlap + 0.09)
    add_probes(copy, features=("text.capped",), ratio=ratio, temperature=0.0, top_p=1.0)
    with caplog.at_level(logging.WARNING), LLM(copy, spec=PAPER, threads=1) as llm:
        llm.generate("hello", SAMPLED)
        llm.generate("hello", replace(PARAMS, top_p=0.9), spec=SEMANTIC)
        assert not caplog.text
        llm.generate("hello", SAMPLED, spec=SEMANTIC)
        assert (
            "the risk was measured at temperature 0, top-p 1; this request has temperature 0.6" in caplog.text
        )


def test_few_rows_are_computed_where_nothing_reads_more(bundle: Path, tmp_path: Path) -> None:
    """The published rule reads states: one row of the head a review, or two with a bonus token."""
    with LLM(bundle, spec=PAPER, threads=1) as llm:
        forward, rows = llm.target.forward, []

        def counted(ids: Any, **options: Any) -> Any:
            rows.append((len(ids), options.get("pool") is not None, len(options["rows"])))
            return forward(ids, **options)

        llm.target.forward = counted  # type: ignore[method-assign]
        for bonus in (False, True):
            rows.clear()
            llm.generate("hello", SAMPLED, spec=replace(PAPER, bonus=bonus))
            reviews = [n_rows for n, pooled, n_rows in rows if pooled]
            assert reviews and set(reviews) == {2 if bonus else 1}


# Commands


def test_the_command_takes_the_modes_and_tells_their_rounds(bundle: Path, tmp_path: Path) -> None:
    """The same answer as from Python, and what every judged draft rests on."""
    options = (
        "--raw",
        "--mode",
        "combined",
        "--risk",
        "0.2",
        "--adaptive",
        "off",
        "--temperature",
        "1",
        "--seed",
        "2",
    )
    done = run("semspec", "generate", bundle, "hello", *options, "--json", "--stats", cwd=tmp_path)
    found = json.loads(done.out)
    with LLM(bundle, spec=COMBINED) as llm:
        answer = llm.generate("hello", replace(llm.default_sampling, temperature=1.0, seed=2))
    assert found["token_ids"] == list(answer.token_ids)
    assert [one["reason"] for one in found["judged"]] == [one.reason for one in answer.judged]
    assert found["stats"]["num_lossy_tokens"] == answer.stats.num_lossy_tokens
    assert done.err.count("combined: {") == len(answer.judged)


def test_colours_show_who_wrote_what(bundle: Path, tmp_path: Path) -> None:
    """The text is the same without them; what the draft wrote is marked, lossy tokens otherwise."""
    options = ("--raw", "--mode", "semantic", "--risk", "0.2", "--max-tokens", "40", "--seed", "1")
    plain = run("semspec", "generate", bundle, "hello", *options, cwd=tmp_path)
    done = run("semspec", "generate", bundle, "hello", *options, "--color", cwd=tmp_path)
    text = done.out
    for mark in ("\x1b[32m", "\x1b[33m", "\x1b[0m"):
        text = text.replace(mark, "")
    assert text == plain.out and ("\x1b[33m" in done.out or "\x1b[32m" in done.out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--risk", "0.1"], "risk belongs to the modes semantic and combined"),
        (["--mode", "combined", "--preset", "paper"], "preset is not used by mode 'combined'"),
        (["--mode", "semantic", "--preset", "published"], "preset must be one of calibrated, paper, strict"),
        (["--mode", "semantic", "--draft", "ngram"], "n-grams draft no segments"),
        (["--mode", "semantic", "--draft", "none"], "without drafts"),
        (["--mode", "semantic", "--risk", "2"], "risk must be finite and between 0 and 1"),
        (["--color", "--json"], "give one of them"),
    ],
    ids=str,
)
def test_settings_that_nothing_looks_at_are_refused(
    options: list[str], message: str, bundle: Path, tmp_path: Path
) -> None:
    """Nothing is silently ignored."""
    assert message in one_line(run("semspec", "generate", bundle, "hi", *options, cwd=tmp_path), 2)


def test_the_command_names_the_one_that_calibrates(tiny_pair: Path, tmp_path: Path) -> None:
    """One line, status 1."""
    done = run("semspec", "generate", tiny_pair, "hi", "--mode", "semantic", cwd=tmp_path)
    assert "semspec calibrate" in one_line(done, 1)
