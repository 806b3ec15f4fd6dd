"""SamplingParams: valid from birth, and read from what models ship with."""

from __future__ import annotations

import dataclasses
import logging
import pickle
from typing import Any

import numpy as np
import pytest

from semspec.runtime.config import SamplingParams
from semspec.runtime.errors import ConfigError


def test_defaults_are_greedy_with_every_filter_off() -> None:
    """The least surprising request: the likeliest token, nothing filtered."""
    params = SamplingParams()
    assert params.greedy
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.0, 0, 1.0, 0.0)


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
    """Qwen2.5 ships repetition_penalty 1.1: dropping it in silence would change answers without a word."""
    with caplog.at_level(logging.WARNING):
        SamplingParams.from_generation_config({"repetition_penalty": 1.1, "num_beams": 1, "typical_p": None})
    assert "repetition_penalty=1.1" in caplog.text and "num_beams" not in caplog.text


def test_bad_shipped_value_is_refused_by_name() -> None:
    """A model file is input like any other."""
    with pytest.raises(ConfigError, match="top_p"):
        SamplingParams.from_generation_config({"do_sample": True, "top_p": 95})


def test_unknown_override_is_an_error() -> None:
    """Overrides come from users' keyword arguments: a typo must not pass."""
    with pytest.raises(TypeError, match="topk"):
        SamplingParams.from_generation_config({}, topk=5)
