"""The command line: run a problem from a file, show the machine, compile ahead, time given
shapes."""
