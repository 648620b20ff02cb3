"""LongNetLM: a decoder-only transformer over dilated attention, from tokens to logits and to the loss.

Shape suffixes: B batch, N positions (the local ones under `parallel`), E embedding, V vocabulary, T rows of B times N.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..attention import save_attention
from ..layers import MultiheadDilatedAttention, RotaryTable, document_positions, is_integral
from ..plan.sharding import check_documents
from ..ranks.borders import validate_cu_seqlens
from ..ranks.context import ContextParallel
from ..ranks.origin import why_foreign
from ..run.dilated_cache import DilatedCache
from .longnet_config import LongNetConfig
from .sampling import Sampling, generate
from .saved_run import MODEL_FILE, check_whole, find_checkpoint
from .sharded import shift_left

IGNORED_LABEL = -1
# The logits of the loss are formed this many at a time, so that a long shard never holds (N, V) of them,
LOSS_CHUNK_LOGITS = 2**20
# but so many rows at least: each chunk adds to the gradient of the head, (V, E), and fewer would spend the time there.
LOSS_CHUNK_ROWS = 1024
# Small, so that the first guess is near uniform.
HEAD_STD = 0.02


class FeedForward(nn.Module):
    """fc2(subln(gelu(fc1(x)))): MAGNETO puts the LayerNorm before the second linear."""

    def __init__(self, embed_dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(embed_dim, ffn_dim)
        self.sub_layernorm = nn.LayerNorm(ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, embed_dim)

    def reset_parameters(self, *, gain: float) -> None:
        for linear in (self.fc1, self.fc2):
            nn.init.xavier_normal_(linear.weight, gain=gain)
            nn.init.zeros_(linear.bias)
        self.sub_layernorm.reset_parameters()

    def forward(self, x_BNE: Tensor) -> Tensor:
        return self.fc2(self.sub_layernorm(F.gelu(self.fc1(x_BNE))))


class LongNetBlock(nn.Module):
    """x + attention(ln(x)), then x + ffn(ln(x)), each with a sub-LayerNorm inside (MAGNETO, arXiv 2210.06423)."""

    def __init__(self, config: LongNetConfig, parallel: ContextParallel | None, backend: str) -> None:
        super().__init__()
        self.attention_layernorm = nn.LayerNorm(config.embed_dim)
        self.attention = MultiheadDilatedAttention(
            config.embed_dim,
            config.num_heads,
            config.pattern,
            num_kv_heads=config.num_kv_heads,
            sub_layernorm=True,
            rotary=config.rotary_base,
            parallel=parallel,
            backend=backend,
        )
        self.ffn_layernorm = nn.LayerNorm(config.embed_dim)
        self.ffn = FeedForward(config.embed_dim, config.ffn_dim or 4 * config.embed_dim)

    def forward(
        self,
        x_BNE: Tensor,
        table: RotaryTable,
        cu_seqlens: Tensor | None = None,
        cache: DilatedCache | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        normed = self.attention_layernorm(x_BNE)
        given = (normed, normed, normed)
        x_BNE = x_BNE + self.attention(*given, positions=table, cu_seqlens=cu_seqlens, cache=cache, lengths=lengths)[0]
        return x_BNE + self.ffn(self.ffn_layernorm(x_BNE))


class LongNetLM(nn.Module):
    """Tokens (B, N) to logits (B, N, V), on one device or, with `parallel`, on this rank's shard of the positions.

    Under `parallel` a loss of your own must not be a mean over the logits of each rank: ranks hold different numbers of
    terms, and the gradients that DDP and FSDP2 average would be wrong without a word. Take `loss`, or give
    `parallel.mean_loss` the sum and the number of this rank's terms.

    Args:
        activation_checkpointing: recompute each block in backward instead of keeping what it computed.
        backend: as of `dilated_attention`: which kernel computes attention.
    """

    def __init__(
        self,
        config: LongNetConfig,
        *,
        parallel: ContextParallel | None = None,
        activation_checkpointing: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if not isinstance(config, LongNetConfig):
            raise ValueError(f"config must be a LongNetConfig, got {config!r}.")
        if not isinstance(activation_checkpointing, bool):
            raise ValueError(f"activation_checkpointing must be True or False, got {activation_checkpointing!r}.")
        self.config = config
        self.parallel = parallel
        self.activation_checkpointing = activation_checkpointing
        self.embedding = nn.Embedding(config.vocab_size, config.embed_dim)
        self.blocks = nn.ModuleList(LongNetBlock(config, parallel, backend) for _ in range(config.num_layers))
        self.final_layernorm = nn.LayerNorm(config.embed_dim)
        self.head = nn.Linear(config.embed_dim, config.vocab_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """MAGNETO's decoder: gain sqrt(log(2 * num_layers)) on value, output and feed-forward weights."""
        gain = math.sqrt(math.log(2 * self.config.num_layers))
        nn.init.normal_(self.embedding.weight)
        nn.init.normal_(self.head.weight, std=HEAD_STD)
        self.final_layernorm.reset_parameters()
        for block in self._blocks():
            block.attention_layernorm.reset_parameters()
            block.attention.reset_parameters(gain=gain)
            block.ffn_layernorm.reset_parameters()
            block.ffn.reset_parameters(gain=gain)

    def forward(self, tokens_BN: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Integer tokens (B, N) -> logits (B, N, V) of the token after each of them.

        cu_seqlens: as for `dilated_attention`: packed documents, batch 1. Each is computed as if it were alone.
        """
        lengths, _ = self._agree(tokens_BN, cu_seqlens)
        return self.head(self._hidden(tokens_BN, lengths, cu_seqlens))

    def make_caches(self, batch: int, *, max_len: int | None = None, keep: int = 0) -> list[DilatedCache]:
        """A cache for each layer, for `append`. The arguments are those of `DilatedCache`."""
        return [block.attention.make_cache(batch, max_len=max_len, keep=keep) for block in self._blocks()]

    def append(self, tokens_BN: Tensor, caches: Sequence[DilatedCache], lengths: Tensor | None = None) -> Tensor:
        """Tokens that go on from what is cached -> their last hidden states (B, N, E), of which `head` makes logits.

        caches:  of `make_caches`. The tokens are appended to them. Under torch.no_grad().
        lengths: (B,) how many of its N tokens each batch entry appends; the rest is padding.
        """
        if self.parallel is not None:
            raise ValueError(
                "caches are of one device, and this model has parallel: make it with parallel=None and the same "
                "parameters."
            )
        if len(caches) != len(self.blocks):
            raise ValueError(f"{len(caches)} caches for {len(self.blocks)} layers: each has its own; use make_caches.")
        self._agree(tokens_BN, None)
        table = self._rotary_table(caches[0].next_positions(tokens_BN.shape[1]))
        x_BNE = self.embedding(tokens_BN.long())
        for block, cache in zip(self._blocks(), caches, strict=True):
            x_BNE = block(x_BNE, table, cache=cache, lengths=lengths)
        return self.final_layernorm(x_BNE)

    def generate(
        self,
        tokens: Tensor | Sequence[Sequence[int] | Tensor],
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: Collection[int] = (),
        caches: Sequence[DilatedCache] | None = None,
    ) -> Iterator[Tensor]:
        """The tokens that follow, (B,) at a time, as they are drawn. Memory and time per token do not grow with length.

        Args:
            tokens: (B, N), or prompts of different lengths; at least one token each.
            max_new_tokens: how many to draw for each prompt.
            temperature: of the distribution that is drawn from; 0 takes the likeliest token.
            top_k: draw from the k likeliest tokens alone.
            top_p: draw from the fewest tokens that are at least so likely together.
            seed: of 64 bits; row b of the batch draws as a batch of one would with seed + b. None draws anew each time
                (by torch's generator).
            stop: tokens that end a row. They are drawn, and then STOPPED (-1) until all rows have ended.
            caches: of `make_caches`, with what comes before `tokens`; by default new ones. They go on from here: each
                row's hold its prompt and all tokens that were drawn for it but the last.

        Raises:
            ValueError: at the first token at the latest, for arguments that cannot be; later, for logits that are NaN
                or inf.
        """
        options = Sampling(temperature, top_k, top_p, seed, stop)
        return generate(self, tokens, max_new_tokens, options, caches)

    @staticmethod
    def from_run(folder: str | Path, *, device: torch.device | str | None = None) -> "LongNetLM":
        """The model of a run of `rda train`, with the parameters of its newest checkpoint.

        Raises:
            ValueError: if there is none, or it cannot be read.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        checkpoint = find_checkpoint(Path(folder))
        if checkpoint is None:
            raise ValueError(f"{folder}: there is no checkpoint in this folder; pass the folder of a run of rda train")
        try:
            state = check_whole(checkpoint)
            model = LongNetLM(LongNetConfig.of_run(state["hyperparameters"]))
            model.load_state_dict(load_file(checkpoint / MODEL_FILE), strict=True)
        except (KeyError, OSError, SafetensorError, RuntimeError) as error:
            raise ValueError(f"{checkpoint} cannot be loaded: {error}") from error
        return model.to(device)

    def loss(self, tokens_BN: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Mean cross-entropy, in nats, of predicting every token but the first of each sequence or packed document.

        Under `parallel` the label of a shard's last position is the first token of the next shard. The value is the
        mean over all ranks, on every rank; the gradient is scaled so that the *mean* of the ranks' gradients (which
        DDP and FSDP2 take) is the gradient of one rank. They hook `forward`: wrap the model in `NextTokenLoss` first.
        """
        lengths, borders = self._agree(tokens_BN, cu_seqlens)
        num_labels = tokens_BN.shape[0] * sum(stop - start - 1 for start, stop in pairwise(borders))
        if num_labels < 1:
            raise ValueError(
                f"tokens of shape {tuple(tokens_BN.shape)} on this rank, {sum(lengths)} positions over all ranks in "
                f"{len(borders) - 1} documents: the loss predicts each token of a document from those before it and "
                "needs a batch with a document of at least 2"
            )
        labels_BN = self._labels(tokens_BN, lengths, borders)
        local_sum = self._cross_entropy_sum(self._hidden(tokens_BN, lengths, cu_seqlens), labels_BN)
        if self.parallel is None:
            return local_sum / num_labels
        return self.parallel.mean_loss(local_sum, (labels_BN != IGNORED_LABEL).sum())

    def _hidden(self, tokens_BN: Tensor, lengths: Sequence[int], cu_seqlens: Tensor | None) -> Tensor:
        if self.parallel is None:
            positions_N = document_positions(tokens_BN.shape[1], cu_seqlens, tokens_BN.device)
        else:
            positions_N = self.parallel.ranks.positions(lengths, cu_seqlens).to(tokens_BN.device)
        table = self._rotary_table(positions_N)
        x_BNE = self.embedding(tokens_BN.long())
        for block in self.blocks:
            if self.activation_checkpointing and torch.is_grad_enabled():
                x_BNE = checkpoint(
                    block,
                    x_BNE,
                    table,
                    cu_seqlens,
                    use_reentrant=False,
                    preserve_rng_state=False,
                    context_fn=save_attention,  # nothing is sent twice
                )
            else:
                x_BNE = block(x_BNE, table, cu_seqlens)
        return self.final_layernorm(x_BNE)

    def _cross_entropy_sum(self, hidden_BNE: Tensor, labels_BN: Tensor) -> Tensor:
        """Sum over this rank's positions; 0, but connected to every parameter, on a rank that owns none."""
        hidden_TE, labels_T = hidden_BNE.flatten(0, 1), labels_BN.flatten()
        rows = max(LOSS_CHUNK_ROWS, LOSS_CHUNK_LOGITS // self.config.vocab_size)
        total = hidden_TE.new_zeros((), dtype=torch.float32)
        for hidden, labels in zip(hidden_TE.split(rows), labels_T.split(rows), strict=True):
            total = total + checkpoint(
                self._chunk_cross_entropy_sum, hidden, labels, use_reentrant=False, preserve_rng_state=False
            )
        return total

    def _chunk_cross_entropy_sum(self, hidden_TE: Tensor, labels_T: Tensor) -> Tensor:
        logits_TV = self.head(hidden_TE)
        logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
        return F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORED_LABEL, reduction="sum")

    def _agree(self, tokens_BN: Tensor, cu_seqlens: Tensor | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Every rank's number of positions, and the borders of the documents: (0, N) where none are packed.

        A ValueError on every rank if one of them has tokens or borders that cannot be.
        """
        failure = None
        if not isinstance(tokens_BN, Tensor):
            failure = f"tokens must be a tensor of integers (batch, N), got {type(tokens_BN).__name__}"
        elif tokens_BN.dim() != 2 or not is_integral(tokens_BN):
            failure = (
                f"tokens have shape {tuple(tokens_BN.shape)} and dtype {tokens_BN.dtype}: pass integers (batch, N)"
            )
        elif self.parallel is not None and (foreign := why_foreign("tokens", tokens_BN, self.parallel.ranks)):
            failure = foreign
        elif not self._knows(tokens_BN):
            failure = f"tokens from {tokens_BN.min()} to {tokens_BN.max()}, but vocab_size={self.config.vocab_size}"
        elif cu_seqlens is not None:
            try:
                validate_cu_seqlens(cu_seqlens, tokens_BN.shape[0])
            except ValueError as error:
                failure = str(error)
        if self.parallel is None:
            if failure:
                raise ValueError(failure)
            lengths: tuple[int, ...] = (tokens_BN.shape[1],)
        else:
            batch, num_positions = (0, 0) if failure else tokens_BN.shape
            given = None if failure or cu_seqlens is None else cu_seqlens.tolist()
            fields = {"call": "LongNetLM", "batch": batch, "cu_seqlens": given}
            lengths = self.parallel.ranks.handshake(num_positions, fields, failure)
        if cu_seqlens is None:
            return lengths, (0, sum(lengths))
        borders = tuple(cu_seqlens.tolist())
        check_documents(borders, sum(lengths))
        return lengths, borders

    def _blocks(self) -> Iterator[LongNetBlock]:
        for block in self.blocks:
            assert isinstance(block, LongNetBlock)
            yield block

    def _rotary_table(self, positions: Tensor) -> RotaryTable:
        """One for all blocks."""
        return next(self._blocks()).attention.rotary_table(positions)

    def _knows(self, tokens_BN: Tensor) -> bool:
        """Whether all tokens have an embedding. (On a GPU torch asserts it, without waiting.)"""
        if tokens_BN.device.type != "cpu" or not tokens_BN.numel() or torch.compiler.is_compiling():
            return True
        return bool((tokens_BN >= 0).all()) and bool((tokens_BN < self.config.vocab_size).all())

    def _labels(self, tokens_BN: Tensor, lengths: Sequence[int], borders: Sequence[int]) -> Tensor:
        """The token after each. After the last of a document there is none, whatever stands there."""
        tokens_BN = tokens_BN.long()
        if self.parallel is None:
            rows_N = torch.arange(tokens_BN.shape[1], device="cpu")
            next_BN = F.pad(tokens_BN[:, 1:], (0, 1), value=IGNORED_LABEL)
        else:
            rows_N = self.parallel.ranks.positions(lengths)
            next_BN = shift_left(self.parallel, tokens_BN, IGNORED_LABEL)
        is_last_N = torch.isin(rows_N + 1, torch.tensor(borders, device="cpu"))
        return next_BN.masked_fill(is_last_N.to(next_BN.device), IGNORED_LABEL)


class NextTokenLoss(nn.Module):
    """`LongNetLM.loss` as a `forward`, which is what DDP and FSDP2 hook.

    loss_of = DistributedDataParallel(NextTokenLoss(model))
    loss_of(tokens).backward()
    """

    def __init__(self, model: LongNetLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_BN: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        return self.model.loss(tokens_BN, cu_seqlens)
