"""`python -m ring_dilated_attention` runs the command `rda`."""

import sys

from .commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
