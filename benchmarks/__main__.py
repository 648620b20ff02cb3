"""Runs `python -m benchmarks CASE ...`, in a clone of the repository."""

import sys

if __name__ == "__main__":  # false in the processes that a case starts: they import this file
    from .command import main

    sys.exit(main())
