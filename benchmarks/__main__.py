"""`python -m benchmarks CASE ...`, from a clone."""

import sys

from .command import main

if __name__ == "__main__":  # not in the processes that a case starts
    sys.exit(main())
