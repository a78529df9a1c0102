"""Errors that several layers raise."""

from __future__ import annotations


class TargetUnavailableError(RuntimeError):
    """The target asked for cannot run here; no other was tried in its place."""
