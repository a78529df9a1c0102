"""The operator over gloo groups of two and three processes on this machine
(tests/support/scripts/group_member.py)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from cases import make_case
from processes import environment, finish, start

from numba_prefix.rules import softmax

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from numba_prefix.integrations.distributed import (  # noqa: E402
    context_parallel_prefix_encoder,
    head_parallel_prefix_encoder,
    head_share,
)

MIN_SCENARIOS = 32  # of which none may get lost


@pytest.mark.parametrize("size", [2, 3])
def test_a_group(size: int, tmp_path: Path) -> None:
    """Every scenario is right on every rank."""
    group_is_right(size, tmp_path, MIN_SCENARIOS)


def test_n08_four_ranks_and_two_kv_heads(tmp_path: Path) -> None:
    """transformers#48307, sglang PR#19086: kv heads that two ranks each hold are no ground for
    another result, nor is the form that a rank gives the same numbers in."""
    group_is_right(4, tmp_path, 1, "heads replicated")


def group_is_right(size: int, tmp_path: Path, at_least: int, *words: str) -> None:
    interface = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    env = environment(OMP_NUM_THREADS="1", **interface)
    ranks = [start("group_member.py", rank, size, tmp_path / "rendezvous", *words, env=env) for rank in range(size)]
    outcomes = []
    try:
        outcomes = [json.loads(finish(process)) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert all(list(found) == list(outcomes[0]) and len(found) >= at_least for found in outcomes)
    wrong = [
        f"rank {rank}, {name}: {outcome}"
        for rank, found in enumerate(outcomes)
        for name, outcome in found.items()
        if outcome != "right"
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("heads", "size"), [(3, 2), (4, 3), (8, 8), (7, 1), (64, 6)])
def test_head_shares(heads: int, size: int) -> None:
    """Every head once, in order of the ranks; shares differ by one at most."""
    shares = [head_share(heads, rank, size) for rank in range(size)]
    assert [h for begin, end in shares for h in range(begin, end)] == list(range(heads))
    sizes = {end - begin for begin, end in shares}
    assert max(sizes) - min(sizes) <= 1


def test_head_shares_refused() -> None:
    with pytest.raises(ValueError, match="rank: got 2, expected 0 to 1"):
        head_share(4, 2, 2)
    with pytest.raises(ValueError, match="num_heads: got 1, expected at least one for each of 2"):
        head_share(1, 0, 2)
    with pytest.raises(TypeError, match="world_size: got float, expected an int"):
        head_share(1, 0, 2.0)  # type: ignore[arg-type]


def test_rules_on_tensors() -> None:
    """The softmax rules give for tensors what they give for arrays, float32 kept."""
    scores = np.float32([[3.5, -2.0, -np.inf, 88.0], [0.25, -200.0, -np.inf, -np.inf]])
    for rule in (
        lambda x: softmax.shift_of(softmax.running_max(x[0], x[1])),
        lambda x: softmax.exp_score(x[1], softmax.shift_of(x[0]), softmax.LOG2_E),
        lambda x: softmax.log_sum_exp(x[0], x[1] * x[1], np.float32(1)),
        lambda x: softmax.normalize(x[0], softmax.exp_score(x[1], np.float32(0), softmax.LOG2_E)),
        lambda x: softmax.part_of_output(x[0] / np.float32(0), x[1], np.float32(0)),
    ):
        with np.errstate(all="ignore"):
            expected = rule(scores)
        got = rule(torch.from_numpy(scores))
        assert got.dtype == torch.float32
        np.testing.assert_allclose(got.numpy(), expected, rtol=3e-7)


def test_without_a_group() -> None:
    """Told at once."""
    case = make_case([2], [3])
    arguments = case.arguments() | {"query": torch.from_numpy(case.query)}
    with pytest.raises(RuntimeError, match="group: got no process group, expected"):
        head_parallel_prefix_encoder(**arguments)
    with pytest.raises(RuntimeError, match="group: got no process group, expected"):
        context_parallel_prefix_encoder(**arguments, held_blocks=None)
