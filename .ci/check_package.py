"""What is in the sdist and the wheel of a directory, and that the wheel brought nothing but its
dependencies into the environment of this interpreter: `python check_package.py DIRECTORY`."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from importlib import metadata, resources
from pathlib import Path

NEEDED = {
    "numba_prefix/py.typed",
    "numba_prefix/cli/data/sample.npz",
    "numba_prefix/__init__.py",
    "numba_prefix/README.md",
    "numba_prefix/cpu/kernel/work_loop.py",
    "numba_prefix/capi/include/numba_prefix.h",
}
SOURCES = {
    "pyproject.toml",
    "README.md",
    "LICENSE",
    ".github/CONTRIBUTING.md",
    "tests/conftest.py",
    "bench/__init__.py",
}
INSTALLED = {"numba-prefix", "numba", "llvmlite", "numpy"}
INSTALLERS = {"pip", "setuptools"}


def main(directory: str) -> None:
    (wheel,) = Path(directory).glob("*.whl")
    (sdist,) = Path(directory).glob("*.tar.gz")
    packed = set(zipfile.ZipFile(wheel).namelist())
    about = {name for name in packed if name.split("/")[0].endswith(".dist-info")}
    assert wheel.name.endswith("-py3-none-any.whl"), wheel
    assert packed >= NEEDED, NEEDED - packed
    assert any(name.endswith("/licenses/LICENSE") for name in about), about
    strange = {name for name in packed - about if not name.startswith("numba_prefix/") or "__pycache__" in name}
    assert not strange, strange
    with tarfile.open(sdist) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    assert sources >= NEEDED | SOURCES, (NEEDED | SOURCES) - sources
    assert packed - about <= sources, packed - about - sources
    installed = {dist.metadata["Name"].lower().replace("_", "-") for dist in metadata.distributions()}
    assert INSTALLED <= installed <= INSTALLED | INSTALLERS, installed
    place = Path(str(resources.files("numba_prefix"))).resolve()
    assert Path(sys.prefix).resolve() in place.parents, place
    print(f"{wheel.name}: {len(packed)} files, beside {', '.join(sorted(installed - {'numba-prefix'}))}")


main(sys.argv[1])
