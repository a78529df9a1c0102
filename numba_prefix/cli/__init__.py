"""The command line: run a problem from a file, show the machine, compile ahead, time one's own
shapes."""
