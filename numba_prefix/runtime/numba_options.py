"""Numba's options as far as they may shape code, whether the environment or the program sets them.

Those that cannot are named here; all others count, those too that Numba gains later.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

CONFIG, CONFIG_FILE = "numba.core.config", ".numba_config.yaml"

# Threads, places, messages, what the package itself sets while it compiles, and what is no option.
SHAPE_NOTHING = frozenset(
    {
        *("NUM_THREADS", "NUMBA_NUM_THREADS", "NUMBA_DEFAULT_NUM_THREADS", "THREADING_LAYER"),
        *("THREADING_LAYER_PRIORITY", "CACHE_DIR", "CACHE_LOCATOR_CLASSES", "DEBUG_CACHE", "FUNCTION_CACHE_SIZE"),
        *("DISABLE_PERFORMANCE_WARNINGS", "SHOW_HELP", "COLOR_SCHEME", "ALWAYS_WARN_UNINIT_VAR", "HIGHLIGHT_DUMPS"),
        *("GDB_BINARY", "PARALLEL_DIAGNOSTICS", "DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "DYLD_WORKAROUND"),
        *("DISABLE_JIT", "FORCE_CUDA_CC", "DISABLE_CUDA", "ENABLE_CUDASIM", "PYVERSION"),
        # those of the host's side of CUDA
        *("CUDA_DRIVER", "CUDA_LOG_LEVEL", "CUDA_LOG_API_ARGS", "CUDA_LOG_SIZE", "CUDA_USE_NVIDIA_BINDING"),
        *("CUDA_WARN_ON_IMPLICIT_COPY", "CUDA_LOW_OCCUPANCY_WARNINGS", "CUDA_PER_THREAD_DEFAULT_STREAM"),
        *("CUDA_MAX_PENDING_DEALLOCS_COUNT", "CUDA_MAX_PENDING_DEALLOCS_RATIO", "CUDA_ARRAY_INTERFACE_SYNC"),
        *("CUDA_MEMORY_MANAGER", "CUDA_ENABLE_MINOR_VERSION_COMPATIBILITY"),
    }
)
_PREFIX, _OURS = "NUMBA_", "NUMBA_PREFIX_"


def in_environment() -> dict[str, str]:
    """The options that variables and Numba's file in the working directory set. Brings no Numba."""
    names = {name for name in os.environ if name.startswith(_PREFIX) and not name.startswith(_OURS)}
    names = {name for name in names if name.removeprefix(_PREFIX) not in SHAPE_NOTHING}
    found = {name: os.environ[name] for name in sorted(names | ({"VS_PROFILER"} & os.environ.keys()))}
    file = Path(CONFIG_FILE)
    return found | ({CONFIG_FILE: file.read_text(errors="replace")} if file.is_file() else {})


def in_effect() -> dict[str, str]:
    """The options that Numba goes by now when it compiles for a CPU."""
    from numba.core import config

    return _values(vars(config))


def are_set_by_program() -> bool:
    """Whether options are other than the environment's, by an assignment in this process."""
    config = sys.modules.get(CONFIG)
    spec = importlib.util.find_spec(CONFIG) if config is not None else None
    if config is None or spec is None or spec.loader is None:
        return False
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    now, plain = _values(vars(config)), _values(vars(fresh))
    return any(now.get(name) != plain[name] for name in plain)


def _values(config: dict[str, Any]) -> dict[str, str]:
    """Values by name, without those of CUDA, which numba.cuda adds to when it is imported."""
    names = (name for name in sorted(config) if name.isupper() and not name.startswith(("_", "CUDA_")))
    return {name: repr(config[name]) for name in names if name not in SHAPE_NOTHING}
