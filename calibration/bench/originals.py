"""The weights behind a bundle, in the forms that peers read: as they came, as a Hugging Face folder, as genai's export.

Everything a peer is given is made of the very file or folder that the bundle was exported from, which its sha256
proves, with the bundle's own tokenizer. What is made is kept by that hash and made once. This file knows sources,
checkpoints and folders; it imports no peer.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from semspec.calibration.bench.wire import last_line
from semspec.calibration.bench.workers.build import PEAK
from semspec.export.cache import require_space
from semspec.export.checkpoint import Checkpoint, expected_tensors, open_checkpoint
from semspec.export.recipes import WheelsSource, load_recipe, recipe_names
from semspec.export.sources import Source, fetch, parse_source
from semspec.runtime.bundle import Bundle
from semspec.runtime.errors import BackendError, ConfigError, SourceError
from semspec.runtime.records import Progress

__all__ = ["Made", "find_original", "make_genai", "make_genai_pair", "make_hf", "quiet_environment"]

# what transformers calls the class of a family; genai's builder goes by it
ARCHITECTURES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
BLOCK_ROWS = 4096  # of a matrix that are in memory at a time
MADE = "made.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What a peer's own export cost, in a process of its own, and the bytes of the files it left."""

    seconds: float
    peak_mib: float
    n_bytes: int


def find_original(bundle: Bundle, role: str, on_progress: Progress | None = None) -> Path:
    """The .gguf file, or the folder of safetensors, that a model of the bundle was exported from.

    Looked for where the manifest says it came from; a recipe's model is fetched as for an export. Raises
    ConfigError where it cannot be found or holds other weights, BundleError for a role the bundle lacks.
    """
    recorded = bundle.model(role).source
    said, sha256 = recorded.get("from", ""), recorded.get("sha256", "")
    try:
        path = fetch(_source(said, sha256), on_progress=on_progress)
        found = open_checkpoint(path).sha256()
    except SourceError as error:
        raise ConfigError(
            f"the weights of the {role} cannot be given to a peer ({error}); bring them back to where the bundle "
            f"says they came from, or export again"
        ) from error
    if found != sha256:
        raise ConfigError(
            f"the weights of the {role} changed since the export: {said} has sha256 {found}, the bundle's are of "
            f"{sha256}; export again, for peers must have the same weights"
        )
    return path.absolute()


def _source(said: str, sha256: str) -> Source:
    """The source of those words; a recipe's is known by its hash, or by how it calls itself."""
    for name in recipe_names():
        recipe = load_recipe(name)
        for model in (recipe.target, recipe.draft):
            for source in model.sources if model is not None else ():
                if str(source) == said or (isinstance(source, WheelsSource) and source.sha256 == sha256):
                    return source
    return parse_source(said)


def make_hf(bundle: Bundle, role: str, work: Path, on_progress: Progress | None = None) -> Path:
    """The folder `work`/<hash>/hf with config.json, model.safetensors (fp32) and the bundle's tokenizer.

    Tensors are read, de-quantized and written one at a time. Raises as find_original; ConfigError for a family
    that has no class in transformers here; SourceError where the disk has no room.
    """
    folder = _place(bundle, role, work) / "hf"
    if folder.exists():
        return folder
    checkpoint = open_checkpoint(find_original(bundle, role, on_progress))
    family = str(checkpoint.config.get("model_type"))
    if family not in ARCHITECTURES:
        raise ConfigError(
            f"peers read the families {', '.join(ARCHITECTURES)}, this bundle's {role} is {family}"
        )
    partial = _begin(folder)
    require_space(partial, sum(4 * _size(shape) for shape in expected_tensors(checkpoint.spec).values()))
    _write_config(partial / "config.json", checkpoint.config, ARCHITECTURES[family])
    for path in sorted(bundle.tokenizer.iterdir()):
        shutil.copyfile(path, partial / path.name)
    _write_safetensors(partial / "model.safetensors", checkpoint, role, on_progress)
    return _finish(partial, folder)


def make_genai(
    bundle: Bundle, role: str, work: Path, on_progress: Progress | None = None
) -> tuple[Path, Made]:
    """genai's own int4 export for the CPU at its defaults, made by its builder in a process of its own.

    Raises as make_hf; BackendError, with the builder's last words, where it fails.
    """
    folder = _place(bundle, role, work) / f"genai-{metadata.version('onnxruntime-genai')}"
    if not folder.exists():
        source = make_hf(bundle, role, work, on_progress)
        partial = _begin(folder)
        if on_progress is not None:
            on_progress(f"genai's builder exports the {role}", 0, 1)
        cost = _build(source, partial)
        (partial / MADE).write_text(json.dumps(cost) + "\n", encoding="utf-8")
        _finish(partial, folder)
        if on_progress is not None:
            on_progress(f"genai's builder exports the {role}", 1, 1)
    seconds, peak_mib = json.loads((folder / MADE).read_text(encoding="utf-8"))
    n_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.suffix in (".onnx", ".data"))
    return folder, Made(seconds=seconds, peak_mib=peak_mib, n_bytes=n_bytes)


def make_genai_pair(target: Path, draft: Path) -> Path:
    """A folder whose genai_config.json joins two exports of genai: the draft drafts, the target decides."""
    folder = target.with_name(f"{target.name}-with-{draft.parent.name}")
    if folder.exists():
        return folder
    config, drafting = (
        json.loads((path / "genai_config.json").read_text(encoding="utf-8")) for path in (target, draft)
    )
    partial = _begin(folder)
    # genai takes no path that leads out of the folder, but follows a link in it
    for role, path in (("target", target), ("draft", draft)):
        (partial / role).symlink_to(os.path.relpath(path, folder), target_is_directory=True)
    decoder, drafter = config["model"]["decoder"], drafting["model"]["decoder"]
    decoder["filename"] = f"target/{decoder['filename']}"
    drafter["filename"] = f"draft/{drafter['filename']}"
    config["model"]["draft"] = drafter
    (partial / "genai_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return _finish(partial, folder)


def _place(bundle: Bundle, role: str, work: Path) -> Path:
    """Where what is made of these weights lies."""
    return work / bundle.model(role).source.get("sha256", "")[:16]


def _begin(folder: Path) -> Path:
    """An empty folder beside the one to be made; what a killed run left of it is removed."""
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    for old in folder.parent.glob(f".{folder.name}.*.partial"):
        shutil.rmtree(old, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def _finish(partial: Path, folder: Path) -> Path:
    """Give it its name; another process that was faster made the same."""
    try:
        partial.rename(folder)
    except OSError:
        if not folder.exists():
            raise
        shutil.rmtree(partial)
    return folder


def _size(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) == 2 else 1)


def _write_config(path: Path, config: Mapping[str, Any], architecture: str) -> None:
    """genai's builder trips over a rotary scaling that is not there: it is named where it is the plain one."""
    scaling = config.get("rope_scaling") or {"rope_type": "default"}
    whole = {**config, "rope_scaling": scaling, "architectures": [architecture], "torch_dtype": "float32"}
    path.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")


def _write_safetensors(path: Path, checkpoint: Checkpoint, role: str, on_progress: Progress | None) -> None:
    """All tensors as fp32: 8 bytes of length, a JSON header, then the arrays in its order."""
    shapes = expected_tensors(checkpoint.spec)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * _size(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode("ascii")
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for done, (name, shape) in enumerate(shapes.items()):
            if on_progress is not None:
                on_progress(f"writing the {role} for peers", done, len(shapes))
            for start in range(0, shape[0], BLOCK_ROWS):
                rows = slice(start, min(start + BLOCK_ROWS, shape[0]))
                file.write(checkpoint.read(name, rows).astype("<f4", copy=False).tobytes())


def _build(source: Path, out: Path) -> tuple[float, float]:
    """Seconds and peak MiB of genai's builder, from its start to its end."""
    command = [sys.executable, "-m", "semspec.calibration.bench.workers.build"]
    command += ["-i", str(source), "-o", str(out), "-p", "int4", "-e", "cpu", "-c", str(out / "scratch")]
    environment = {**os.environ, **quiet_environment()}
    log_path = out / "builder.log"
    started = time.perf_counter()
    with log_path.open("wb") as log:
        done = subprocess.run(
            command, cwd=out, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False
        )
    seconds = time.perf_counter() - started
    if done.returncode != 0:
        words = last_line(log_path.read_bytes())
        raise BackendError(f"genai's builder ended with status {done.returncode}; it last said: {words}")
    shutil.rmtree(out / "scratch", ignore_errors=True)
    peak = out / PEAK
    peak_mib = float(peak.read_text(encoding="ascii"))
    peak.unlink()
    return seconds, peak_mib


def quiet_environment() -> Mapping[str, str]:
    """Variables that keep peers from talking to anyone."""
    return {"HF_HUB_OFFLINE": "1", "ORT_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}
