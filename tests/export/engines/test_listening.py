"""A compiler's phases as one bar, its messages as one line."""

from __future__ import annotations

import pytest

from semspec.export.engines.listening import STEPS, Messages, Phases
from semspec.runtime.errors import BackendError


def test_nested_phases_are_one_bar_that_never_goes_back() -> None:
    """Engines tell phases inside phases, each counting from 0; a bar that jumps back is no progress."""
    shown: list[tuple[int, int]] = []
    phases = Phases(lambda done, total: shown.append((done, total)))
    phases.start("Building", None, 2)
    for step, inner in enumerate(("Parsing", "Timing")):
        phases.start(inner, "Building", 4)
        for done in range(4):
            phases.step(inner, done)
        phases.finish(inner)
        phases.step("Building", step)
    assert [done for done, _ in shown] == [125, 250, 375, 500, 625, 750, 875, 1000]
    assert {total for _, total in shown} == {STEPS}


def test_steps_of_unknown_phases_are_no_fault() -> None:
    """A release may tell of a phase that it never started, or of more steps than it said."""
    phases = Phases(None)
    phases.step("Unheard of", 3)
    phases.finish("Unheard of")
    phases.start("Building", None, 0)
    phases.step("Building", 9)


def test_unused_inputs_are_refused() -> None:
    """The first silent trap: the parser drops what reads an input, and a warning is all that is said."""
    messages = Messages(said=[("WARNING", "importer.cpp:10: Unused Input: nonpad_kv_seqlen")])
    with pytest.raises(BackendError, match=r"does not use an input of g\.onnx .*nonpad_kv_seqlen"):
        messages.refuse_unused("g.onnx")
    Messages(said=[("WARNING", "Make sure input span has Int64 binding.")]).refuse_unused("g.onnx")


def test_messages_are_one_short_line() -> None:
    """Compilers write paragraphs, and sometimes nothing."""
    assert Messages.line("a\n  b") == "a b"
    assert Messages.line("") == "it gave no reason"
    assert len(Messages.line("word " * 1000)) == 400
