"""Cubins on disk: what is kept, when it is used, and that no state of the directory is worse than
having none."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from kernel_stubs import spec_of, stubs
from processes import environment, finish, start

import numba_prefix as nbp
from numba_prefix.cuda.compile import cubins
from numba_prefix.cuda.compile.compiler import Compiled
from numba_prefix.runtime import disk_cache

SPEC, CC = spec_of("scaled"), (8, 0)
KERNEL = Compiled("symbol", CC, bytes(range(256)) * 40, 128, 4096, 64, 32, 40, 8, 16, 2, "the text")
HAS_COMPILER = importlib.util.find_spec("numba_cuda") is not None
POSIX = pytest.mark.skipif(sys.platform == "win32", reason="owners and modes are POSIX's")


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What was compiled, in a process that has nothing yet and a directory of its own. Compiling
    gives KERNEL."""
    made: list[Any] = []

    def compile_kernel(spec: Any, cc: Any) -> Compiled:
        made.append((spec, cc))
        return dataclasses.replace(KERNEL, name=spec.name, cc=cc)

    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cubins, "compile_kernel", compile_kernel)
    monkeypatch.setattr(cubins, "_ready", {})
    return made


def obtain(spec: Any = SPEC, cc: Any = CC) -> tuple[Compiled, str]:
    """As a new process would."""
    cubins._ready.clear()
    found, source = cubins.obtain(spec, cc)
    assert dataclasses.replace(found, ptx="") == dataclasses.replace(KERNEL, name=spec.name, cc=cc, ptx="")
    return found, source


def only_file(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "numba_prefix").iterdir()
    return path


def test_three_sources(compilations: list[Any], tmp_path: Path) -> None:
    assert obtain()[1] == "compiled"
    assert cubins.obtain(SPEC, CC)[1] == "memory"
    found, source = obtain()
    assert source == "cache"
    assert found.ptx == ""
    assert cubins.kernel(SPEC, CC) is found
    assert compilations == [(SPEC, CC)]
    path = only_file(tmp_path)
    assert path.name.startswith(f"{SPEC.name}-sm_80-")
    assert path.suffix == ".bin"


def test_no_pickle(compilations: list[Any], tmp_path: Path) -> None:
    """A digest, the length of a JSON object, that object, and the cubin."""
    obtain()
    content = only_file(tmp_path).read_bytes()[disk_cache.DIGEST_BYTES :]
    end = 4 + int.from_bytes(content[:4], "little")
    facts = json.loads(content[4:end])
    assert content[end:] == KERNEL.cubin
    expected = {**dataclasses.asdict(KERNEL), "name": SPEC.name}
    assert facts == {name: value for name, value in expected.items() if name not in ("cubin", "cc", "ptx")}


@pytest.mark.parametrize("change", ["spec", "cc", "source", "compiler", "python", "family"])
def test_whatever_code_depends_on(
    change: str, compilations: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    obtain()
    cubins._digest.cache_clear()
    spec, cc = SPEC, CC
    if change == "spec":
        spec = dataclasses.replace(SPEC, is_aligned=False)
    elif change == "cc":
        cc = (8, 6)
    elif change == "source":
        honest = disk_cache.code_of
        monkeypatch.setattr(disk_cache, "code_of", lambda name: honest(name) + b"#" * name.endswith(".softmax"))
    elif change == "compiler":
        monkeypatch.setattr(cubins, "_version", lambda package: "0" if package == "nvidia-nvjitlink" else "1")
    elif change == "python":
        monkeypatch.setattr(sys, "version_info", (3, 99, 0))
    else:
        monkeypatch.setitem(cubins.FAMILIES, "fma", "another")
    try:
        assert obtain(spec, cc)[1] == "compiled"
        assert obtain(spec, cc)[1] == "cache"
    finally:
        monkeypatch.undo()
        cubins._digest.cache_clear()


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_all_sources_count(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file in the folders that kernels and their compiler lie in, as they are on disk, and
    the rules."""
    from numba_prefix.cpu.compile import cache

    digest = cache.source_digest if target == "cpu" else cubins._digest
    read: list[str] = []
    honest = disk_cache.code_of
    monkeypatch.setattr(disk_cache, "code_of", lambda name: read.append(name) or honest(name))
    digest.cache_clear()
    digest()
    digest.cache_clear()
    folders = ["rules", f"{target}/kernel", f"{target}/compile", *(["cpu/simd"] if target == "cpu" else [])]
    files = [path for folder in folders for path in (Path(nbp.__file__).parent / folder).glob("*.py")]
    expected = {".".join(path.relative_to(Path(nbp.__file__).parent.parent).with_suffix("").parts) for path in files}
    assert set(read) == {name for name in expected if not name.endswith(".__init__")}


# Where the file's parts begin: digest, length, facts, cubin
REGIONS = {"digest": 0, "digest's end": 31, "length": 32, "length's end": 35, "facts": 40, "cubin": 2000, "end": -1}


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("bit", [0, 7])
def test_flipped_bit(region: str, bit: int, compilations: list[Any], tmp_path: Path) -> None:
    obtain()
    path = only_file(tmp_path)
    content = bytearray(path.read_bytes())
    content[REGIONS[region]] ^= 1 << bit
    path.write_bytes(content)
    assert obtain()[1] == "compiled"
    assert obtain()[1] == "cache"


@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 36, 60, 2000, -1])
def test_cut(length: int, compilations: list[Any], tmp_path: Path) -> None:
    obtain()
    path = only_file(tmp_path)
    path.write_bytes(path.read_bytes()[:length])
    assert obtain()[1] == "compiled"
    assert obtain()[1] == "cache"


@pytest.mark.parametrize("kind", ["longer", "other kernel", "other GPU", "facts of another version", "no JSON"])
def test_foreign(kind: str, compilations: list[Any], tmp_path: Path) -> None:
    """Whole files too, under the wrong name or with facts that a kernel does not have."""
    obtain()
    path = only_file(tmp_path)
    if kind == "longer":
        path.write_bytes(path.read_bytes() + b"\0")
    elif kind in ("other kernel", "other GPU"):
        spec, cc = (spec_of("double"), CC) if kind == "other kernel" else (SPEC, (9, 0))
        obtain(spec, cc)
        (other,) = set(path.parent.iterdir()) - {path}
        shutil.copy(other, path)
    else:
        header = b'{"name": "symbol"}' if kind == "facts of another version" else b"\xff\xfe"
        payload = len(header).to_bytes(4, "little") + header + b"cubin"
        disk_cache.save(cubins._file_name(SPEC, CC), cubins._key(SPEC, CC), payload)
    assert obtain()[1] == "compiled"
    assert obtain()[1] == "cache"


@POSIX
@pytest.mark.parametrize("kind", ["fifo", "directory", "link to itself", "others may write"])
def test_what_is_not_trusted(kind: str, compilations: list[Any], tmp_path: Path) -> None:
    obtain()
    path = only_file(tmp_path)
    if kind == "others may write":
        path.chmod(0o666)
    else:
        path.unlink()
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "directory":
            path.mkdir()
        else:
            path.symlink_to(path)
    assert obtain()[1] == "compiled"
    assert obtain()[1] == ("compiled" if kind == "directory" else "cache")
    assert len(list(path.parent.iterdir())) == 1


@POSIX
def test_no_place_to_write(compilations: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in the way, a directory that nothing can be made in, no home at all: compiled each
    time."""
    (tmp_path / "file").write_text("in the way")
    for place in (tmp_path / "file", Path("/proc")):
        monkeypatch.setenv("NUMBA_CACHE_DIR", str(place))
        assert obtain()[1] == obtain()[1] == "compiled"
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert disk_cache.cache_directory() is None
    assert obtain()[1] == obtain()[1] == "compiled"


@POSIX
def test_read_only_directory(compilations: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in it is used; what is not is compiled and nothing is left behind."""
    obtain()
    directory = tmp_path / "numba_prefix"

    def refused(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_CREAT:
            raise PermissionError(13, "Permission denied", path)
        return honest(path, flags, *mode)

    honest = os.open
    monkeypatch.setattr(os, "open", refused)  # root writes where it pleases, whatever the modes
    assert obtain()[1] == "cache"
    assert obtain(cc=(9, 0))[1] == obtain(cc=(9, 0))[1] == "compiled"
    assert len(list(directory.iterdir())) == 1


@POSIX
@pytest.mark.parametrize("step", ["write", "replace"])
def test_full_disk(step: str, compilations: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither half a file nor a temporary one stays."""

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    class Full:
        def __init__(self, handle: int, mode: str) -> None:
            self.handle = handle

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            os.close(self.handle)

        write = full

    if step == "write":
        monkeypatch.setattr(os, "fdopen", Full)
    else:
        monkeypatch.setattr(os, "replace", full)
    assert obtain()[1] == "compiled"
    assert list((tmp_path / "numba_prefix").iterdir()) == []
    monkeypatch.undo()


def test_two_threads(compilations: list[Any], tmp_path: Path) -> None:
    """One compiles, both have it."""
    sources: list[str] = []
    threads = [threading.Thread(target=lambda: sources.append(cubins.obtain(SPEC, CC)[1])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(sources) == ["compiled", "memory", "memory", "memory"]
    assert compilations == [(SPEC, CC)]


def test_errors_are_not_kept(compilations: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    honest = cubins.compile_kernel
    monkeypatch.setattr(cubins, "compile_kernel", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        cubins.obtain(SPEC, CC)
    monkeypatch.setattr(cubins, "compile_kernel", honest)
    assert obtain()[1] == "compiled"


@pytest.mark.skipif(not HAS_COMPILER, reason="numba-cuda is not installed")
def test_processes(tmp_path: Path) -> None:
    """Two on one empty cache: both compile, or one finds what the other has left; then one that
    finds all needs no Numba."""
    env = environment(NUMBA_CACHE_DIR=str(tmp_path))
    both = [start("cuda_cached.py", env=env) for _ in range(2)]
    said = [finish(process).split() for process in both]
    later = finish(start("cuda_cached.py", env=env)).split()
    assert {words[0] for words in said} <= {"compiled", "cache"}
    assert "compiled" in {words[0] for words in said}
    assert later[0] == "cache"
    assert {words[1] for words in (*said, later)} == {later[1]}
    assert later[2] == "light"
    assert len(list((tmp_path / "numba_prefix").iterdir())) == 1


def test_a_stub_is_not_a_kernel() -> None:
    """What tests compile in place of a family is not found where the family is asked for."""
    key = cubins._key(SPEC, CC)
    with stubs():
        assert cubins._key(SPEC, CC) != key


def test_without_the_compiler_a_cached_kernel_is_found(tmp_path: Path) -> None:
    env = environment(NUMBA_CACHE_DIR=str(tmp_path))
    env["PYTHONPATH"] += os.pathsep + str(Path(__file__).parent)
    code = (
        "import dataclasses, sys; sys.modules['numba_cuda'] = None\n"
        "from test_cuda_cache import CC, KERNEL, SPEC\n"
        "from numba_prefix.cuda.compile import cubins\n"
        "cubins.save(SPEC, CC, KERNEL)\n"
        "assert cubins.obtain(SPEC, CC) == (dataclasses.replace(KERNEL, ptx=''), 'cache')\n"
    )
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=120)
