"""The operator over the ranks of a torch.distributed group, which share out the heads or the blocks
of a long context."""

from numba_prefix.integrations.distributed.operators import (
    RankError,
    context_parallel_prefix_encoder,
    head_parallel_prefix_encoder,
    head_share,
)

__all__ = ["RankError", "context_parallel_prefix_encoder", "head_parallel_prefix_encoder", "head_share"]
