"""Probes in a bundle: what was written scores as it did; what belongs to something else is refused by name (D44)."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_pairs import bound, rearrange
from tiny_probes import RATIO, RISKS, add_probes, branch, probe

from semspec.export.probe_graph import ProbeWeights, Scaling, run_probe, write_probe_graph
from semspec.runtime.backends import open_backend
from semspec.runtime.bundle import MANIFEST, Bundle, sha256_of
from semspec.runtime.errors import BackendError, BundleError, CalibrationError, ConfigError, SemspecError
from semspec.runtime.features import SegmentText, feature_values
from semspec.runtime.pooled import HeldPooled
from semspec.runtime.probe_set import identity_of
from semspec.runtime.probes import PREDICTOR_FILE, Probes, ProbeSet, latest_probes, read_probes
from semspec.runtime.readings import NO_STATES, Reading, Signals
from semspec.runtime.records import Floats
from semspec.runtime.segments import Boundary

BACKEND = open_backend("cpu", threads=1)
WIDTH, LAYERS = 48, (2, 3)  # of the tiny pair, pooled
SIGNALS = Signals(mean_logprob=-0.5, min_logprob=-2.0, sum_logprob=-3.0, mean_entropy=0.7, agreement=0.75)
SEGMENT = SegmentText(text="So 3 = 3.\n", before="", n_tokens=6, ended="boundary")


def states(seed: int = 0) -> Floats:
    values: Floats = np.random.default_rng(seed).standard_normal((len(LAYERS), WIDTH)).astype(np.float32)
    return values


def reading(seed: int = 0) -> Reading:
    return Reading(pooled=states(seed), signals=SIGNALS)


@pytest.fixture
def bundle(tiny_pair: Path, tmp_path: Path) -> Path:
    """A copy that probes can be put into."""
    return Path(shutil.copytree(tiny_pair, tmp_path / "bundle"))


def opened(path: Path) -> Probes:
    return Probes.open(Bundle.open(path), BACKEND)


def refusal(path: Path, error: type[SemspecError]) -> str:
    with pytest.raises(error) as caught:
        read_probes(Bundle.open(path))
    message = str(caught.value)
    assert "\n" not in message and "\x1b" not in message
    return message


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((folder / PREDICTOR_FILE).read_text(encoding="utf-8"))
    change(content)
    (folder / PREDICTOR_FILE).write_text(json.dumps(content), encoding="utf-8")


def test_what_was_written_is_read_back(bundle: Path) -> None:
    """The same record, the same bytes; the bundle around it is what it was."""
    folder = add_probes(bundle, layers=(3,))
    found = read_probes(Bundle.open(bundle, verify=True))
    assert found.to_json() == (folder / PREDICTOR_FILE).read_text(encoding="utf-8")
    assert found.risks == RISKS and found.ratio == RATIO and found.pooled_layers["target"] == LAYERS
    absent = replace(found, ratio=None, temperature=None)
    (folder / PREDICTOR_FILE).write_text(absent.to_json(), encoding="utf-8")
    assert read_probes(Bundle.open(bundle)) == absent


@pytest.mark.parametrize(
    ("layers", "features"),
    [
        ((2,), ()),
        ((3,), ("target.mean_logprob",)),
        ((2, 3), ("text.equals", "draft.agreement")),
        ((), ("target.mean_logprob",)),
        ((), ("text.equals", "draft.agreement")),
    ],
    ids=str,
)
def test_a_score_is_the_probes_own(layers: tuple[int, ...], features: tuple[str, ...], bundle: Path) -> None:
    """Its layers are picked from all pooled ones by index, its features by name, whatever else was read."""
    add_probes(bundle, layers=layers, features=features)
    weights = probe(WIDTH, len(layers), len(features))
    expected = run_probe(
        weights,
        states()[[LAYERS.index(layer) for layer in layers]][None] if layers else None,
        feature_values(features, target=SIGNALS, draft=SIGNALS, segment=SEGMENT)[None] if features else None,
    )
    with opened(bundle) as probes:
        assert abs(probes.score(reading(), reading(1), SEGMENT) - expected[0]) < 1e-6
        assert probes.needs_target_states == bool(layers) and not probes.needs_draft_states
        assert probes.needs_signals == ("target.mean_logprob" in features)
        assert probes.needs_draft_signals == probes.needs_text == ("text.equals" in features)
        if not probes.needs_draft_signals:
            probes.score(reading(), None, SEGMENT)
        else:
            with pytest.raises(ConfigError, match=r"'draft\.agreement' needs the draft's signals"):
                probes.score(reading(), None, SEGMENT)


def test_the_two_scores_of_the_ratio(bundle: Path) -> None:
    """Each model's own probe over its own last state."""
    add_probes(bundle, predictor=False)
    with opened(bundle) as probes:
        found = probes.ratio_scores(states(0), states(1))
        for seed, (score, role) in enumerate(zip(found, ("target", "draft"), strict=True)):
            weights = probe(WIDTH, hidden=(8, 4), seed=len(role))
            assert abs(score - run_probe(weights, states(seed)[None, -1:])[0]) < 1e-6
        assert probes.has_ratio and not probes.has_predictor
        with pytest.raises(ConfigError, match="has no predictor; it has target, draft: calibrate"):
            probes.score(reading(), None, SEGMENT)
        with pytest.raises(ConfigError, match="has no predictor"):
            probes.threshold(0.1)
        with pytest.raises(ConfigError, match=r"must be \(2, E\), got \(1, 48\)"):
            probes.ratio_scores(states()[:1], states())
    shutil.rmtree(bundle / "probes")
    add_probes(bundle, ratio=False)
    with opened(bundle) as probes, pytest.raises(ConfigError, match="no probes for the ratio"):
        probes.ratio_scores(states(), states())


def test_a_risk_is_a_threshold(bundle: Path) -> None:
    """The strictest line that keeps the promise: never one for a larger risk than asked."""
    add_probes(bundle)
    with opened(bundle) as probes:
        asked = {0.05: 0.8, 0.1: 0.8, 0.2: 0.5, 1.0: 0.5}
        assert {risk: probes.threshold(risk) for risk in asked} == asked
        for risk in (0.0, 0.049, math.nan):
            with pytest.raises(ConfigError, match=r"supports no risk of .*; it has 0\.05, 0\.2: choose"):
                probes.threshold(risk)


def test_the_highest_number_counts(bundle: Path) -> None:
    """Earlier ones are kept; what is not a number was never renamed into place."""
    assert latest_probes(Bundle.open(bundle)) is None
    assert identity_of(Bundle.open(bundle)) == sha256_of(bundle / MANIFEST)
    assert "has no probes; calibrate it: semspec calibrate" in refusal(bundle, CalibrationError)
    for number in (2, 10, 9):
        add_probes(bundle, number=number)
    for other in (".11.partial", "012", "x", "99999999999"):
        (bundle / "probes" / other).mkdir()
    assert latest_probes(Bundle.open(bundle)) == bundle / "probes" / "10"
    with_ten = identity_of(Bundle.open(bundle))
    add_probes(bundle, number=20)
    assert identity_of(Bundle.open(bundle)) == with_ten != sha256_of(bundle / MANIFEST), (
        "the same probes again"
    )
    shutil.rmtree(bundle / "probes" / "20")
    (bundle / "probes" / "11").mkdir()
    assert "probes/11 has no predictor.json" in refusal(bundle, BundleError)
    assert read_probes(Bundle.open(bundle), bundle / "probes" / "9").risks == RISKS


# D44: probes of something else


def test_probes_of_another_model_are_refused(bundle: Path, tmp_path: Path) -> None:
    """Of equal width and depth, so that nothing else would notice: every file of a model counts, weights first."""
    folder = add_probes(bundle)
    edit(folder, lambda content: content["models"]["draft"].update({"draft/onnx/weights.data": "0" * 64}))
    message = refusal(bundle, CalibrationError)
    assert "another draft: 'draft/onnx/weights.data' had sha256 '0000" in message
    assert sha256_of(bundle / "draft/onnx/weights.data") in message and "semspec calibrate" in message


def test_probes_that_were_copied_over_are_refused(bundle: Path, tmp_path: Path) -> None:
    """Into a bundle of models with the same sizes, whose graphs would take the states without a word."""
    add_probes(bundle)
    other = rearrange(bundle, tmp_path / "other", target="draft", draft="target")
    shutil.copytree(bundle / "probes", other / "probes")
    message = refusal(other, CalibrationError)
    assert "was made with another draft: 'draft/" in message and str(other / "probes" / "1") in message


def test_probes_of_another_precision_or_graph_are_refused(bundle: Path) -> None:
    """A file more or less is another export; a role that is gone is named."""
    folder = add_probes(bundle)
    edit(folder, lambda content: content["models"]["target"].pop("target/onnx/cpu.onnx"))
    assert "'target/onnx/cpu.onnx' had sha256 'none'" in refusal(bundle, CalibrationError)
    shutil.rmtree(folder)
    add_probes(bundle)
    manifest = json.loads((bundle / MANIFEST).read_text(encoding="utf-8"))
    del manifest["models"]["draft"]
    (bundle / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    assert "was made with a draft model and the bundle has none" in refusal(bundle, CalibrationError)


def test_probes_of_other_segments_are_refused(bundle: Path, tmp_path: Path) -> None:
    """The bundle's boundary, or the one that segments are to have."""
    add_probes(bundle)
    other = bound(bundle, tmp_path / "other", max_tokens=63)
    assert "end at 'newline:12-64', and these end at 'newline:12-63'" in refusal(other, CalibrationError)
    found = read_probes(Bundle.open(other), boundary=Boundary())
    assert found.boundary == Boundary()


def test_probes_of_other_states_are_refused(bundle: Path) -> None:
    """The manifest's graphs pool other layers than calibration saw, though each state has the same width."""
    folder = add_probes(bundle, layers=(3,))
    edit(folder, lambda content: content["pooled_layers"].update({"target": [1, 3]}))
    assert "states [1, 3] of the target pooled, the bundle pools [2, 3]" in refusal(bundle, CalibrationError)
    edit(folder, lambda content: content["pooled_layers"].update({"target": [2]}))
    assert "graph 'predictor' reads state 3 of the target, which is not pooled" in refusal(
        bundle, BundleError
    )


def test_probes_of_another_backend_are_refused(bundle: Path) -> None:
    """Half precision gives other states; where nobody knows, nobody is refused."""
    folder = add_probes(bundle, backend="cuda")
    with pytest.raises(
        CalibrationError, match=r"made on backend 'cuda' and 'cpu' is in use; .*--backend cpu"
    ):
        opened(bundle)
    edit(folder, lambda content: content.update(backend=""))
    opened(bundle).close()


def test_a_graph_of_another_width_is_refused(bundle: Path) -> None:
    """predictor.json may say what it likes: the graph's own inputs are held against the model."""
    folder = add_probes(bundle, layers=(3,), features=())
    write_probe_graph(folder / "other.onnx", ProbeWeights(states=(branch(WIDTH // 2),)))
    size, sha256 = (folder / "other.onnx").stat().st_size, sha256_of(folder / "other.onnx")
    edit(
        folder,
        lambda content: content["graphs"]["predictor"].update(file="other.onnx", size=size, sha256=sha256),
    )
    with pytest.raises(BundleError, match=r"pooled is float32\['B', 1, 24\], expected float32\['B', 1, 48\]"):
        opened(bundle)


# damage


def test_damaged_files_are_named(bundle: Path) -> None:
    """Size, content, absence: hashes are always checked, for a probe is small."""
    folder = add_probes(bundle)
    graph = folder / "predictor.onnx"
    content = graph.read_bytes()
    graph.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert f"{graph} was changed: sha256 {sha256_of(graph)}" in refusal(bundle, BundleError)
    graph.write_bytes(content[:-1])
    assert f"{graph} has {len(content) - 1} bytes, {len(content)} expected" in refusal(bundle, BundleError)
    graph.unlink()
    assert f"{graph} is missing" in refusal(bundle, BundleError)
    graph.symlink_to("/etc/hostname")
    assert "leads out of the bundle" in refusal(bundle, BundleError)


def _risky(content: dict[str, Any], **changes: float) -> None:
    content["risks"][0].update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.update(format=2), "format 2, this semspec reads 1"),
        (lambda content: content.update(graphs={}), "graphs must be predictor, or target and draft"),
        (lambda content: content["graphs"].pop("draft"), "target and draft, or all"),
        (lambda content: content["graphs"].pop("predictor"), "risks belong to a predictor"),
        (lambda content: content["graphs"].update(x=content["graphs"]["draft"]), "unknown graph 'x'"),
        (lambda content: content["graphs"]["draft"].update(role="target"), "must read states of the draft"),
        (lambda content: content["graphs"]["predictor"].update(file="../x.onnx"), "must be a plain name"),
        (
            lambda content: content["graphs"]["predictor"].update(role="judge"),
            "role must be one of target, draft",
        ),
        (lambda content: content["graphs"]["predictor"].update(layers=[3, 2]), "ascending state indices"),
        (lambda content: content["graphs"]["predictor"].update(layers=[-1]), "ascending state indices"),
        (
            lambda content: content["graphs"]["predictor"].update(features=[]),
            "reads neither states nor features",
        ),
        (lambda content: content["graphs"]["predictor"].update(features=["luck"]), "no feature 'luck'"),
        (lambda content: content["models"].pop("draft"), "of the same roles"),
        (lambda content: _risky(content, upper=0.9), "bound 0.9 of a risk is above the risk 0.05"),
        (lambda content: _risky(content, threshold=1.5), r"threshold of a risk must be in 0\.\.1, found 1.5"),
        (lambda content: content["risks"].reverse(), "risks must ascend"),
        (lambda content: content.update(risk_of="luck"), "risk_of must be one of meaning, answer"),
        (lambda content: content.pop("boundary"), "lacks 'boundary'"),
        (lambda content: content.update(surprise=1), "unknown key 'surprise'"),
    ],
)
def test_a_set_that_makes_no_sense_is_damaged(
    change: Callable[[dict[str, Any]], object], message: str, bundle: Path
) -> None:
    """A bundle is a stranger's: one line with the place, before any graph is opened."""
    folder = add_probes(bundle)
    edit(folder, change)
    found = refusal(bundle, BundleError)
    assert found.startswith(f"{folder / PREDICTOR_FILE} is damaged (")
    assert re.search(message, found), found


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": NaN}', "[" * 100_000, '{"risks": 1}'], ids=range(6)
)
def test_text_that_is_no_set_is_damaged(text: str, bundle: Path) -> None:
    """Whatever lies there."""
    folder = add_probes(bundle)
    (folder / PREDICTOR_FILE).write_text(text, encoding="utf-8")
    assert "is damaged (" in refusal(bundle, BundleError)


def test_probes_outside_the_bundle_are_refused(bundle: Path, tmp_path: Path) -> None:
    """By a link of the folder or of a number."""
    add_probes(bundle)
    (bundle / "probes").rename(tmp_path / "away")
    (bundle / "probes").symlink_to(tmp_path / "away")
    assert "leads out of the bundle" in refusal(bundle, BundleError)
    (bundle / "probes").unlink()
    (bundle / "probes").mkdir()
    (bundle / "probes" / "1").symlink_to(tmp_path / "away" / "1")
    assert "leads out of the bundle" in refusal(bundle, BundleError)


def test_states_that_are_no_numbers_are_an_error(bundle: Path) -> None:
    """A NaN is below every threshold and would pass for a rejection; an engine may even lose it on its way."""
    add_probes(bundle, layers=(3,), features=())
    broken = Reading(pooled=states(), signals=SIGNALS)
    broken.pooled[:] = 0
    with opened(bundle) as probes:
        assert 0 < probes.score(broken, None, SEGMENT) < 1
        broken.pooled[0, 0] = np.nan  # of a layer that the probe does not read
        assert 0 < probes.score(broken, None, SEGMENT) < 1
        for bad in (np.nan, np.inf, -np.inf):
            broken.pooled[1, 7] = bad
            with pytest.raises(BackendError, match="hidden states that are not finite; export with a wider"):
                probes.score(broken, None, SEGMENT)


def test_states_on_a_device_without_plans_are_read(bundle: Path) -> None:
    """ONNX Runtime's: their probes are fed from memory, and states that are not finite are found there as well."""
    add_probes(bundle, layers=(3,))
    right, other = BACKEND.zeros((1, 2, WIDTH), "float32"), open_backend("cpu", threads=1)
    right.numpy()[0] = states()
    with opened(bundle) as probes:
        expected = probes.score(reading(), None, SEGMENT), probes.ratio_scores(states(0), states(1))
        for backend in (BACKEND, other):
            there = Reading(pooled=NO_STATES, signals=SIGNALS, held=(held := HeldPooled(right, backend)))
            assert (probes.score(there, None, SEGMENT), probes.ratio_scores(held, states(1))) == expected
        held = HeldPooled(BACKEND.part(right, slice(0, 1)), BACKEND)
        held.values[1, 7] = np.inf
        with pytest.raises(BackendError, match="not finite"):
            probes.ratio_scores(held, states(1))
        with pytest.raises(ConfigError, match=r"must be \(2, E\), got \(1, 48\)"):
            probes.ratio_scores(HeldPooled(BACKEND.zeros((1, 1, WIDTH), "float32"), BACKEND), states(1))


def test_a_graph_that_the_engine_refuses_is_named(bundle: Path) -> None:
    """After another one was opened."""
    folder = add_probes(bundle)
    (folder / "target.onnx").write_bytes(b"\x08\x0a")
    size, sha256 = 2, sha256_of(folder / "target.onnx")
    edit(folder, lambda content: content["graphs"]["target"].update(size=size, sha256=sha256))
    with pytest.raises(SemspecError, match=r"target\.onnx"):
        opened(bundle)


def test_probes_are_small_and_scaled(bundle: Path) -> None:
    """Knots survive the way through file and engine; closing twice is safe."""
    scaling = Scaling(knots=(-1.0, 0.0, 1.0), values=(0.2, 0.2, 0.8))
    add_probes(bundle, features=("text.capped",), scaling=scaling)
    probes = opened(bundle)
    assert abs(probes.score(reading(), None, SEGMENT) - run_probe_of(scaling)) < 1e-6
    probes.close()
    probes.close()


def run_probe_of(scaling: Scaling) -> float:
    return float(run_probe(probe(WIDTH, 0, 1, scaling=scaling), signals=np.zeros((1, 1), np.float32))[0])


def test_a_set_is_checked_when_made() -> None:
    """Calibration cannot write what could not be read."""
    with pytest.raises(ValueError, match="graphs must be"):
        ProbeSet(
            format=1,
            graphs={},
            risks=(),
            boundary=Boundary(),
            models={},
            pooled_layers={},
            backend="cpu",
            temperature=0.6,
            top_p=0.95,
        )
