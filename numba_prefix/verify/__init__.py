"""Judging results: random problems, the verdict of the oracle, and compiling ahead."""
