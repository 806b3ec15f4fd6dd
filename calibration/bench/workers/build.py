"""genai's builder, run as it is: `python -m semspec.calibration.bench.workers.build ARGUMENTS OF THE BUILDER`.

Where it succeeds, the most memory that the process held, in MiB, is written to the file PEAK in the current folder.

Builder 0.18 imports two classes of transformers 5 for models that it is not asked for here. Where an older
transformers lacks them their names are filled in, so that one environment serves genai and everything else.
"""

from __future__ import annotations

import runpy
from pathlib import Path

from semspec.runtime.stats import peak_mib

__all__ = ["PEAK", "main"]

PEAK = "peak_mib"
NEWER = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")


def main() -> None:
    """Entry point; ends as the builder ends."""
    import transformers

    folder = Path.cwd()
    for name in NEWER:
        if not hasattr(transformers, name):
            setattr(transformers, name, None)
    runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__")
    (folder / PEAK).write_text(str(peak_mib()), encoding="ascii")


if __name__ == "__main__":
    main()
