"""Benchmarks against other implementations; `python -m bench --help`."""
