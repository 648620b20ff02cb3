"""`python -m benchmarks CASE ...`, from a clone."""

import sys

from ring_dilated_attention.commands.terminal import leaving_at_once

if __name__ == "__main__":  # not in the processes that a case starts
    with leaving_at_once("python -m benchmarks"):
        from .command import main
    sys.exit(main())
