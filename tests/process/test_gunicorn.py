"""gunicorn with preload and threads, hammered while its workers are killed and replaced.

The long form: `NUMBA_PREFIX_GUNICORN_SECONDS=1200 python -m pytest tests/process/test_gunicorn.py
-s`.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from faults import fault
from layers import LAYERS, under
from processes import SCRIPTS, SUPPORT

pytestmark = pytest.mark.skipif(
    sys.platform == "win32" or importlib.util.find_spec("gunicorn") is None, reason="needs gunicorn"
)
CLIENTS, WORKERS = 4, 2
SECONDS = float(os.environ.get("NUMBA_PREFIX_GUNICORN_SECONDS", "3"))
MOST_REQUESTS = int(SECONDS * 1000)  # of each client
# What gunicorn says of a worker that ended by itself in another way than it was asked to.
SIGNALLED = re.compile(r"Worker \(pid:(\d+)\) was sent (\w+)!")
FAILED = re.compile(
    r".*(?:exited with code|WORKER TIMEOUT|Exception|Error handling request|Traceback|failed to boot).*"
)


@dataclass
class Load:
    """What the clients have seen."""

    answers: list[bytes]
    right: int = 0
    broken: int = 0  # connections that ended without an answer
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def client(self, port: int, seed: int, end: float) -> None:
        rng, done = random.Random(seed), 0
        while done < MOST_REQUESTS and time.monotonic() < end:
            number, threads = rng.randrange(len(self.answers)), rng.randrange(1, 4)
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            try:
                connection.request("GET", f"/{number}/{threads}")
                response = connection.getresponse()
                body = response.read()
            except (OSError, http.client.HTTPException):
                with self.lock:
                    self.broken += 1
                time.sleep(0.05)
                continue
            finally:
                connection.close()
            done += 1
            with self.lock:
                if response.status == 200 and body == self.answers[number]:
                    self.right += 1
                else:
                    self.wrong.append(f"/{number}/{threads}: status {response.status}, {len(body)} bytes")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def server(port: int, log: Path, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    options = {"bind": f"127.0.0.1:{port}", "workers": WORKERS, "threads": 4, "timeout": 20, "graceful-timeout": 10}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", "gunicorn", "--preload", "--worker-class=gthread", *arguments]
            + ["--config=/dev/null", f"--pythonpath={SCRIPTS},{SUPPORT}", "wsgi_app:application"],
            env=env, stdout=file, stderr=subprocess.STDOUT, cwd=log.parent,
        )  # fmt: skip
    try:
        wait_until_listening(process, port, log)
        yield process
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def wait_until_listening(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def workers_of(master: int) -> list[int]:
    """Its children: only workers, as it starts nothing else."""
    children = Path(f"/proc/{master}/task/{master}/children").read_text().split()
    return [int(pid) for pid in children]


def disturb(master: int, log: Path, stop: threading.Event, killed: dict[int, str], counts: dict[str, int]) -> None:
    """Every 0.3 s: SIGKILL to a worker, SIGHUP to the master (which replaces all workers), or
    SIGTERM to a worker.

    A SIGHUP waits for the one before: the master queues them, and on a busy machine would be asked
    to end behind dozens.
    """
    for name in ("SIGKILL", "SIGHUP", "SIGKILL", "SIGTERM") * 1000:
        if stop.wait(0.3):
            return
        if name == "SIGHUP" and log.read_text().count("Handling signal: hup") < counts.get(name, 0):
            continue
        counts[name] = counts.get(name, 0) + 1
        if name == "SIGHUP":
            os.kill(master, signal.SIGHUP)
            continue
        pids = workers_of(master)
        if pids:
            victim = random.Random(len(killed)).choice(pids)
            killed[victim] = "SIGKILL" if killed.get(victim) == "SIGKILL" else name
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, getattr(signal, name))


def lost_workers(log: str, killed: dict[int, str]) -> list[str]:
    """Lines about workers that ended otherwise than by our signals."""
    lost = [match[0] for match in map(FAILED.match, log.splitlines()) if match]
    for match in SIGNALLED.finditer(log):
        is_ours = killed.get(int(match[1])) == match[2] or match[2] == "SIGTERM"
        lost += [] if is_ours else [match[0]]
    return lost


@pytest.mark.parametrize("layer", LAYERS)
def test_workers_killed_under_load(tmp_path: Path, layer: str) -> None:
    """Every answer has the right bits; no worker ends but by our signals; the master ends
    cleanly."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        import wsgi_app
    finally:
        sys.path.remove(str(SCRIPTS))
    load = Load([wsgi_app.answer(case, 1) for case in wsgi_app.PROBLEMS])
    port, log = free_port(), tmp_path / "gunicorn.log"
    killed: dict[int, str] = {}
    counts: dict[str, int] = {}
    with fault("gunicorn", layer):
        env = under(layer, GUNICORN_CMD_ARGS=None, HOST_HAS_PARALLEL_REGION="1")
        with server(port, log, env) as master:
            stop, end = threading.Event(), time.monotonic() + SECONDS
            clients = [threading.Thread(target=load.client, args=(port, seed, end)) for seed in range(CLIENTS)]
            other = threading.Thread(target=disturb, args=(master.pid, log, stop, killed, counts))
            for thread in (*clients, other):
                thread.start()
            for thread in clients:
                thread.join()
            stop.set()
            other.join()
        text = log.read_text()
        assert not load.wrong, load.wrong[:5]
        assert not (lost := lost_workers(text, killed)), lost
        assert load.right > 20 * SECONDS and load.right > 10 * load.broken, (load.right, load.broken, text[-4000:])
        assert all(counts.get(name, 0) >= 2 for name in ("SIGKILL", "SIGHUP", "SIGTERM")), counts
        assert text.count("Booting worker") > WORKERS
        print(f"{load.right} right, {load.broken} connections broken by {counts}")


def test_lost_workers_are_noticed() -> None:
    log = "[ERROR] Worker (pid:7) was sent SIGKILL! Perhaps out of memory?\n[INFO] Worker (pid:8) was sent SIGTERM!\n"
    assert lost_workers(log, {7: "SIGKILL"}) == []
    assert len(lost_workers(log, {})) == 1
    for line in (
        "Worker (pid:7) was sent SIGSEGV!",
        "Worker (pid:9) exited with code 1.",
        "[CRITICAL] WORKER TIMEOUT (pid:7)",
    ):
        assert lost_workers(line, {7: "SIGKILL"})
