"""SamplingParams and SpecConfig: valid from birth, and read from what models ship with."""

from __future__ import annotations

import dataclasses
import logging
import pickle
from typing import Any

import numpy as np
import pytest

from semspec.runtime.config import DRAFTS, MODES, SamplingParams, SpecConfig
from semspec.runtime.errors import ConfigError


def test_defaults_are_greedy_with_every_filter_off() -> None:
    """The least surprising request: the likeliest token, nothing filtered."""
    params = SamplingParams()
    assert params.greedy
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.0, 0, 1.0, 0.0)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (params.stop, params.stop_token_ids, params.ignore_eos, params.logprobs) == ((), (), False, False)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 2.0),
        ("top_k", None),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 1.5),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("stop_token_ids", 2),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", ("</s>",)),
        ("ignore_eos", 1),
        ("logprobs", 5),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.1),
        ("repetition_penalty", float("inf")),
        ("repetition_penalty", None),
        ("presence_penalty", float("nan")),
        ("presence_penalty", 101),
        ("frequency_penalty", "a lot"),
        ("frequency_penalty", -101),
        ("stop", "END"),
        ("stop", ("",)),
        ("stop", ("END", "")),
        ("stop", (b"END",)),
        ("stop", None),
    ],
)
def test_bad_value_is_refused_in_one_line_that_names_field_and_value(field: str, value: Any) -> None:
    """A wrong setting must fail where it is written, not change the output unnoticed."""
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{field: value})
    message = str(caught.value)
    assert message.startswith(field) and "\n" not in message
    assert repr(value) in message or str(value) in message


def test_unknown_setting_is_an_error() -> None:
    """A misspelt setting that is dropped changes nothing and says nothing."""
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]


def test_numbers_are_stored_as_plain_python_numbers() -> None:
    """Settings go into JSON reports; numpy scalars and lists from callers must not leak into them."""
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), stop_token_ids=[np.int64(2)])  # type: ignore[arg-type]
    assert type(params.temperature) is float and type(params.top_k) is int
    assert params.stop_token_ids == (2,) and type(params.stop_token_ids[0]) is int
    assert params == SamplingParams(temperature=0.5, top_k=3, stop_token_ids=(2,))


def test_settings_are_frozen_hashable_and_travel_between_processes() -> None:
    """A request must not change under way; servers hash and pickle settings."""
    params = SamplingParams(temperature=0.6, stop_token_ids=(1, 2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0  # type: ignore[misc]
    assert {params: 1}[pickle.loads(pickle.dumps(params))] == 1


def test_generation_config_of_a_sampling_model_is_read() -> None:
    """What a model ships with is what its makers tested; overrides are the user's word and win."""
    shipped = {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "eos_token_id": [1, 2],
        "min_p": None,
    }
    params = SamplingParams.from_generation_config(shipped, top_k=5, seed=3)
    assert params == SamplingParams(temperature=0.7, top_k=5, top_p=0.8, seed=3)


@pytest.mark.parametrize(
    "shipped", [{}, {"do_sample": False, "temperature": 0.7}, {"temperature": 0.7, "do_sample": None}]
)
def test_generation_config_without_do_sample_is_greedy(shipped: dict[str, Any]) -> None:
    """transformers decodes greedily unless do_sample is true, whatever the temperature says."""
    assert SamplingParams.from_generation_config(shipped).greedy
    assert SamplingParams.from_generation_config(shipped, temperature=0.9).temperature == 0.9


def test_do_sample_without_temperature_means_temperature_one() -> None:
    """That is what transformers does, and a missing temperature must not turn sampling off."""
    assert SamplingParams.from_generation_config({"do_sample": True}).temperature == 1.0


def test_generation_config_settings_that_are_not_applied_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """Dropping a setting in silence would change answers without a word."""
    with caplog.at_level(logging.WARNING):
        SamplingParams.from_generation_config({"no_repeat_ngram_size": 3, "num_beams": 1, "typical_p": None})
    assert "no_repeat_ngram_size=3" in caplog.text and "num_beams" not in caplog.text


def test_shipped_penalty_and_stops_are_applied(caplog: pytest.LogCaptureFixture) -> None:
    """Qwen2.5 ships repetition_penalty 1.1; transformers lets stop_strings be one text or several."""
    with caplog.at_level(logging.WARNING):
        params = SamplingParams.from_generation_config({"repetition_penalty": 1.1, "stop_strings": "END"})
    assert (params.repetition_penalty, params.stop, caplog.text) == (1.1, ("END",), "")
    assert SamplingParams.from_generation_config({"stop_strings": ["a", "b"]}).stop == ("a", "b")
    assert SamplingParams.from_generation_config({"stop_strings": None}).stop == ()


def test_bad_shipped_value_is_refused_by_name() -> None:
    """A model file is input like any other."""
    with pytest.raises(ConfigError, match="top_p"):
        SamplingParams.from_generation_config({"do_sample": True, "top_p": 95})


def test_unknown_override_is_an_error() -> None:
    """Overrides come from users' keyword arguments: a typo must not pass."""
    with pytest.raises(TypeError, match="topk"):
        SamplingParams.from_generation_config({}, topk=5)


def test_penalties_of_either_sign_are_settings() -> None:
    """Below 1 and below 0 mean more of the same, as elsewhere."""
    params = SamplingParams(repetition_penalty=0.9, presence_penalty=-2, frequency_penalty=np.float32(0.5))  # type: ignore[arg-type]
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (0.9, -2.0, 0.5)
    assert type(params.presence_penalty) is type(params.frequency_penalty) is float


def test_stops_may_come_as_a_list_and_are_kept_as_a_tuple() -> None:
    """Settings are hashable and cannot be changed from outside."""
    stops = ["END", "\n"]
    params = SamplingParams(stop=stops)  # type: ignore[arg-type]
    stops.append("later")
    assert params.stop == ("END", "\n") and hash(params) == hash(SamplingParams(stop=("END", "\n")))


def test_speculation_is_exact_unless_asked_otherwise() -> None:
    """The default is the mode that promises most."""
    assert dataclasses.astuple(SpecConfig())[:4] == ("lossless", "auto", 4, False)
    assert not SpecConfig().semantic and not SpecConfig(mode="combined", risk=0).semantic


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("draft", DRAFTS)
def test_every_mode_goes_with_every_draft(mode: str, draft: str) -> None:
    """Frozen, hashable, and plain numbers, as sampling settings are; but n-grams have no segments."""
    if draft == "ngram" and mode in ("semantic", "combined"):
        with pytest.raises(ConfigError, match="n-grams draft no segments"):
            SpecConfig(mode=mode, draft=draft)
        return
    spec = SpecConfig(mode=mode, draft=draft, num_draft_tokens=np.int64(7), block=True)  # type: ignore[arg-type]
    assert type(spec.num_draft_tokens) is int
    assert {spec: 1}[pickle.loads(pickle.dumps(spec))] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.mode = "lossless"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("mode", "exact", "autoregressive, lossless"),
        ("mode", None, "autoregressive, lossless"),
        ("mode", ["lossless"], "autoregressive, lossless"),
        ("draft", "none", ", ".join(DRAFTS)),
        ("num_draft_tokens", 0, "at least 1, got 0; use mode 'autoregressive'"),
        ("num_draft_tokens", 2.5, "whole number"),
        ("num_draft_tokens", True, "whole number"),
        ("block", 1, "True or False"),
        ("block", "yes", "True or False"),
    ],
)
def test_bad_speculation_is_refused_in_one_line(field: str, value: Any, allowed: str) -> None:
    """Names the field, the value and what is allowed; a mode that does not exist must not become another."""
    with pytest.raises(ConfigError) as caught:
        SpecConfig(**{field: value})
    message = str(caught.value)
    assert message.startswith(field) and repr(value) in message and allowed in message and "\n" not in message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"risk": 0.1}, "risk belongs to the modes semantic and combined, not to 'lossless'"),
        ({"mode": "judged", "bonus": True}, "bonus belongs to"),
        ({"mode": "judged", "max_segments": 2}, "max_segments belongs to"),
        ({"mode": "judged", "min_confidence": 0.5}, "min_confidence is not used by adaptive 'off'"),
        ({"mode": "semantic", "max_segments": 0}, "max_segments must be a whole number of at least 1, got 0"),
        ({"mode": "draft-alone", "adaptive": "confidence"}, "adaptive belongs to"),
        ({"mode": "semantic", "ratio_floor": 0.7}, "ratio_floor is not used by mode 'semantic' with preset"),
        ({"mode": "semantic", "preset": "calibrated", "greedy_accept": True}, "greedy_accept is not used"),
        ({"mode": "semantic", "preset": "paper", "risk": 0.1}, "risk is not used"),
        ({"mode": "semantic", "min_confidence": 0.5}, "min_confidence is not used"),
        ({"mode": "combined", "preset": "calibrated"}, "preset is not used by mode 'combined'"),
        ({"mode": "combined", "keep_prefix": True}, "keep_prefix is not used"),
        ({"mode": "combined", "top2": True}, "top2 is not used"),
        ({"mode": "semantic", "risk": 1.5}, "risk must be finite and between 0 and 1, got 1.5"),
        ({"mode": "semantic", "risk": "low"}, "risk must be a number"),
        (
            {"mode": "semantic", "preset": "paper", "ratio_floor": -1},
            "ratio_floor must be finite and at least 0",
        ),
        (
            {"mode": "semantic", "max_lossy_fraction": 2},
            "max_lossy_fraction must be finite and between 0 and 1",
        ),
        ({"mode": "semantic", "preset": "published"}, "preset must be one of calibrated, paper, strict"),
        ({"mode": "semantic", "thinking": "aloud"}, "thinking must be one of exact, discard, ignore"),
        ({"mode": "semantic", "adaptive": True}, "adaptive must be one of off, confidence, acceptance"),
        ({"mode": "semantic", "bonus": None}, "bonus must be True or False"),
        ({"mode": "semantic", "keep_prefix": "no"}, "keep_prefix must be True or False"),
        ({"mode": "semantic", "exact_inside": 1}, "exact_inside must be True or False"),
    ],
    ids=str,
)
def test_a_semantic_setting_that_is_wrong_or_that_nothing_looks_at_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    """A setting that is silently ignored would be a promise broken."""
    with pytest.raises(ConfigError) as caught:
        SpecConfig(**settings)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_probes_judge_unless_the_risk_is_0() -> None:
    """Two modes, at any risk above 0; presets without a risk always do."""
    for mode in ("semantic", "combined"):
        assert SpecConfig(mode=mode).semantic and SpecConfig(mode=mode, risk=1).semantic
        assert not SpecConfig(mode=mode, risk=0).semantic
    assert SpecConfig(mode="semantic", preset="strict", ratio_floor=0.7, keep_prefix=False).semantic
    assert not any(SpecConfig(mode=mode).semantic for mode in ("lossless", "judged", "autoregressive"))
    assert hash(SpecConfig(mode="semantic", risk=1)) == hash(SpecConfig(mode="semantic", risk=1.0))


def test_unknown_speculation_setting_is_an_error() -> None:
    """Names of other projects (gamma, k) must not be taken for ours."""
    with pytest.raises(TypeError, match="gamma"):
        SpecConfig(gamma=4)  # type: ignore[call-arg]
