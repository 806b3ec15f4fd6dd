"""Networks over a layer's states: `mlp2` and `mlp4`, the published sizes of probes, in torch on the CPU.

Stopped early by questions that they do not learn from. The same inputs and seed give the same weights on one machine
with as many threads. It knows coordinates (train.Basis) and labels; what else is held out is the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from semspec.calibration.equivalence import Bools
from semspec.export.probe_graph import Dense
from semspec.runtime.records import Array, Floats, Ints

if TYPE_CHECKING:
    import torch

__all__ = ["SIZES", "fit_network", "network_logits"]

SIZES = {"mlp2": (256,), "mlp4": (1024, 512, 256)}
"""Hidden widths; mlp4 is the published one, for states below 4,096 wide."""

DROPOUT = 0.3
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 1e-2
BATCH = 256
MOST_EPOCHS = 25
PATIENCE = 3
FOR_STOPPING = 0.15  # of the questions


def fit_network(
    x: Floats,
    labels: Array,
    weights: Array,
    questions: Ints,
    size: str,
    *,
    seed: int,
    squared: bool = False,
) -> tuple[Dense, ...]:
    """x: (m, D). labels, weights, questions: (m,). size: one of SIZES. squared: least squares of the score, as
    published, instead of cross-entropy."""
    import torch

    rng = np.random.default_rng(seed)
    learned, stopping = _split(questions, rng)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _build(x.shape[1], SIZES[size], float(np.average(labels, weights=weights)))
        data = [torch.from_numpy(np.ascontiguousarray(part, np.float32)) for part in (x, labels, weights)]
        _descend(model, data, learned, stopping, rng, squared)
    return tuple(
        Dense(weight=layer.weight.detach().numpy().copy(), bias=layer.bias.detach().numpy().copy())
        for layer in model
        if isinstance(layer, torch.nn.Linear)
    )


def network_logits(layers: Sequence[Dense], x: Floats) -> Array:
    """(m,) float64 of x (m, D)."""
    for place, layer in enumerate(layers):
        x = (np.maximum(x, 0) if place else x) @ layer.weight.T + layer.bias
    return x[:, 0].astype(np.float64)


def _split(questions: Ints, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Row numbers to learn from and to stop by; a question at least on either side, all on both where there is one."""
    known = rng.permutation(np.unique(questions))
    n = max(1, round(FOR_STOPPING * len(known)))
    stopping: Bools = np.isin(questions, known[:n])
    learned = ~stopping if len(known) > 1 else stopping
    return np.flatnonzero(learned), np.flatnonzero(stopping)


def _build(width: int, hidden: Sequence[int], mean: float) -> torch.nn.Sequential:
    import torch

    layers: list[torch.nn.Module] = []
    for out in hidden:
        layers += [torch.nn.Linear(width, out), torch.nn.ReLU(), torch.nn.Dropout(DROPOUT)]
        width = out
    last = torch.nn.Linear(width, 1)
    mean = min(max(mean, 0.01), 0.99)
    torch.nn.init.constant_(last.bias, float(np.log(mean / (1 - mean))))
    return torch.nn.Sequential(*layers, last)


def _descend(
    model: torch.nn.Sequential,
    data: Sequence[torch.Tensor],
    learned: Ints,
    stopping: Ints,
    rng: np.random.Generator,
    squared: bool,
) -> None:
    """Leaves the weights of the best epoch; the first counts as one, so a network may stay as it began."""
    import torch

    def loss_of(rows: Ints) -> torch.Tensor:
        x, labels, weights = (part[torch.from_numpy(rows)] for part in data)
        logits = model(x)[:, 0]
        if squared:
            losses = (torch.sigmoid(logits) - labels) ** 2
        else:
            losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        return (losses * weights).sum() / weights.sum()

    def stopping_loss() -> float:
        model.eval()
        with torch.no_grad():
            found = float(loss_of(stopping))
        model.train()
        return found

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    best, waited = stopping_loss(), 0
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(MOST_EPOCHS):
        order = rng.permutation(learned)
        for start in range(0, len(order), BATCH):
            optimizer.zero_grad()
            loss_of(order[start : start + BATCH]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        reached, waited = stopping_loss(), waited + 1
        if reached < best:
            best, waited = reached, 0
            kept = [parameter.detach().clone() for parameter in model.parameters()]
        if waited >= PATIENCE:
            break
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), kept, strict=True):
            parameter.copy_(value)
