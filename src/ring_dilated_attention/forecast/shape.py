"""The sizes of a decoder: its parameters, and what its blocks save for each position. Numbers only, no torch."""

from typing import Any, NamedTuple

FLOAT = 4
# For each entry of a norm: its weights, the numbers saved in float32 (or wider), and the numbers saved in the
# activations' dtype. For each row: the numbers saved in float32.
NORMS = {
    "layer": (2, 0, 1, 2),  # torch's
    "bare": (0, 1, 0, 2),  # OLMo's
    "rms": (1, 1, 1, 1),  # Llama's
    "rms in float32": (1, 2, 0, 1),  # Gemma's
}
# The number of matrices of a feed-forward, and what a row saves in multiples of ffn_dim. "gelu" is computed in Python.
FEED_FORWARDS = {"gated": (3, 4), "plain": (2, 2), "gelu": (2, 5)}


class Blocks(NamedTuple):
    """How blocks, embedding and head are made, by default as in Llama. A str for a bool names a config.json field."""

    norm: str = "rms"
    num_norms: int = 2  # of the model's width, in a block
    head_norms: str = ""  # of query and key: of "each" head with the same weights, or of "all" at once
    ffn: str = "gated"
    qkv_bias: Any = "attention_bias"
    out_bias: Any = "attention_bias"
    ffn_bias: Any = "mlp_bias"
    head_bias: bool = False
    is_tied: Any = "tie_word_embeddings"  # embedding and head are one matrix
    is_fused: bool = False  # one matrix makes query, key and value: saving the value keeps all three
    is_parallel: Any = False  # attention and feed-forward start from the same rows
    has_sub_norms: bool = False  # of the attention's output, and of the feed-forward's width


LONGNET = Blocks("layer", 2, "", "plain", True, True, True, is_tied=False, is_fused=True, has_sub_norms=True)


class Shape(NamedTuple):
    """A model's sizes. Parameters and their gradients have param_itemsize bytes, activations itemsize."""

    num_layers: int
    embed_dim: int
    ffn_dim: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    itemsize: int = 4
    param_itemsize: int = 4
    own_head_dim: int | None = None  # None means embed_dim / num_heads
    blocks: Blocks = LONGNET

    @property
    def head_dim(self) -> int:
        return self.own_head_dim or self.embed_dim // self.num_heads

    @property
    def query_dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def block_matrices(self) -> int:
        """Entries of the matrices of one block."""
        attention = 2 * (self.query_dim + self.kv_dim)
        return self.embed_dim * (attention + FEED_FORWARDS[self.blocks.ffn][0] * self.ffn_dim)

    @property
    def block_parameters(self) -> int:
        made, e, f = self.blocks, self.embed_dim, self.ffn_dim
        biases = made.qkv_bias * (self.query_dim + 2 * self.kv_dim) + made.out_bias * e
        biases += made.ffn_bias * ((FEED_FORWARDS[made.ffn][0] - 1) * f + e)
        normed = made.num_norms * e + made.has_sub_norms * (self.query_dim + f)
        normed += {"": 0, "each": 2 * self.head_dim, "all": self.query_dim + self.kv_dim}[made.head_norms]
        return self.block_matrices + biases + NORMS[made.norm][0] * normed

    @property
    def num_parameters(self) -> int:
        made, e = self.blocks, self.embed_dim
        ends = ((2 - made.is_tied) * e + made.head_bias) * self.vocab_size + NORMS[made.norm][0] * e
        return self.num_layers * self.block_parameters + ends

    def saved(self) -> tuple[int, int, int]:
        """Bytes saved for each position: by a block, by a checkpointed block, and outside the blocks."""
        made, e, attended = self.blocks, self.embed_dim, self.query_dim + self.kv_dim
        scalars = NORMS[made.norm][3]
        normed = -(-made.num_norms // 2) * e + bool(made.head_norms) * attended
        block = self._normed(normed, normed) + (e + (2 + made.is_fused) * attended) * self.itemsize
        block += self.behind_attention + scalars * (made.num_norms + 2 * made.has_sub_norms) * FLOAT
        checkpoint, lse = (e + self.query_dim) * self.itemsize, self.num_heads * FLOAT
        return block + lse, checkpoint + lse, self.last_norm + (scalars + self.head_dim) * FLOAT + 16

    @property
    def behind_attention(self) -> int:
        """Bytes that a block saves after its attention, for each position."""
        made, e, f = self.blocks, self.embed_dim, self.ffn_dim
        normed = made.num_norms // 2 * e
        numbers = min(normed, e) + FEED_FORWARDS[made.ffn][1] * f + made.has_sub_norms * (self.query_dim + f)
        return self._normed(normed, 0 if made.is_parallel else normed) + numbers * self.itemsize

    @property
    def last_norm(self) -> int:
        """Bytes that the last norm and the head save for each position."""
        return self._normed(self.embed_dim, self.embed_dim) + self.embed_dim * self.itemsize

    def _normed(self, entries: int, own: int) -> int:
        """Bytes that norms save of `entries` numbers. For `own` of these, only the norm saves its input."""
        _, wide, narrow, _ = NORMS[self.blocks.norm]
        return wide * entries * max(FLOAT, self.itemsize) + narrow * own * self.itemsize
