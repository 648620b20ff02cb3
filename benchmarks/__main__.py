"""`python -m benchmarks CASE ...`, from a clone."""

import sys

if __name__ == "__main__":  # not in the processes that a case starts
    from .command import main

    sys.exit(main())
