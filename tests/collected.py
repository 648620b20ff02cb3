"""For the server that ranks are forked from, which imports this last: what it has imported lives as long as it does, so
that no rank need look for garbage there, and copy the pages where it looks."""

import gc

gc.freeze()
gc.enable()
