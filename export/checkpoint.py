"""Checkpoints: name -> fp32 array, read lazily, whatever file format the weights are in.

Knows which tensors a decoder needs and checks them all before the first is used. Does not know containers
(safetensors_file.py, gguf.py). Names are transformers' names; configurations have the keys of its
config.json. Nothing of a model folder is executed, and nothing outside it is opened.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from semspec.export.gguf_weights import open_gguf_weights
from semspec.export.rows import Rows, StoredTensor, quoted, read_rows, reading
from semspec.export.safetensors_file import find_weights, read_folder_json
from semspec.models.decoder import EMBEDDING, HEAD
from semspec.models.families import read_spec
from semspec.models.ops import Weights
from semspec.models.spec import ModelSpec
from semspec.runtime.errors import SourceError
from semspec.runtime.records import Floats

__all__ = ["Checkpoint", "expected_tensors", "open_checkpoint"]

_log = logging.getLogger(__name__)

# Buffers that old versions of transformers saved among the weights; the decoder computes both itself.
_OLD_BUFFERS = (".rotary_emb.inv_freq", ".masked_bias")

_BLOCK_BYTES = 1 << 24


class Checkpoint(Weights, Protocol):
    """A complete model: every tensor that `spec` needs is there with the right shape.

    config: keys as in a transformers config.json; tie_word_embeddings is what the weights say.
    """

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> Mapping[str, Any]: ...

    @property
    def spec(self) -> ModelSpec: ...

    def names(self) -> frozenset[str]:
        """The names of expected_tensors(spec): a tied head has none of its own."""

    def shape(self, name: str) -> tuple[int, ...]:
        """(rows, columns) of a matrix, (n,) of a norm or bias. Raises KeyError for a name not in names()."""

    def read(self, name: str, rows: slice | None = None) -> Floats:
        """fp32 rows of a matrix (n, columns) or elements of a vector (n,). Threads may call it at once.

        Holds nothing after it returns. Raises SourceError: the file changed, a value is NaN or infinite.
        """

    def steps(self, name: str, bits: int, rows: slice | None = None) -> Floats | None:
        """What the rows' numbers are whole multiples of, by blocks of 32, (n, columns / 32); at most 2^bits of them.

        None where the file does not say so: GGUF's Q8_0, Q5_0 and Q4_0 do. Raises as read.
        """

    def sha256(self) -> str:
        """Of the weights file; of several: of their own digests, a line each, in order of file name."""


class _Container(Protocol):
    """What a container gives: a configuration and located tensors, unchecked."""

    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...
    @property
    def paths(self) -> tuple[Path, ...]: ...
    def read(self, name: str, spec: ModelSpec, rows: Rows) -> Floats: ...
    def steps(self, name: str, spec: ModelSpec, bits: int, rows: Rows) -> Floats | None: ...


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a folder of safetensors or a GGUF file, and check it completely.

    Raises SourceError: nothing there, an unsupported or already quantized model, missing, misshapen or
    unknown tensors (the first few are named), and what the readers raise.
    """
    weights = _open_weights(path)
    spec = _read_spec(path, weights)
    _check(path, weights.tensors, spec)
    config = {**weights.config, "tie_word_embeddings": spec.tied}
    return _Opened(
        path=path,
        config=MappingProxyType(config),
        spec=spec,
        shapes=MappingProxyType(expected_tensors(spec)),
        weights=weights,
    )


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight the decoder needs, in the order it needs them."""
    width, query, kv, ffn = spec.width, spec.query_width, spec.kv_width, spec.ffn_width
    linears = (  # name, rows, columns, has a bias
        ("self_attn.q_proj", query, width, spec.qkv_bias),
        ("self_attn.k_proj", kv, width, spec.qkv_bias),
        ("self_attn.v_proj", kv, width, spec.qkv_bias),
        ("self_attn.o_proj", width, query, spec.output_bias),
        ("mlp.gate_proj", ffn, width, spec.mlp_bias),
        ("mlp.up_proj", ffn, width, spec.mlp_bias),
        ("mlp.down_proj", width, ffn, spec.mlp_bias),
    )
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, width)}
    for layer in (f"model.layers.{i}" for i in range(spec.n_layers)):
        shapes[f"{layer}.input_layernorm.weight"] = (width,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (width,)
        for name, rows, columns, has_bias in linears:
            shapes[f"{layer}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{layer}.{name}.bias"] = (rows,)
    shapes["model.norm.weight"] = (width,)
    if not spec.tied:
        shapes[HEAD] = (spec.vocab_size, width)
    return shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """The one Checkpoint: a checked specification over the weights of a container."""

    path: Path
    config: Mapping[str, Any]
    spec: ModelSpec
    shapes: Mapping[str, tuple[int, ...]]
    weights: _Container
    digest: list[str] = field(default_factory=list)  # filled by the first sha256()

    def names(self) -> frozenset[str]:
        return frozenset(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def read(self, name: str, rows: slice | None = None) -> Floats:
        if name not in self.shapes:
            raise KeyError(name)
        return self.weights.read(name, self.spec, rows)

    def steps(self, name: str, bits: int, rows: slice | None = None) -> Floats | None:
        return self.weights.steps(name, self.spec, bits, rows)

    def sha256(self) -> str:
        if not self.digest:
            self.digest.append(_sha256(self.weights.paths))
        return self.digest[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _SafetensorsWeights:
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    paths: tuple[Path, ...]

    def read(self, name: str, spec: ModelSpec, rows: Rows) -> Floats:
        return read_rows(self.tensors[name], rows)

    def steps(self, name: str, spec: ModelSpec, bits: int, rows: Rows) -> Floats | None:
        return None


def _open_weights(path: Path) -> _Container:
    if path.is_dir():
        if not (path / "config.json").exists():
            find_weights(path)  # where the weights are missing too, this says what the folder is
        config = read_folder_json(path, "config.json")
        _supported(path, config)  # before any weights, so that GPTQ is named as such
        if "auto_map" in config:
            _log.warning("%s: config.json names Python code (auto_map); it is never run", path)
        tensors, paths = find_weights(path)
        return _SafetensorsWeights(config=config, tensors=tensors, paths=paths)
    if not path.exists():
        raise SourceError(f"{path}: no such file or folder")
    if path.suffix == ".safetensors":
        raise SourceError(f"{path}: give the folder that also holds config.json, not the weights file alone")
    return open_gguf_weights(path)


def _supported(path: Path, config: Mapping[str, Any]) -> ModelSpec:
    """The specification, or one line with the path. A config.json may hold anything under any key."""
    try:
        return read_spec(config)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise SourceError(f"{path}: {error}") from error


def _read_spec(path: Path, weights: _Container) -> ModelSpec:
    """The specification, `tied` decided by the tensors: a head that is absent, or equal, is the embedding."""
    embedding, head = weights.tensors.get(EMBEDDING), weights.tensors.get(HEAD)
    tied = head is None or (embedding is not None and _same_bytes(embedding, head))
    flag = weights.config.get("tie_word_embeddings")
    if flag is not None and bool(flag) != tied:
        found = "has no head of its own" if head is None else f"has {'an equal' if tied else 'its own'} head"
        _log.warning("%s: tie_word_embeddings is %s, but the checkpoint %s; it is used so", path, flag, found)
    return _supported(path, {**weights.config, "tie_word_embeddings": tied})


def _same_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors are stored alike, bit by bit; stops at the first block that differs."""
    if (one.shape, one.type, one.n_bytes) != (other.shape, other.type, other.n_bytes):
        return False
    with reading(one.path), one.path.open("rb") as left, other.path.open("rb") as right:
        left.seek(one.offset)
        right.seek(other.offset)
        for done in range(0, one.n_bytes, _BLOCK_BYTES):
            size = min(_BLOCK_BYTES, one.n_bytes - done)
            if left.read(size) != right.read(size):
                return False
    return True


def _check(path: Path, tensors: Mapping[str, StoredTensor], spec: ModelSpec) -> None:
    """Every needed tensor is there with its shape, and nothing else is."""
    if spec.n_layers > len(tensors):  # also keeps a crafted number of layers from filling the memory
        raise SourceError(
            f"{path}: the configuration names {spec.n_layers} layers, but there are {len(tensors)} tensors"
        )
    expected = expected_tensors(spec)
    problems = [f"{name} is missing" for name in expected if name not in tensors]
    for name, shape in expected.items():
        if name in tensors and tensors[name].shape != shape:
            problems.append(f"{name} has shape {list(tensors[name].shape)}, expected {list(shape)}")
    spare = (HEAD,) if spec.tied else ()
    for name in tensors:
        if name not in expected and name not in spare and not name.endswith(_OLD_BUFFERS):
            problems.append(f"{quoted(name)} is unknown to family {spec.family}")
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise SourceError(f"{path}: {'; '.join(problems[:3])}{more}")


def _sha256(paths: tuple[Path, ...]) -> str:
    digests = []  # kept apart from names: in a hub cache the files have others
    for path in paths:
        digest = hashlib.sha256()
        with reading(path), path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        digests.append(digest.hexdigest())
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(f"{digest}\n" for digest in digests).encode()).hexdigest()
