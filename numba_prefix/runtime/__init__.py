"""The process that hosts this package: threads, forks, signals, exit, and compiled code on disk."""
