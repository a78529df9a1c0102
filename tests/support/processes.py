"""Small programs in processes of their own, with the environment a case needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
SCRIPTS = SUPPORT / "scripts"
PYTHONPATH = (str(ROOT), str(TESTS), str(SUPPORT))  # for programs that use the tests' modules


def environment(**changes: str | None) -> dict[str, str]:
    """This process's environment with changes; None removes a variable. NUMBA_CACHE_DIR is the
    session's own."""
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(PYTHONPATH), PYTHONDONTWRITEBYTECODE="1")
    for name, value in changes.items():
        env.pop(name, None)
        if value is not None:
            env[name] = value
    return env


def start(script: str, *arguments: Any, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-X", "faulthandler", str(SCRIPTS / script), *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=env or environment(), **(pipes | options))


def finish(process: subprocess.Popen[str], timeout: float = 180.0) -> str:
    """Output of the process; an exit status other than 0 fails the test with it."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        tail = (err or "")[-4000:]
        raise AssertionError(f"no end after {timeout} s\n{out}\n{tail}") from None
    tail = (err or "")[-4000:]
    assert process.returncode == 0, f"exit status {process.returncode}\n{out}\n{tail}"
    return out


def run_script(script: str, *arguments: Any, env: dict[str, str] | None = None, **options: Any) -> str:
    return finish(start(script, *arguments, env=env, **options))
