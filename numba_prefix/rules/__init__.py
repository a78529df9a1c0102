"""Rules that every target shares, each written once: plain functions that know no Numba."""
