"""A `Cache` of transformers that holds only the rows that later queries can attend to. Its size is bounded.

B batch, H query heads, G key/value heads, M rows, D head dim.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ...attention import dilated_attention
from ...run.dilated_cache import DilatedCache
from .config import pattern_of

MARK = "bounded_layer"  # a BoundedLayer sets this attribute of new keys to itself


class BoundedCache(Cache):
    """A cache whose size does not grow with the sequence.

        model.generate(ids, cache=BoundedCache(model), max_new_tokens=1_000_000)

    transformers before 5.24 calls the argument `past_key_values`.

    For a branch of segment length w and dilation rate r the cache holds about w / r rows per key/value head and phase
    (see `DilatedCache`). Generation gives the same tokens as with transformers' own caches, which keep all positions.
    Several calls of generate may continue one sequence. `reset()` begins a new sequence, with the same batch size.

    Args:
        model: a transformers model with dilated attention.
        max_len: the largest number of positions in a sequence, if it is known. No buffer gets more rows than this.
        keep: `crop` can always shorten a sequence to n - keep positions. Here n is the largest length that the sequence
            has had. For assisted generation and prompt lookup pass the number of tokens of a draft.

    Raises:
        ValueError: for a model without a pattern. Also for Phi-3 and Phi-MoE, unless `max_len` is at most their
            original_max_position_embeddings: beyond this length their `generate` replaces the cache.
    """

    def __init__(self, model: Any, *, max_len: int | None = None, keep: int = 0) -> None:
        config = model.config
        pattern_of(config, is_causal=True)
        most = getattr(config, "original_max_position_embeddings", None)
        if most is not None and (max_len is None or max_len > most):
            raise ValueError(
                f"beyond {most} positions (original_max_position_embeddings) the angles of {type(model).__name__} "
                "change, also for keys that are in a cache. Its generate then replaces the cache by a DynamicCache, "
                f"which grows. Use no BoundedCache, or one with this limit: BoundedCache(model, max_len={most})."
            )
        super().__init__(
            layers=[BoundedLayer(config, max_len, keep) for _ in range(config.num_hidden_layers)]
        )

    @property
    def num_bytes(self) -> int:
        """The bytes of all buffers: 0 before the first forward, and constant afterwards."""
        return sum(layer.cache.num_bytes for layer in self.layers if layer.cache is not None)


class BoundedLayer(CacheLayerMixin):
    """The cache of one layer. transformers calls `update`, which stores nothing, but attaches this object to the new
    keys. The attention function finds the object there, and calls `attend`, which stores the keys and values."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, config: Any, max_len: int | None, keep: int) -> None:
        super().__init__()
        self.config, self.max_len, self.keep = config, max_len, keep
        self.cache: DilatedCache | None = None
        self.num_positions = 0  # the number of positions in the cache, padding included

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing. The first `attend` allocates the buffers, because `attend` knows which heads this rank has."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        key_states = key_states.view_as(key_states)
        setattr(key_states, MARK, self)
        return key_states, value_states

    def attend(
        self,
        query_BHMD: Tensor,
        key_BGMD: Tensor,
        value_BGMD: Tensor,
        valid_BM: Tensor | None,
        heads: range,
        num_heads: int,
        scale: float | None,
    ) -> Tensor:
        """Append the keys and values to the cache, and attend to all rows in the cache. Returns out (B, M, H, D), which
        is 0 at padding."""
        pattern = pattern_of(self.config, is_causal=True)
        rows_BMHD = [x.transpose(1, 2) for x in (query_BHMD, key_BGMD, value_BGMD)]
        batch, num_rows = query_BHMD.shape[0], query_BHMD.shape[2]
        if self.cache is None:
            self.cache = DilatedCache(
                pattern,
                batch,
                num_heads,
                key_BGMD.shape[1] * num_heads // len(heads),
                key_BGMD.shape[3],
                dtype=key_BGMD.dtype,
                device=key_BGMD.device,
                max_len=self.max_len,
                keep=self.keep,
                heads_held=heads,
            )
        attend: Any = partial(
            dilated_attention,
            pattern=pattern,
            scale=scale,
            heads_held=heads,
            num_heads=num_heads,
            cache=self.cache,
        )
        if valid_BM is None or valid_BM.all():
            out = attend(*rows_BMHD)
        else:  # move each entry's padding behind its tokens, and move the output's rows back
            first_B1 = valid_BM.int().argmax(1, keepdim=True)
            places_M = torch.arange(num_rows, device=valid_BM.device)
            moved_BMHD = [_taken(x, (places_M + first_B1) % num_rows) for x in rows_BMHD]
            out = _taken(
                attend(*moved_BMHD, lengths=valid_BM.sum(1)), (places_M - first_B1) % num_rows
            )
        self.num_positions += num_rows
        return out

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of keys in a mask, and the position of the first key. Only the new rows are counted as keys.

        So the keys begin at the same position as the queries. This tells `make_mask` that there is a BoundedCache.
        """
        return query_length, self.num_positions

    def get_seq_length(self) -> int:
        return self.num_positions

    def get_max_length(self) -> int:
        return -1 if self.max_len is None else self.max_len

    def reset(self) -> None:
        self.num_positions = 0
        if self.cache is not None:
            self.cache.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest positions. To remove n positions, transformers passes -n."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): pass minus the number of positions to remove."
            )
        if self.cache is not None and tokens_to_remove:
            self.cache.crop(-tokens_to_remove)
            self.num_positions += tokens_to_remove

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.cache is not None:
            self.batch_select_indices(torch.arange(self.cache.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.cache is not None:
            self.cache = self.cache.fork(indices)

    reorder_cache = batch_select_indices


def _taken(x_BMHD: Tensor, index_BM: Tensor) -> Tensor:
    return x_BMHD.gather(1, index_BM[:, :, None, None].expand_as(x_BMHD))
