"""The work loop of the CPU target: any number of workers drain one queue of work items."""

from __future__ import annotations

from typing import Any

from numba_prefix.cpu.compile.jit import inline, kernel
from numba_prefix.cpu.kernel.decode import decode_item
from numba_prefix.cpu.kernel.paged_kv import pages_of
from numba_prefix.cpu.kernel.prefill import finish_prefill, start_state
from numba_prefix.cpu.simd.memory import atomic_add, enter_float_mode, leave_float_mode
from numba_prefix.cpu.simd.params_view import params_view
from numba_prefix.rules import tiling
from numba_prefix.rules.tiling import lane_rows


@inline
def nothing() -> None: ...


def make_drain(name: str, load_queries: Any, attend_keys: Any, enter: Any, leave: Any) -> Any:
    """Makes the kernel of an instruction-set path (cpu/paths/record.MicroKernels)."""

    def drain(block: Any, sequences: Any, runs: Any, work: Any, worker: Any, max_items: Any) -> Any:
        """One work item = (tile, split, item_heads kv heads: one, unless it is a decode tile).
        Takes items from the queue until it is empty or max_items are done; returns whether items
        were left.

        block      int64 [fields], of a Params
        sequences  int64 [batch, SEQUENCE_COLUMNS]
        runs       int64 [runs, RUN_COLUMNS]
        work       int64 [entries, WORK_COLUMNS]
        """
        params = params_view(block)
        scratch_ptr = params.scratch_ptr + worker * params.scratch_bytes
        item_heads, group_size = params.item_heads, params.group_size
        head_groups = params.kv_head_num // item_heads
        float_mode = enter_float_mode()
        enter()
        is_left = True
        for _ in range(max_items):
            item = atomic_add(params.queue_ptr, 1)
            if item >= params.num_items:
                is_left = False
                break
            work_item, kv_head = work[item // head_groups], item % head_groups * item_heads
            sequence = sequences[work_item[tiling.SEQUENCE]]
            q_len, m_block = sequence[tiling.Q_LEN], work_item[tiling.M_BLOCK]
            rows = tiling.rows_in_tile(q_len, group_size, m_block, sequence[tiling.TILE_ROWS])
            fold_rows = tiling.fold_rows(q_len, group_size, params.head_size)
            k_pages, v_pages = pages_of(params, work_item, kv_head)
            if fold_rows > 0:
                pages = k_pages, v_pages
                decode_item(params, work_item, sequence, runs, rows, fold_rows, kv_head, pages, scratch_ptr)
            else:
                first_row, num_panels = m_block * sequence[tiling.TILE_ROWS], lane_rows(rows) >> 4
                load_queries(params, sequence, runs, first_row, rows, kv_head, scratch_ptr)
                start_state(params, num_panels, scratch_ptr)
                attend_keys(params, work_item, sequence, runs, num_panels, k_pages, v_pages, scratch_ptr)
                finish_prefill(params, work_item, sequence, first_row, rows, kv_head, scratch_ptr)
        leave()
        leave_float_mode(float_mode)
        return is_left

    drain.__name__ = drain.__qualname__ = name
    return kernel(drain)
