"""The mathematics and the cutting, each rule once, for every target: plain functions that know no Numba."""
