"""Measure export and plain decoding of the three real models on this machine: `make bench`.

For each model: seconds and peak memory of the export (its own process), size, the gate's figures, then plain
decoding repeated: median tokens/s with the smallest and largest, and the share of wall time spent outside the
engine's passes, greedy and at T = 0.6, top-p 0.95. Prints a table for people and, last, one JSON line for programs.

Not a comparison: a speed means something beside another one measured in the same run on the same machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from semspec import LLM, SamplingParams, SpecConfig
from semspec.runtime.backends.base import Session, Tensor
from semspec.runtime.records import Array

RECIPES = {"SmolLM2-135M": "smollm2-135m", "Coder-0.5B": "qwen2.5-coder-0.5b", "Coder-1.5B": "qwen2.5-coder"}
PROMPT = "Explain, step by step, how to add two fractions with different denominators."
GREEDY = SamplingParams(max_tokens=64, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=64, ignore_eos=True, temperature=0.6, top_p=0.95, seed=0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=RECIPES, default=list(RECIPES))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(name, Path(folder), options.repeats) for name in options.models]
    print(
        f"\n{'model':<13}{'export s':>9}{'gate s':>8}{'peak MiB':>10}{'MiB':>8}{'KL':>8}{'top-1':>7}", end=""
    )
    print(f"{'tokens/s (min-max)':>24}{'outside, greedy':>17}{'sampled':>9}")
    for row in rows:
        print(
            f"{row['model']:<13}{row['export_s']:>9.1f}{row['gate_s']:>8.1f}{row['peak_mib']:>10}"
            f"{row['weights_mib']:>8.0f}{row['kl']:>8.3f}{row['top1']:>7.3f}"
            f"{row['greedy']['median']:>10.1f} ({row['greedy']['min']:.1f}-{row['greedy']['max']:.1f})"
            f"{row['greedy']['outside']:>15.1%}{row['sampled']['outside']:>10.1%}"
        )
    print(json.dumps(rows))


def measure(name: str, folder: Path, repeats: int) -> dict[str, Any]:
    """Export one model in a process of its own, then decode with it here."""
    out = folder / name
    fetch = [sys.executable, "-c", "from semspec.cli import main; main()", "fetch", RECIPES[name]]
    subprocess.run(fetch, check=True, stdout=subprocess.DEVNULL)
    command = [sys.executable, "-c", "from semspec.cli import export_main; export_main()"]
    command += ["--target", RECIPES[name], "--out", str(out), "--json"]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    report = json.loads(printed.splitlines()[-1])
    target = report["models"]["target"]
    with LLM(out, spec=SpecConfig(mode="autoregressive")) as llm:
        llm.target._session = TimedSession(llm.target._session)
        llm.generate(PROMPT, GREEDY)  # the first pass reads the weights from disk
        greedy, sampled = decode(llm, GREEDY, repeats), decode(llm, SAMPLED, repeats)
    return {
        "model": name,
        "export_s": target["export_s"],
        "gate_s": target["verify_s"],
        "peak_mib": report["peak_mib"],
        "weights_mib": target["weights_bytes"] / 2**20,
        "kl": target["quality"]["kl"],
        "top1": target["quality"]["top1"],
        "greedy": greedy,
        "sampled": sampled,
    }


class TimedSession:
    """A session that adds up the seconds of its passes."""

    def __init__(self, session: Session) -> None:
        self.session, self.seconds = session, 0.0

    def run(self, feeds: Mapping[str, Array], fetch: Sequence[str]) -> dict[str, Tensor]:
        started = time.perf_counter()
        found = self.session.run(feeds, fetch)
        self.seconds += time.perf_counter() - started
        return found

    def close(self) -> None:
        self.session.close()


def decode(llm: LLM, params: SamplingParams, repeats: int) -> dict[str, float]:
    """Tokens/s after the first token, and the share of wall time outside the engine's passes."""
    session = llm.target._session
    speeds, outside = [], []
    for _ in range(repeats):
        llm.target.rewind(0)
        session.seconds, started = 0.0, time.perf_counter()
        stats = llm.generate(PROMPT, params).stats
        wall = time.perf_counter() - started
        speeds.append(1000 / stats.tpot_ms)
        outside.append(1 - session.seconds / wall)
    return {
        "median": statistics.median(speeds),
        "min": min(speeds),
        "max": max(speeds),
        "outside": statistics.median(outside),
    }


if __name__ == "__main__":
    main()
