"""One graph of a model without the rest of a bundle (no tokenizer, no manifest, no gate), and transformers' answer.

Every session has one thread: the suite runs in several processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny import tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_utils import no_init_weights

from semspec.export.checkpoint import Checkpoint, open_checkpoint
from semspec.export.dialects.ort import build_ort_graph
from semspec.export.packing import PackedWeights, Schemes
from semspec.export.writer import WeightFile
from semspec.models.families import read_spec
from semspec.models.ops import Weights
from semspec.models.spec import ModelSpec
from semspec.runtime.backends import open_backend
from semspec.runtime.contract import GraphSpec
from semspec.runtime.model import CachedModel
from semspec.runtime.records import Floats

ACTIVATIONS = {"cpu": "float32", "cuda": "float16"}

ROPES: Mapping[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 8.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32},
}

# At range 0.4 transformers' own fp32 results are 2e-4 from its fp64 ones. At 0.3, with this seed, rounding stays
# below 5e-5, and every model below writes at least 21 distinct ids in 40 greedy ones.
RANGE, SEED = 0.3, 606


def _variant(family: str, rope: str, tied: bool) -> tuple[str, dict[str, Any]]:
    changes: dict[str, Any] = {"rope_scaling": ROPES[rope], "tie_word_embeddings": tied}
    if family == "llama":  # qwen2 has its biases always
        biases = tied == (rope in ("default", "llama3"))
        changes |= {"attention_bias": biases, "mlp_bias": biases}
    return family, {"initializer_range": RANGE, **changes}


# Every family with every rotary scaling, tied and untied, llama with and without biases.
VARIANTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    f"{family}-{rope}-{'tied' if tied else 'untied'}": _variant(family, rope, tied)
    for family in ("llama", "qwen2")
    for rope in ROPES
    for tied in (False, True)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A graph file with its weights beside it."""

    path: Path
    spec: GraphSpec

    def open(self) -> CachedModel:
        """The graph on ONNX Runtime's CPU provider, with an empty cache."""
        return CachedModel(open_backend("cpu", threads=1), self.path, self.spec)


@dataclass(frozen=True, slots=True)
class ArrayWeights:
    """Weights that are there already: checkpoint name -> array."""

    arrays: Mapping[str, Floats]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.arrays[name].shape

    def read(self, name: str, rows: slice | None = None) -> Floats:
        return self.arrays[name][slice(None) if rows is None else rows].copy()


def tiny_variant(name: str, **changes: Any) -> tuple[PreTrainedModel, ModelSpec, ArrayWeights]:
    """A model of VARIANTS, changed if wished, with what our side reads of it."""
    family, settings = VARIANTS[name]
    model = tiny_model(family, SEED, **{**settings, **changes})
    arrays = {name: values.detach().numpy() for name, values in model.named_parameters()}
    return model, read_spec(model.config.to_dict()), ArrayWeights(arrays)


def build_graph(
    folder: Path,
    weights: Weights,
    spec: ModelSpec,
    *,
    graph: str = "cpu",
    schemes: Schemes | None = None,
    max_context: int = 255,
    pooled_layers: tuple[int, ...] | None = None,
    hidden_layers: tuple[int, ...] = (),
) -> Graph:
    """Write graph and weights into `folder`, which is made; fp32 weights unless `schemes` says otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    graph_spec = GraphSpec(
        graph=graph,
        n_layers=spec.n_layers,
        n_kv_heads=spec.n_kv_heads,
        head_size=spec.head_size,
        width=spec.width,
        vocab_size=spec.vocab_size,
        max_context=max_context,
        pooled_layers=spec.default_pooled_layers() if pooled_layers is None else pooled_layers,
        hidden_layers=hidden_layers,
        activation=ACTIVATIONS[graph],
        cache=ACTIVATIONS[graph],
    )
    schemes = schemes or Schemes.choose("fp32")
    with WeightFile(folder / "weights.data") as file:
        packed = PackedWeights(weights, file, schemes.quantizer, (ACTIVATIONS[graph],))
        build_ort_graph(spec, graph_spec, schemes, packed).save(folder / f"{graph}.onnx", {"graph": graph})
    return Graph(path=folder / f"{graph}.onnx", spec=graph_spec)


def export_graph(folder: Path, checkpoint: Path, **options: Any) -> Graph:
    """`build_graph` from a folder of safetensors or a GGUF file."""
    opened = open_checkpoint(checkpoint)
    return build_graph(folder, opened, opened.spec, **options)


def rebuild(checkpoint: Checkpoint) -> PreTrainedModel:
    """The transformers model of a checkpoint's configuration and (de-quantized) weights, none left as initialized."""
    settings = dict(checkpoint.config)
    if settings.get("rope_scaling", {}).get("rope_type") == "factors":
        settings.pop("rope_scaling")  # a form of our own
    with no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    weights = {name: torch.from_numpy(checkpoint.read(name)) for name in checkpoint.names()}
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if checkpoint.spec.tied else set())
    return model.eval()


def truth(model: PreTrainedModel, ids: Sequence[int]) -> tuple[Floats, Floats]:
    """transformers' logits (S, V) and states (L + 1, S, E) of one text, in fp32."""
    with torch.no_grad():
        found = model(torch.tensor([list(ids)]), output_hidden_states=True)
    return found.logits[0].numpy(), np.stack([state[0].numpy() for state in found.hidden_states])


def cut(n: int, sizes: Sequence[int]) -> list[slice]:
    """Slices that cut n tokens into pieces of `sizes`, repeated as long as needed.

    >>> cut(5, [2, 1])
    [slice(0, 2, None), slice(2, 3, None), slice(3, 5, None)]
    """
    pieces: list[slice] = []
    at = 0
    while at < n:
        size = min(sizes[len(pieces) % len(sizes)], n - at)
        pieces.append(slice(at, at + size))
        at += size
    return pieces


def read_in_pieces(
    model: CachedModel, ids: Sequence[int], pieces: Sequence[slice], hidden: Sequence[int] = ()
) -> tuple[Floats, dict[int, Floats]]:
    """Logits (S, V) and states of every row, read piece by piece after what the model remembers."""
    logits, states = [], []
    for piece in pieces:
        chunk = ids[piece]
        found = model.forward(chunk, rows=range(len(chunk)), hidden=hidden)
        logits.append(found.logits.copy())
        states.append({index: state.copy() for index, state in found.hidden.items()})
    joined = {index: np.concatenate([part[index] for part in states]) for index in hidden}
    return np.concatenate(logits), joined
