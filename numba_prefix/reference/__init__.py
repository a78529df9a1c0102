"""The float64 oracle that results are judged by; it shares no code with the rules."""

from numba_prefix.reference.oracle import Budget, budget, naive, reference, stored

__all__ = ["Budget", "budget", "naive", "reference", "stored"]
