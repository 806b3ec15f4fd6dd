"""Ranges against transformers, kills at every layer, and files that must not be written over."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_pairs
import torch
from numpy.testing import assert_allclose
from transformers import AutoModelForCausalLM

from semspec.calibration.ranges import take_ranges
from semspec.calibration.texts import CalibrationText
from semspec.export.checkpoint import Checkpoint, open_checkpoint
from semspec.export.ranges import PERCENTILES, Ranges, input_widths, read_ranges, write_ranges
from semspec.runtime.errors import CalibrationError, ConfigError, SourceError
from semspec.runtime.records import Floats

RNG = np.random.default_rng(0)
TEXT = CalibrationText(
    windows=tuple(tuple(RNG.integers(0, 260, size).tolist()) for size in (120, 33, 120, 1)), sha256="0" * 64
)
MODULES = {"qkv": "self_attn.q_proj", "attention_output": "self_attn.o_proj"}
MODULES |= {"gate_up": "mlp.gate_proj", "down": "mlp.down_proj"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pairs.save_checkpoint(tmp_path_factory.mktemp("ranges") / "tiny", "qwen2")


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Checkpoint:
    return open_checkpoint(folder)


def take(checkpoint: Checkpoint, out: Path, text: CalibrationText = TEXT, **options: Any) -> Ranges:
    return take_ranges(checkpoint, text, out, name="tiny", **options)


def hooked(checkpoint: Checkpoint) -> dict[str, Floats]:
    """What transformers' linears read, window after window: our name -> (T, E)."""
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32)
    seen: dict[str, list[Any]] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda module, args: seen.setdefault(name, []).append(args[0][0].double().numpy())

    for layer in range(checkpoint.spec.n_layers):
        for ours, theirs in MODULES.items():
            module = model.get_submodule(f"model.layers.{layer}.{theirs}")
            module.register_forward_pre_hook(keep(f"layers.{layer}.{ours}"))
    model.lm_head.register_forward_pre_hook(keep("head"))
    with torch.no_grad():
        for window in TEXT.windows:
            model(torch.tensor([window]))
    return {name: np.concatenate(arrays) for name, arrays in seen.items()}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_statistics_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    """Every linear, the head included: hooks on an independent implementation, windows as texts of their own."""
    checkpoint = open_checkpoint(tiny_pairs.save_checkpoint(tmp_path / family, family))
    take(checkpoint, tmp_path / "ranges")
    found, expected = read_ranges(tmp_path / "ranges", checkpoint), hooked(checkpoint)
    assert found.linears.keys() == expected.keys() == input_widths(checkpoint.spec, checkpoint).keys()
    assert found.tokens == 274 and found.windows == TEXT.windows and found.model == "tiny"
    for name, x in expected.items():
        linear, size = found.linears[name], np.abs(x)
        close = {"rtol": 1e-3, "atol": 2e-4 * size.mean(), "err_msg": name}
        assert_allclose(linear.abs_max, size.max(axis=0), **close)
        assert_allclose(linear.mean_abs, size.mean(axis=0), **close)
        assert_allclose(linear.mean, x.mean(axis=0), **close)
        assert_allclose(linear.second_moment, np.square(x).mean(axis=0), **close)
        percentiles = np.percentile(size, PERCENTILES, axis=0, method="inverted_cdf")
        assert_allclose(linear.channel_percentiles, percentiles, **close)
        percentiles = np.percentile(size, PERCENTILES, method="inverted_cdf")
        assert_allclose(linear.percentiles, percentiles, **close)


def test_the_same_inputs_give_the_same_bytes(tiny: Checkpoint, tmp_path: Path) -> None:
    """And nothing is left beside the file."""
    for name in ("a", "b"):
        take(tiny, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


KILLED_RUN = """
import os, signal
from pathlib import Path
from semspec.calibration.ranges import take_ranges
from semspec.calibration.texts import CalibrationText
from semspec.export.checkpoint import open_checkpoint

def kill(stage, done, total):
    if done == {at}:
        os.kill(os.getpid(), signal.SIGKILL)

text = CalibrationText(windows={windows}, sha256="0" * 64)
take_ranges(open_checkpoint(Path({folder!r})), text, Path({out!r}), name="tiny", on_progress=kill)
"""


@pytest.mark.parametrize("at", [1, 5, 8, 11])
def test_a_killed_run_goes_on_with_the_same_bytes(
    tiny: Checkpoint, folder: Path, tmp_path: Path, at: int
) -> None:
    """Killed in the first, second and third layer: no file is there, and what was done is not done again."""
    out, whole = tmp_path / "ranges", tmp_path / "whole"
    take(tiny, whole)
    code = KILLED_RUN.format(at=at, windows=TEXT.windows, folder=str(folder), out=str(out))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == -9, done.stderr
    assert not out.exists()
    seen: list[int] = []
    take(tiny, out, on_progress=lambda stage, done, total: seen.append(done))
    assert seen == list(range((at - 1) // 4 * 4 + 1, 13))
    assert out.read_bytes() == whole.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"ranges", "whole"}


class Stopped(Exception):
    """Instead of a kill, where the process must live on."""


def stop_at(count: int) -> Callable[[str, int, int], None]:
    def on_progress(stage: str, done: int, total: int) -> None:
        if done == count:
            raise Stopped

    return on_progress


def test_a_run_that_all_layers_were_done_for_is_only_written(
    tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last thing that can be interrupted; and a full disk is one line."""
    out, whole = tmp_path / "ranges", tmp_path / "whole"
    take(tiny, whole)

    def no_space(path: Path, ranges: Ranges) -> None:
        if path == out:
            raise OSError(28, "No space left on device")
        write_ranges(path, ranges)

    with monkeypatch.context() as patched:
        patched.setattr("semspec.calibration.ranges_state.write_ranges", no_space)
        with pytest.raises(CalibrationError, match=r"ranges: cannot be written: No space left on device"):
            take(tiny, out)
    seen: list[int] = []
    take(tiny, out, on_progress=lambda stage, done, total: seen.append(done))
    assert not seen and out.read_bytes() == whole.read_bytes()


def test_another_unfinished_run_is_not_mixed_in(tiny: Checkpoint, folder: Path, tmp_path: Path) -> None:
    """Other words, other windows of the same text, another model: refused, or begun anew on demand."""
    out = tmp_path / "ranges"
    with pytest.raises(Stopped):
        take(tiny, out, on_progress=stop_at(6))
    cut = CalibrationText(windows=TEXT.windows[:-1], sha256=TEXT.sha256)
    moved = CalibrationText(windows=TEXT.windows[::-1], sha256=TEXT.sha256)
    other = open_checkpoint(tiny_pairs.save_checkpoint(tmp_path / "other", "qwen2", seed=1))
    for checkpoint, text in ((tiny, cut), (tiny, moved), (other, TEXT)):
        with pytest.raises(ConfigError, match="holds an unfinished run of another model, text or version"):
            take(checkpoint, out, text)
    take(other, out, force=True)
    take(other, tmp_path / "fresh")
    assert out.read_bytes() == (tmp_path / "fresh").read_bytes()


def test_a_run_interrupted_before_its_first_layer_leaves_nothing(tiny: Checkpoint, tmp_path: Path) -> None:
    """An empty folder beside the file would puzzle."""
    with pytest.raises(Stopped):
        take(tiny, tmp_path / "ranges", on_progress=stop_at(2))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("file", ["layer-0.safetensors", "streams.safetensors"])
def test_a_damaged_state_is_named(tiny: Checkpoint, tmp_path: Path, file: str) -> None:
    """It is written whole, so this is the disk's doing; the repair is to remove it."""
    with pytest.raises(Stopped):
        take(tiny, tmp_path / "ranges", on_progress=stop_at(6))
    folder = tmp_path / ".ranges.partial"
    assert {path.name for path in folder.iterdir()} == {"layer-0.safetensors", "streams.safetensors"}
    whole = (folder / file).read_bytes()
    (folder / file).write_bytes(whole[:-4])
    with pytest.raises(CalibrationError, match=r"ranges\.partial is damaged \(.*\); remove it"):
        take(tiny, tmp_path / "ranges")
    (folder / file).write_bytes(whole)
    take(tiny, tmp_path / "ranges")


def test_a_file_that_exists_is_kept_unless_forced(tiny: Checkpoint, tmp_path: Path) -> None:
    """Until the new one is whole."""
    out = tmp_path / "ranges"
    out.write_text("mine")
    with pytest.raises(ConfigError, match="exists; give another file, or --force"):
        take(tiny, out)
    with pytest.raises(Stopped):
        take(tiny, out, force=True, on_progress=stop_at(6))
    assert out.read_text() == "mine"
    take(tiny, out, force=True)
    assert read_ranges(out, tiny).tokens == 274
    with pytest.raises(ConfigError, match="exists; give another file"):
        take(tiny, tmp_path, force=True)
    with pytest.raises(ConfigError, match="is not a folder; make it first"):
        take(tiny, tmp_path / "none" / "ranges")


def test_two_runs_do_not_write_one_file(tiny: Checkpoint, tmp_path: Path) -> None:
    """The second is told, and does no harm."""
    (tmp_path / ".ranges.partial").mkdir()
    lock = os.open(tmp_path / ".ranges.partial", os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CalibrationError, match="another run is writing"):
            take(tiny, tmp_path / "ranges")
    finally:
        os.close(lock)
    take(tiny, tmp_path / "ranges")


def test_a_checkpoint_with_holes_ends_the_run(folder: Path, tmp_path: Path) -> None:
    """A value that is no number is the file's fault, not a range."""
    import shutil

    from safetensors.numpy import load_file, save_file

    broken = shutil.copytree(folder, tmp_path / "broken")
    arrays = load_file(broken / "model.safetensors")
    arrays["model.layers.1.mlp.up_proj.weight"][3, 3] = np.nan
    save_file(arrays, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SourceError, match=r"up_proj\.weight' holds NaN or infinity"):
        take(open_checkpoint(broken), tmp_path / "ranges")
    assert not (tmp_path / "ranges").exists()
