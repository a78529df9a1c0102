"""Living in the process of somebody else: threads, forks, signals, exit, and compiled code on disk."""
