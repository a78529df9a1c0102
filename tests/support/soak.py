"""Random problems from several threads for a long time: right bits, and memory that does not grow.

    PYTHONPATH=. python tests/support/soak.py --minutes 20

Every result is compared bit by bit with a run on one thread; failing calls are mixed in. Exit
status 0: no wrong bit and resident memory flat from the first third on. tests/process/test_soak.py
is the short form.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from cases import DTYPES, MASK_FORMS, Case, make_case, run, same_bits, with_mask

import numba_prefix as nbp

PAGE_MB = 4096 / 1e6
FLAT_MB = 48.0  # growth that is put down to the allocator


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_MB


def random_problem(seed: int) -> Case:
    rng = random.Random(seed)
    q = [rng.choice([0, 1, 1, rng.randrange(120)]) for _ in range(rng.randrange(1, 5))]
    kv = [n + rng.choice([0, rng.randrange(30), rng.randrange(1200)]) for n in q]
    kv_heads, group = rng.randrange(1, 4), rng.choice([1, 2, 3, 4, 7, 8])
    case = make_case(
        q, kv, head_num=kv_heads * group, kv_head_num=kv_heads, head_size=rng.choice([16, 64, 80, 128, rng.randrange(1, 257)]),
        block_size=rng.choice([4, 16, 128, rng.randrange(4, 300)]), dtype=rng.choice(list(DTYPES)), seed=seed,
    )  # fmt: skip
    return with_mask(case, rng.choice(MASK_FORMS), seed)


def two_phases(case: Case, num_threads: int) -> Any:
    """The same call through a plan, run twice in one workspace."""
    out = np.empty_like(case.query)
    size, op = nbp.self_attention_prefix_encoder_get_workspace_size(
        *(case.query, case.key, case.value, case.block_tables, case.mask, case.seq_len, case.kv_seq_len, case.slopes),
        *(case.mask_type, case.query.shape[1], case.key.shape[2], case.qk_scale, out, nbp.Context("cpu", num_threads)),
    )
    workspace = bytearray(size)
    nbp.self_attention_prefix_encoder(workspace, size, op)
    out[...] = np.nan
    op.rebind(query=case.query, attn_out=out)
    nbp.self_attention_prefix_encoder(workspace, size, op)
    return out


def fail(case: Case) -> None:
    """Make calls that end in an error, which must leave nothing behind either."""
    for bad in ({"block_tables": np.full_like(case.block_tables, -7)}, {"kv_seq_len": [-1] * len(case.seq_len)}):
        if sum(case.seq_len) == 0:
            return
        try:
            run(case, "cpu", **bad)
        except ValueError:
            continue
        raise AssertionError(f"no error with {bad}")


@dataclass
class Soak:
    seconds: float
    num_threads: int = 4
    seed: int = 0
    # Problems. A short run takes few, so that it has seen the largest before memory is judged.
    distinct: int = 1 << 30
    calls: int = 0
    rss: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def worker(self, index: int, end: float) -> None:
        rng = random.Random(f"{self.seed} {index}")
        while time.monotonic() < end and not self.errors:
            seed = rng.randrange(self.distinct)
            try:
                case = random_problem(seed)
                out, lse = run(case, "cpu", num_threads=rng.randrange(1, 5), return_lse=True)
                again, lse_again = run(case, "cpu", num_threads=1, return_lse=True)
                same_bits(out, again)
                same_bits(lse, lse_again)
                if rng.random() < 0.3:
                    same_bits(two_phases(case, rng.randrange(1, 5)), again)
                if rng.random() < 0.3:
                    fail(case)
            except Exception as error:
                self.errors.append(f"seed {seed}: {type(error).__name__}: {error}")
            self.calls += 1  # roughly: threads may lose a count

    def run(self) -> Soak:
        end = time.monotonic() + self.seconds
        threads = [threading.Thread(target=self.worker, args=(i, end)) for i in range(self.num_threads)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(min(1.0, self.seconds / 50))
            self.rss.append(resident_mb())
        for thread in threads:
            thread.join()
        return self

    @property
    def growth_mb(self) -> float:
        """Median resident memory of the last third less that of the second."""
        third = len(self.rss) // 3
        return float(np.median(self.rss[2 * third :]) - np.median(self.rss[third : 2 * third])) if third else 0.0

    @property
    def verdict(self) -> str:
        """The reasons to fail, empty if all is well."""
        if self.errors:
            return self.errors[0]
        return f"resident memory grew by {self.growth_mb:.1f} MB" if self.growth_mb > FLAT_MB else ""


def short() -> None:
    """A run that is too short to judge memory by."""
    errors = Soak(2.0).run().errors
    assert not errors, errors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--distinct", type=int, default=1 << 30, help="how many different problems to draw from")
    given = parser.parse_args()
    soak = Soak(60 * given.minutes, given.threads, given.seed, given.distinct).run()
    samples = ", ".join(f"{x:.0f}" for x in soak.rss[:: max(1, len(soak.rss) // 20)])
    print(f"{soak.calls} problems; resident MB over time: {samples}; growth {soak.growth_mb:+.1f} MB")
    print(soak.verdict or "no wrong bit, memory flat")
    return 1 if soak.verdict else 0


if __name__ == "__main__":
    sys.exit(main())
