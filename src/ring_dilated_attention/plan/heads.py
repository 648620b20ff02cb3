"""Which heads of a layer tensors hold, where its heads lie on several ranks. No torch."""

from typing import Any


def held_heads(num_held: int, ratio: int, heads_held: Any, num_heads: Any) -> range:
    """The query heads of the layer that tensors hold, of which `ratio` each share a key/value head.

    Raises:
        ValueError: if they are not consecutive heads of num_heads, or cut through those that share a key/value head.
    """
    if heads_held is None and num_heads is None:
        return range(num_held)
    if not isinstance(heads_held, range) or isinstance(num_heads, bool) or not isinstance(num_heads, int):
        raise ValueError(
            f"heads_held={heads_held!r} and num_heads={num_heads!r}: give both or none, as heads_held=range(3, 6) of "
            "num_heads=6."
        )
    if heads_held.step != 1 or not 0 <= heads_held.start < heads_held.stop <= num_heads:
        raise ValueError(f"heads_held={heads_held} are not consecutive heads of num_heads={num_heads}.")
    if heads_held.stop - heads_held.start != num_held:  # torch.compile knows no len of a range that is not constant
        raise ValueError(f"heads_held={heads_held} are {len(heads_held)} heads, and query holds {num_held}.")
    if num_heads % ratio or heads_held.start % ratio or num_held % ratio:
        raise ValueError(
            f"heads_held={heads_held} of num_heads={num_heads} cut through query heads that share a key/value head, "
            f"{ratio} each. Deal whole groups."
        )
    return heads_held
