"""An error that callers may want to catch by its name."""


class TargetUnavailableError(RuntimeError):
    """The target asked for cannot run here; nothing else was tried in its place."""
