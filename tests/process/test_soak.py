"""The soak's short form; tests/support/soak.py says how to run the long one."""

from __future__ import annotations

import sys

import pytest
from faults import fault
from processes import SUPPORT, environment, finish
from soak import Soak


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_soak() -> None:
    """Ten seconds: no wrong bit, resident memory flat."""
    import subprocess

    with fault("soak"):
        command = [sys.executable, "-X", "faulthandler", str(SUPPORT / "soak.py"), "--minutes", str(10 / 60)]
        command += ["--distinct", "50"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        output = finish(subprocess.Popen(command, env=environment(), **pipes))
        assert int(output.split()[0]) > 50, output


def test_soak_notices_growth_and_errors() -> None:
    soak = Soak(0.0, rss=[100.0] * 10 + [200.0] * 10 + [300.0] * 10)
    assert "100.0 MB" in soak.verdict
    soak.rss = [100.0, 200.0] * 15
    assert soak.verdict == ""
    soak.errors.append("seed 3: wrong")
    assert soak.verdict == "seed 3: wrong"
