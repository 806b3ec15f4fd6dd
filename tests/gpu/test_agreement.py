"""What disagrees is counted with its margin, and what is beyond rounding is said: on the CPU, where it can be tried."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu.agreement import Rows, compare_answers, compare_models, compare_rows, verdict
from gpu.pair import make_pair

from semspec.runtime.backends import open_backend
from semspec.runtime.bundle import Bundle
from semspec.runtime.errors import BackendError
from semspec.runtime.llm import LLM
from semspec.runtime.model import CachedModel
from semspec.runtime.records import Forward


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pair(tmp_path_factory.mktemp("fp32"), "cpu", "fp32")


@pytest.fixture(scope="module")
def model(bundle: Path) -> Iterator[CachedModel]:
    with open_target(bundle) as opened:
        yield opened


def open_target(bundle: Path, kind: type[CachedModel] = CachedModel) -> CachedModel:
    opened = Bundle.open(bundle)
    backend = open_backend("cpu", threads=1)
    return kind(backend, opened.graph_file("target", "cpu"), opened.model("target").graphs["cpu"])


def test_rows_are_counted_with_their_margins() -> None:
    """Two of three rows say another token; the margin is the expected logits' own."""
    expected = np.array([[0, 3, 1], [2, 0, 0], [0, 1, 4]], np.float32)
    found = np.array([[0, 1, 3], [2, 0, 0], [5, 1, 4]], np.float32)
    rows = compare_rows(expected, found)
    assert (rows.rows, rows.different, rows.margin, rows.gap) == (3, 2, 4.0, 5.0)
    assert rows.kl > 0.5
    assert compare_rows(expected, expected) == Rows(rows=3, kl=0.0, different=0, margin=0.0, gap=0.0)


def test_logits_that_are_no_numbers_are_an_error() -> None:
    """A comparison with NaN is false, whichever way it is put."""
    with pytest.raises(BackendError, match="not finite"):
        compare_rows(np.zeros((1, 2), np.float32), np.array([[0, np.nan]], np.float32))


def test_cpu_agrees_with_itself_to_the_bit(bundle: Path, model: CachedModel) -> None:
    """What the comparison itself adds must be nothing."""
    with open_target(bundle) as other:
        models = compare_models(model, other)
    ways = [*models["cpu"].values(), *models["itself"].values()]
    assert len(ways) == 7 and all(way["gap"] == 0 for way in ways)
    assert set(models["gaps"]) == {"state 0", "state 3", "pooled", "pooled one by one"}
    assert max(models["gaps"].values()) < 1e-5
    assert verdict(models, []) == ""


class Forgetful(CachedModel):
    """Rewinds to one row too few, as a backend that writes in wrong places would."""

    def rewind(self, length: int) -> None:
        super().rewind(max(length - 1, 0))


class Unpooled(CachedModel):
    """Sums nothing up."""

    def forward(self, ids: Sequence[int], **options: Any) -> Forward:
        return super().forward(ids, **options | {"pooled": None})


@pytest.mark.parametrize(
    ("kind", "said"), [(Forgetful, "after a rewind: "), (Unpooled, "pooled one by one: ")]
)
def test_what_is_wrong_is_said(bundle: Path, model: CachedModel, kind: type[CachedModel], said: str) -> None:
    """A check that lets a wrong position or a lost sum pass would prove nothing."""
    with open_target(bundle, kind) as broken:
        models = compare_models(model, broken)
    assert said in verdict(models, [])
    assert models["cpu"]["pieces"]["gap"] == 0


def test_answers_of_other_weights_part_at_a_margin(bundle: Path, tmp_path: Path) -> None:
    """int4 beside fp32; the CPU's own answers do not part, alone or drafted."""
    other = make_pair(tmp_path, "cpu", "int4")
    with LLM(bundle, threads=1) as expected, LLM(other, threads=1) as found:
        same, apart = compare_answers(expected, expected), compare_answers(expected, found)
    assert len(same) == 6 and not [fact for fact in same if "margin" in fact]
    margins = [fact["margin"] for fact in apart if "margin" in fact]
    assert margins and min(margins) >= 0
    models: dict[str, Any] = {"cpu": {}, "itself": {}, "gaps": {}}
    assert verdict(models, [{"margin": 0.01}]) == ""
    assert "at a margin of 0.5" in verdict(models, [{"margin": 0.01}, {}, {"margin": 0.5}])
