"""`python -m numba_prefix`, and the script `numba-prefix`."""

import sys

from numba_prefix.cli.app import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
