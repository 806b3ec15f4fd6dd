"""What a run says of its machine."""

from __future__ import annotations

import json
import platform
import socket

from semspec.calibration.bench.machine import describe_machine


def test_facts_are_stable_and_plain() -> None:
    """A run is resumed where they are equal, so they must not change by themselves."""
    facts = describe_machine()
    assert facts == describe_machine() == json.loads(json.dumps(facts))
    assert facts["python"] == platform.python_version() and facts["numpy"] and facts["processor"]


def test_no_name_of_the_host_is_told() -> None:
    """Reports are shown around."""
    assert socket.gethostname() not in describe_machine().values()
