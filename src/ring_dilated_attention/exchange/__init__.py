"""How chunks travel between ranks."""

EXCHANGES = ("ring", "all_gather", "all_to_all", "simulated")
