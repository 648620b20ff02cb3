"""`python -m benchmarks.slice`, from a clone."""

import sys

from ring_dilated_attention.commands.terminal import leaving_at_once

if __name__ == "__main__":
    with leaving_at_once("python -m benchmarks.slice"):
        from .command import main
    sys.exit(main())
