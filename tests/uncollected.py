"""For the server that ranks are forked from, which imports this first: what it imports is no garbage to look for."""

import gc

gc.disable()
