"""Integrations with other frameworks. Each module needs the package it is named after; importing
numba_prefix imports none of them."""
