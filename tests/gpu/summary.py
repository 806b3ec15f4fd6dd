"""From findings to one summary: what a program wants to know of a run. What was not found is not in it.

It imports nothing of the project at its beginning: there must be a summary also where nothing can be imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from gpu.findings import REFUSED, shorten

__all__ = ["Summary", "broken", "milliseconds", "summarize"]

STATES = {0: "done", REFUSED: "refused", 99: "not begun", 124: "out of time"}  # exit status -> of a step
BROKEN = ("failed", "died")

Summary: TypeAlias = "dict[str, Any]"


def summarize(findings: Sequence[Mapping[str, Any]]) -> Summary:
    """All that was found, by kind.

    gpu: None where there is none. backends: name -> whether it opens, and its release, or why not. agreement, timings,
    predictions: a record each. steps: name -> state (STATES, BROKEN), seconds and, where it was not done, why.
    """
    steps: dict[str, dict[str, Any]] = {}
    facts: dict[str, dict[str, Any]] = {}
    for finding in findings:
        name = finding["step"]
        if "exit" in finding:
            steps[name] = {"state": _state(finding["exit"]), "seconds": finding["seconds"]}
        else:
            _merge(facts.setdefault(name, {}), finding)
    for name, own in facts.items():
        why = own.pop("refused", own.pop("failed", ""))
        if why:
            steps.setdefault(name, {"state": "failed", "seconds": None})["why"] = why
    machine = facts.get("machine", {})
    timings = [own for name, own in facts.items() if name.startswith("times/") and "passes" in own]
    return {
        "gpu": machine.get("device"),
        "machine": machine.get("machine", {}),
        "says": machine.get("says", {}),
        "backends": {
            name.removeprefix("opens/"): {
                **facts.get(name, {}),
                "opens": step["state"] == "done",
                "why": step.get("why", ""),
            }
            for name, step in steps.items()
            if name.startswith("opens/")
        },
        "agreement": [own for name, own in facts.items() if name.startswith("agrees/") and "wrong" in own],
        "timings": timings,
        "predictions": shorten(_predict(timings)) if timings else [],
        "steps": steps,
    }


def broken(summary: Summary) -> bool:
    """Whether a step broke, or a backend disagrees; not whether something cannot be done here, or took too long."""
    steps, agreement = summary["steps"].values(), summary["agreement"]
    return any(step["state"] in BROKEN for step in steps) or any(one["wrong"] for one in agreement)


def milliseconds(timing: Mapping[str, Any]) -> dict[int, float]:
    """Tokens in a pass, logits of all rows wanted -> median."""
    return {int(size): timed["ms"] for size, timed in timing["passes"].items()}


def _state(status: int) -> str:
    return STATES.get(status, "died" if status > 128 else "failed")


def _merge(facts: dict[str, Any], finding: Mapping[str, Any]) -> None:
    """A step's findings as one record; its passes by their sizes."""
    if "a_pass" in finding:
        kind = "passes" if finding["rows"] == finding["size"] else "one_row"
        facts.setdefault(kind, {})[str(finding["size"])] = finding["a_pass"]
    else:
        facts |= {key: value for key, value in finding.items() if key != "step"}


def _predict(timings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each pair of shapes whose models were timed on one backend in one precision."""
    from gpu.shapes import PAIRS

    by_shape = {(one["backend"], one["asked"], one["shape"]): one for one in timings}
    found = []
    for backend, asked in dict.fromkeys((one["backend"], one["asked"]) for one in timings):
        for names in PAIRS:
            target, draft = (by_shape.get((backend, asked, name), {}) for name in names)
            if "drafted" in draft and "passes" in target:
                own = _predict_pair(milliseconds(target), draft["drafted"]["ms"])
                if own:
                    about = {"backend": backend, "asked": asked, "target": names[0], "draft": names[1]}
                    found.append(about | own)
    return found


def _predict_pair(passes: Mapping[int, float], draft_ms: float) -> dict[str, Any]:
    """Unit costs and speeds by acceptance; {} where too few passes were timed."""
    from gpu.prediction import ACCEPTANCES, SEGMENT, best_exact, measured_costs, segments

    if not {1, SEGMENT + 1} <= passes.keys():
        return {}
    costs = measured_costs(passes, draft_ms, SEGMENT)
    exact = {share: best_exact(passes, draft_ms, share) for share in ACCEPTANCES}
    return {
        "c": costs.draft,
        "k": costs.row,
        "exact": {str(share): {"speed": speed, "drafted": n} for share, (speed, n) in exact.items()},
        "segments": {str(share): segments(passes, draft_ms, share) for share in ACCEPTANCES},
    }
