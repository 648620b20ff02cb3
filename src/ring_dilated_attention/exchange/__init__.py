"""How chunks travel between ranks."""

# Under "auto", the first.
EXCHANGES = ("ring",)
