"""Precisions of the graphs for TensorRT: what a name that the user writes means for weights, inputs and activations.

It knows no tensors and no engine; which device can run which is told in engines.py. What a matrix becomes is
qdq_weights.py's, what its product becomes dialects/explicit.py's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from semspec.export.quantize import BLOCK_SIZES
from semspec.runtime.errors import ConfigError

__all__ = ["DEFAULTS", "PLAIN", "PRECISIONS", "Precision", "parse_precision"]

PLAIN = "plain"
WIDE = "+bf16"  # behind the name of a quantized precision: activations whose range is that of fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """activation: dtype of everything between the products, of the cache and of plain weights. weights: storage of the
    linears of the layers; head: of the head, and of the embedding, which may be the same matrix: `plain`, `int8`,
    `int4`, `fp8`, `fp4`. inputs: what a product of the layers rounds its input to first, by a scale that was measured;
    empty: nothing. gated: onnxruntime can run it on a CPU; what it cannot run is judged by what it stands for."""

    name: str
    activation: str = "float16"
    weights: str = PLAIN
    inputs: str = ""
    head: str = "int8"
    gated: bool = True

    @property
    def suffix(self) -> str:
        """What stands behind its name: WIDE or nothing."""
        return WIDE if self.weights != PLAIN and self.activation == "bfloat16" else ""

    @property
    def widened(self) -> str:
        """Name of what is nearest to it and holds larger activations than fp16."""
        return self.name + WIDE if self.weights != PLAIN else "bf16"

    @property
    def needs_ranges(self) -> bool:
        """Whether it rests on how large the inputs of the linears become."""
        return bool(self.inputs)

    @property
    def reads_ranges(self) -> bool:
        """Whether it is better for knowing."""
        return self.needs_ranges or self.weights == "int4"


PRECISIONS: Mapping[str, Precision] = {
    row.name: row
    for row in (
        Precision(name="fp32", activation="float32", head=PLAIN),
        Precision(name="fp16", head=PLAIN),
        Precision(name="bf16", activation="bfloat16", head=PLAIN, gated=False),
        Precision(name="int8", weights="int8"),
        Precision(name="int8-w8a8", weights="int8", inputs="int8"),
        Precision(name="int4", weights="int4"),
        Precision(name="fp8", weights="fp8", inputs="fp8"),
        Precision(name="nvfp4", weights="fp4", inputs="fp4", gated=False),
    )
}

# precision of the CPU graph's layers -> of the others', where nothing else was said
DEFAULTS: Mapping[str, str] = {"fp32": "fp16", "int8": "int8", "int4": "int4"}


def parse_precision(text: str) -> tuple[Precision, int | None]:
    """A precision, and the block size behind its name (`int4/64`) or None. `+bf16` behind a quantized one: activations
    in bf16. Raises ConfigError for unknown ones."""
    bare, plus, activation = text.partition("+")
    name, slash, own = bare.partition("/")
    if name not in PRECISIONS:
        raise ConfigError(
            f"engine precision must be one of {', '.join(PRECISIONS)}, or int4 with its block size such as int4/64, "
            f"got {text!r}"
        )
    if slash and (name != "int4" or own not in map(str, BLOCK_SIZES)):
        raise ConfigError(
            f"engine precision {text!r}: only int4 has a block size, one of {', '.join(map(str, BLOCK_SIZES))}"
        )
    precision = PRECISIONS[name]
    if plus:
        if activation != "bf16" or precision.weights == PLAIN:
            raise ConfigError(
                f"engine precision {text!r}: only a quantized one may be followed by {WIDE}, as in int4{WIDE}: "
                "activations in bf16 where fp16 does not hold them"
            )
        precision = replace(precision, activation="bfloat16", gated=False)
    return precision, int(own) if slash else None
