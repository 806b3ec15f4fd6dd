"""What calibration leaves in a bundle: probes/<n>/ with graphs, predictor.json, calibration.json and report.html.

    learned folder -> probes/<n>/    the same files and the report; appears by a rename, earlier numbers stay

It knows files and what is in them; how anything was learned is not its business.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from semspec.calibration.collection import CollectionRun
from semspec.calibration.dataset import Dataset
from semspec.calibration.findings import Findings
from semspec.calibration.learn import Learned
from semspec.calibration.report import write_calibration_report
from semspec.export.probe_graph import ProbeWeights, add_probe_graph, check_probe_graph
from semspec.export.staging import staged
from semspec.runtime.backends import open_backend
from semspec.runtime.backends.base import Backend
from semspec.runtime.bundle import ROLES, Bundle
from semspec.runtime.errors import BundleError, CalibrationError
from semspec.runtime.features import FEATURES
from semspec.runtime.probe_set import (
    FORMAT,
    PREDICTOR,
    PREDICTOR_FILE,
    PROBES,
    ProbeGraph,
    ProbeSet,
    latest_probes,
)
from semspec.runtime.records import Floats
from semspec.runtime.typed import plain, read_typed

__all__ = ["CALIBRATION", "Calibration", "install", "read_calibration", "save_learned"]

CALIBRATION = "calibration.json"
CALIBRATION_FORMAT = 1
GATE_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What calibration.json says. origin: what was calibrated, on what and how, for people; of it a check reads
    `samples` and `equivalence` back. questions: data.question_sha256 of each that was used, sorted; none where it was
    not written down."""

    format: int
    findings: Findings
    origin: Mapping[str, Any]
    questions: tuple[str, ...] = field(default=(), metadata={"left_out_by_default": True})

    def to_json(self) -> str:
        """The text of calibration.json."""
        return json.dumps(plain(self), indent=1, sort_keys=True, allow_nan=False) + "\n"


def save_learned(
    folder: Path,
    learned: Learned,
    dataset: Dataset,
    run: CollectionRun,
    origin: Mapping[str, Any],
    questions: Sequence[str] = (),
) -> None:
    """Write the graphs, checked against numpy on rows of the dataset, predictor.json and calibration.json into the
    empty `folder`. questions: as Calibration has them. Raises BundleError for a graph that computes something else,
    BackendError, OSError."""
    found, last = learned.findings, {role: dataset.layers[role][-1:] for role in ROLES}
    backend, graphs = open_backend("cpu", threads=1), dict[str, ProbeGraph]()

    def add(
        name: str, weights: ProbeWeights, role: str, layers: tuple[int, ...], features: tuple[str, ...]
    ) -> None:
        graphs[name] = add_probe_graph(folder, name, weights, role=role, layers=layers, features=features)
        _gate(backend, folder / graphs[name].file, weights, dataset, graphs[name])

    add(PREDICTOR, learned.predictor, "target", found.probe_layers, found.features)
    for role, weights in (("target", learned.target), ("draft", learned.draft)):
        add(role, weights, role, last[role], ())
    spoils = dataset.label == "outcome"  # of greedy segments
    predictor = ProbeSet(
        format=FORMAT,
        graphs=graphs,
        risks=learned.risks,
        ratio=learned.ratio,
        boundary=run.boundary,
        models=run.models,
        pooled_layers=run.pooled_layers,
        backend=run.backend,
        temperature=0.0 if spoils else run.settings.temperature,
        top_p=1.0 if spoils else run.settings.top_p,
        risk_of="answer" if spoils else "meaning",
    )
    calibration = Calibration(
        format=CALIBRATION_FORMAT, findings=found, origin=origin, questions=tuple(sorted(set(questions)))
    )
    (folder / PREDICTOR_FILE).write_text(predictor.to_json(), encoding="utf-8")
    (folder / CALIBRATION).write_text(calibration.to_json(), encoding="utf-8")


def read_calibration(folder: Path) -> Calibration:
    """calibration.json of a folder of probes. Raises CalibrationError where it is missing or damaged."""
    path = folder / CALIBRATION
    try:
        found: Calibration = read_typed(Calibration, json.loads(path.read_text("utf-8")), "calibration")
        if found.format != CALIBRATION_FORMAT:
            raise ValueError(f"format {found.format}, this version reads {CALIBRATION_FORMAT}")
    except (FileNotFoundError, NotADirectoryError):
        raise CalibrationError(
            f"{folder} has no {CALIBRATION}: it is no folder that semspec calibrate made, such as BUNDLE/probes/1"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:160]
        raise CalibrationError(
            f"{path} cannot be read ({reason}); remove {folder} and run the same command again"
        ) from None
    return found


def install(learned: Path, bundle: Bundle, out: Path | None = None) -> tuple[Path, bool]:
    """Copy a learned folder, with its report, to the next number of the bundle's probes, or to the new folder `out`.

    Returns the folder, and whether it is new: what counts already and says the very same is left as it is. Raises
    BundleError: the place exists or cannot be written; CalibrationError for a damaged learned folder.
    """
    calibration = read_calibration(learned)

    def fill(folder: Path) -> None:
        for path in sorted(learned.iterdir()):
            shutil.copyfile(path, folder / path.name)
        write_calibration_report(folder, calibration.findings, calibration.origin)

    if out is not None:
        _stage(out, fill)
        return out, True
    with _numbers(bundle) as latest:
        if latest is not None and _says_the_same(latest, learned):
            return latest, False
        place = bundle.path / PROBES / str(1 if latest is None else int(latest.name) + 1)
        _stage(place, fill)
        return place, True


def _gate(backend: Backend, path: Path, weights: ProbeWeights, dataset: Dataset, graph: ProbeGraph) -> None:
    """On drafted segments as they are met."""
    rows = dataset.draft
    pooled: Floats | None = None
    if graph.layers:
        places = [dataset.layers[graph.role].index(layer) for layer in graph.layers]
        pooled = np.ascontiguousarray(rows.pooled[graph.role][:GATE_ROWS, places])
    columns = [FEATURES.index(name) for name in graph.features]
    signals = np.ascontiguousarray(rows.features[:GATE_ROWS, columns]) if columns else None
    check_probe_graph(backend, path, weights, pooled, signals)


def _stage(place: Path, fill: Callable[[Path], None]) -> None:
    with staged(place) as folder:
        fill(folder)
        for path in folder.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())


@contextmanager
def _numbers(bundle: Bundle) -> Iterator[Path | None]:
    """The latest probes, in a folder that is there; it is gone again where nothing came to be in it."""
    folder = bundle.path / PROBES
    latest = latest_probes(bundle)
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise BundleError(
            f"{folder} cannot be made ({error.strerror}); make the bundle writable, or give --out"
        ) from None
    try:
        yield latest
    finally:
        with suppress(OSError):  # not empty
            folder.rmdir()


def _says_the_same(one: Path, other: Path) -> bool:
    names = sorted(path.name for path in other.iterdir())
    return all(
        (one / name).is_file() and (one / name).read_bytes() == (other / name).read_bytes() for name in names
    )
