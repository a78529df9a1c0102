"""Doors to other frameworks. Each module needs what it is named after; importing numba_prefix imports none of them."""
