"""Tests that a plain run leaves out, and why.

`python -m pytest --full` runs all tests, `python -m pytest --full -m full` what a plain run leaves
out. `PYTHONPATH=. python tests/support/full.py --write tests/README.md` makes the page's table.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import tables
from processes import TESTS

NAME = "full"


@dataclass(frozen=True)
class Group:
    """Tests left out for one reason."""

    why: str
    instead: str  # what a plain run has of it
    tests: dict[str, tuple[str, ...]]  # file::test, and patterns of the parameters that stay


GROUPS = (
    Group(
        "each fault under each of Numba's threading layers",
        "each fault under `omp`, which Numba takes on Linux where none is chosen",
        {
            "process/test_service.py::test_fault": ("*-omp",),
            "process/test_service.py::test_fork_in_a_first_call": ("omp",),
            "process/test_threads.py::test_cap_in_a_service": ("omp",),
            "cpu/test_bugs_numba.py::test_d25_import_from_a_zip": ("omp",),
        },
    ),
    Group(
        "cold starts, each of which compiles all kernels again (15 s of CPU time)",
        "one: out of a zip archive, without a cache, interrupted again and again",
        {
            "cpu/test_bugs_numba.py::test_d25_read_only_install": (),
            "cpu/test_bugs_numba.py::test_d26_first_calls_at_once": (),
            "cpu/test_bugs_numba.py::test_d26_cold_start_of_several_processes": (),
            "cpu/test_bugs_numba.py::test_d27_no_relaxed_arithmetic": (),
            "cpu/test_bugs_numba.py::test_d30_other_ways_to_run": (),
            "process/test_field_cache.py::test_n13_processes": (),
            "process/test_field_cache.py::test_n07_the_second_process_loads": (),
            "process/test_field_cache.py::test_compilation_in_a_small_stack": (),
        },
    ),
    Group(
        "whole suites in processes kept to older x86 CPUs",
        "a few tests of a Haswell",
        {"cpu/test_other_cpus.py::test_older_cpu": ()},
    ),
    Group(
        "whole suites on each path, its instructions imitated where the CPU lacks them",
        "mask kinds on each path, and the machine code",
        {"cpu/test_paths.py::test_contract": ()},
    ),
    Group(
        "endurance: servers under load, soak, damaged files, guard pages",
        "the short forms that test_service.py runs, and one guard-page test of decode and of prefill",
        {
            "process/test_gunicorn.py::test_workers_killed_under_load": (),
            "process/test_soak.py::test_soak": (),
            "process/test_fuzz.py::test_damaged_npz_files": (),
            "process/test_guard_pages.py::test_no_access_outside_a_buffer": (
                "cpu-float16-decode",
                "cpu-bfloat16-prefill",
            ),
            "process/test_guard_pages.py::test_random_problems_between_guard_pages": (),
            "process/test_guard_pages.py::test_the_other_operations": ("float16",),
            "semantics/test_bugs_inputs.py::test_d17_nothing_outside_is_touched": (),
            "semantics/test_properties.py::test_number_of_threads_with_many_rows": ("cpu-600",),
        },
    ),
    Group(
        "one mechanism in several variants, each in a process of its own",
        "one variant",
        {
            "cpu/test_bugs_numba.py::test_d24_thread_cap": ("capped-*",),
            "cpu/test_bugs_numba.py::test_d24_affinity_is_the_cap": (),
            "integrations/test_torch_pool.py::test_ended": ("interrupted",),
            "integrations/test_distributed.py::test_a_group": ("2",),
            "integrations/test_distributed.py::test_n08_four_ranks_and_two_kv_heads": (),
            "cuda/test_cuda_compile.py::test_cut_short": ("ctrl_c",),
        },
    ),
    Group(
        "a real language model (93 MB, half a minute to load), and continuous batching beside eager attention",
        "small random networks, padded and paged",
        {
            "integrations/test_smollm2.py::test_plain_generation": (),
            "integrations/test_smollm2.py::test_continuous_batching": (),
            "integrations/test_smollm2.py::test_logits_in_bfloat16": (),
            "integrations/test_smollm2.py::test_demo": (),
            "integrations/test_transformers.py::test_continuous_batching": ("llama",),
            "integrations/test_transformers.py::test_shared_prefix_is_computed_once": (),
            "integrations/test_transformers.py::test_in_a_compiled_model": (),
            "integrations/test_field_generation.py::test_n04_chunks_of_padding": ("dynamic-8", "static-8"),
            "integrations/test_field_generation.py::test_n06_short_of_memory": (),
            "integrations/test_field_generation.py::test_n06_padded_for_a_compiled_model": (),
        },
    ),
    Group(
        "networks that torch compiles, which takes seconds for each",
        "two networks, whole and padded, and packed sequences",
        {
            "integrations/test_field_compile.py::test_n02_a_compiled_model_is_one_graph": (
                "alone-llama",
                "left-bloom",
            ),
            "integrations/test_field_compile.py::test_n02_packed_sequences_stay_refused": ("eager", "one_graph"),
            "integrations/test_field_compile.py::test_n02_generation_with_a_compiled_forward": (),
            "integrations/test_field_compile.py::test_n02_what_is_not_computed_is_refused_in_a_compiled_model": (),
        },
    ),
    Group(
        "the matrix of CUDA kernels: each dtype, head size and mask kind on each generation compiles for seconds",
        "a kernel or two of each family and generation, and the safety tests on a fake GPU",
        {
            "cuda/test_cuda_kernels.py::test_mask_kinds": (
                *("8.0-alibi-heads", "8.0-alibi_sqrt-generator", "12.0-alibi_sqrt-generator"),
                *("8.0-causal", "7.5-causal", "9.0-causal"),
            ),
            "cuda/test_cuda_kernels.py::test_dtypes": ("*-causal",),
            "cuda/test_cuda_kernels.py::test_head_sizes": ("*-float16-1",),
            "cuda/test_cuda_kernels.py::test_masks_of_large_heads": (),
            "cuda/test_cuda_kernels.py::test_split_keys": ("causal-8.0",),
            "cuda/test_cuda_kernels.py::test_no_bank_conflicts": ("mma-float16-32", "fma-float32-32"),
            "cuda/test_cuda_kernels.py::test_a_dropped_barrier_shows": ("float16-*",),
            "cuda/test_cuda_kernels.py::test_registers_hold_everything": (),
            "semantics/test_semantics.py::test_identity": (
                "cpu-*",
                "reference-*",
                "cuda-16-none-*",
                "cuda-16-causal-*",
            ),
            "semantics/test_semantics.py::test_scale_multiplies_the_product": ("cpu", "reference"),
            "semantics/test_semantics.py::test_scale_leaves_the_bias_alone": ("cpu", "reference"),
            "ptx/test_compiled.py::test_softmax_of_rows": ("cc1-*",),
            "integrations/test_field_gpu.py::test_the_real_kernels_in_the_interpreter": (),
            "cuda/test_cuda_contract.py::test_parts": ("gpu",),
            "cuda/test_cuda_contract.py::test_lengths": ("float16-ptx", "*-gpu"),
            "cuda/test_cuda_contract.py::test_bits": ("float16-ptx", "*-gpu"),
            "cuda/test_cuda_compile.py::test_the_cubin_is_the_ptx": ("arithmetic-*",),
            "cuda/test_cuda_compile.py::test_leaves_no_trace": (),
            "cuda/test_cuda_compile.py::test_the_same_in_every_process": (),
        },
    ),
)

KEPT = {name: kept for group in GROUPS for name, kept in group.tests.items()}


def name_and_parameters(item: Any) -> tuple[str, str]:
    """A test's entry in KEPT, if it has one, and the id of its parameters."""
    inside = item.nodeid.partition("::")[2].partition("[")[0]
    callspec = getattr(item, "callspec", None)
    return f"{item.path.relative_to(TESTS).as_posix()}::{inside}", callspec.id if callspec else ""


def is_left_out(item: Any) -> bool:
    """Whether a plain run goes without a collected test."""
    name, parameters = name_and_parameters(item)
    return name in KEPT and not any(fnmatchcase(parameters, pattern) for pattern in KEPT[name])


def is_repeated(item: Any) -> bool:
    """Whether a test is in both runs: hypothesis tries ten examples in a plain run, forty in a
    full one."""
    return bool(getattr(item.obj, "is_hypothesis_test", False))


def table() -> str:
    """Markdown: a row per group."""

    def listed(group: Group) -> Iterator[str]:
        files: dict[str, list[str]] = {}
        for name in group.tests:
            file, _, test = name.partition("::")
            files.setdefault(file, []).append(test.removeprefix("test_"))
        for file, names in files.items():
            yield f"`{file}`: {', '.join(names)}"

    rows = [(group.why, "; ".join(listed(group)), group.instead) for group in GROUPS]
    return tables.markdown([("left out", "tests", "in a plain run"), *rows])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write"]:
        tables.write(Path(sys.argv[2]), NAME, table())
    else:
        print(table(), end="")
