"""LongNetLM: a decoder-only transformer over dilated attention, from tokens to logits and to the loss.

Shape suffixes: B batch, N positions (this rank's under `parallel`), E embedding, V vocabulary, T rows of a slice of the
loss.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers import MultiheadDilatedAttention, RotaryTable
from ..plan.sharding import first_rows
from ..ranks.context import ContextParallel
from ..ranks.ranks import ALONE, positions_of
from ..ranks.reduce import mean_loss
from ..run.dilated_cache import DilatedCache
from ..run.views import on_device
from .documents import Documents, agree_on_documents, why_no_tokens
from .longnet_config import LongNetConfig
from .recompute import check_checkpointing, loss_slice_rows, run_layer, sum_in_slices
from .sampling import Sampling, generate
from .saved_run import check_whole, newest_checkpoint

IGNORED_LABEL = -1
# The standard deviation is small, so that an untrained model gives all tokens similar logits.
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

    def __init__(
        self, config: LongNetConfig, parallel: ContextParallel | None, backend: str
    ) -> None:
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
        attended, _ = self.attention(
            normed,
            normed,
            normed,
            positions=table,
            cu_seqlens=cu_seqlens,
            cache=cache,
            lengths=lengths,
        )
        x_BNE = x_BNE + attended
        return x_BNE + self.ffn(self.ffn_layernorm(x_BNE))


class LongNetLM(nn.Module):
    """A language model: tokens (B, N) to logits (B, N, V). Under `parallel` N is the length of this rank's shard.

    Under `parallel` no rank should compute a mean loss from its own logits alone. Ranks may hold different numbers of
    labels. Then the mean of the ranks' means is not the mean over all labels, and DDP and FSDP2 compute a wrong
    gradient. Instead call `loss`, or pass this rank's sum of losses and number of labels to `parallel.mean_loss`.

    Args:
        activation_checkpointing: keep only each block's input and attention output. Backward recomputes other tensors.
        backend: as for `dilated_attention`.
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
        check_checkpointing(activation_checkpointing)
        self.config = config
        self.parallel = parallel
        self.activation_checkpointing = activation_checkpointing
        self.embedding = nn.Embedding(config.vocab_size, config.embed_dim)
        self.blocks = nn.ModuleList(
            LongNetBlock(config, parallel, backend) for _ in range(config.num_layers)
        )
        self.final_layernorm = nn.LayerNorm(config.embed_dim)
        self.head = nn.Linear(config.embed_dim, config.vocab_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters anew, as MAGNETO does in a decoder.

        The weights of value projections, output projections and feed-forwards have the gain sqrt(log(2 * num_layers)).
        """
        self.reset_ends()
        for block in self.each_block():
            self.reset_block(block)

    def reset_ends(self) -> None:
        """Draw anew the parameters that belong to no block: embedding, last LayerNorm and head."""
        nn.init.normal_(self.embedding.weight)
        nn.init.normal_(self.head.weight, std=HEAD_STD)
        self.final_layernorm.reset_parameters()

    def reset_block(self, block: LongNetBlock) -> None:
        """Draw the parameters of one block anew, with MAGNETO's gain for the model's number of layers."""
        gain = math.sqrt(math.log(2 * self.config.num_layers))
        block.attention_layernorm.reset_parameters()
        block.attention.reset_parameters(gain=gain)
        block.ffn_layernorm.reset_parameters()
        block.ffn.reset_parameters(gain=gain)

    def forward(self, tokens_BN: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Integer tokens (B, N) -> logits (B, N, V). The logits at a position predict the next token.

        cu_seqlens: the borders of packed documents, as for `dilated_attention`, for a batch of 1. Tokens attend only
            within their own document.
        """
        documents = self._agree(tokens_BN, cu_seqlens)
        return self.head(self._hidden(tokens_BN, documents, cu_seqlens))

    def make_caches(
        self, batch: int, *, max_len: int | None = None, keep: int = 0
    ) -> list[DilatedCache]:
        """One empty cache for each layer, for `append`. The arguments are those of `DilatedCache`."""
        return [
            block.attention.make_cache(batch, max_len=max_len, keep=keep)
            for block in self.each_block()
        ]

    def append(
        self, tokens_BN: Tensor, caches: Sequence[DilatedCache], lengths: Tensor | None = None
    ) -> Tensor:
        """Append tokens (B, N) to caches. Returns the hidden states (B, N, E) of these tokens, the input of `head`.

        Call this under torch.no_grad().

        Args:
            caches: a cache for each layer, as `make_caches` returns them.
            lengths: (B,) how many tokens each batch entry appends. The later tokens of the entry are padding.
        """
        if len(caches) != len(self.blocks):
            raise ValueError(
                f"{len(caches)} caches for {len(self.blocks)} layers: pass one for each layer, made by make_caches."
            )
        if failure := why_no_tokens(tokens_BN, self.config.vocab_size):
            raise ValueError(failure)
        positions = caches[0].next_positions(tokens_BN.shape[1])
        table = next(self.each_block()).attention.rotary_table(positions)
        x_BNE = self.embedding(tokens_BN.long())
        for block, cache in zip(self.each_block(), caches, strict=True):
            x_BNE = block(x_BNE, table, cache=cache, lengths=lengths)
        return self.final_layernorm(x_BNE)

    def generate(
        self,
        tokens: Tensor | Sequence[Sequence[int] | Tensor],
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        seed: int | None = None,
        stop: Collection[int] = (),
        caches: Sequence[DilatedCache] | None = None,
    ) -> Iterator[Tensor]:
        """Continue B prompts. Each yielded tensor, (B,) int64, has one new token for each prompt.

        Memory and the time per token do not grow with the length of the sequences.

        Args:
            tokens: (B, N), or a list of prompts of different lengths. A prompt has at least one token.
            max_new_tokens: the number of tokens to draw for each prompt.
            temperature: divides the logits. 0 takes the likeliest token.
            seed: an integer of 64 bits; None takes a seed from torch. Prompt b gets the same tokens
                as in a call with only this prompt, and with the seed `seed + b`.
            stop: tokens that end a prompt's answer. After such a token the prompt gets STOPPED (-1) until all answers
                have ended.
            caches: a cache for each layer, as `make_caches` returns them; by default new caches. Caches may hold
                earlier tokens. Afterwards they also hold the prompts and the drawn tokens, except each prompt's last
                drawn token.

        Raises:
            ValueError: before the first token, for bad arguments. At any token, for logits that are NaN or inf.
        """
        return generate(self, tokens, max_new_tokens, Sampling(temperature, seed), stop, caches)

    @staticmethod
    def from_run(folder: str | Path, *, parallel: ContextParallel | None = None) -> "LongNetLM":
        """The model of a run of `rda train`, from the run's newest checkpoint.

        Raises ValueError if the run has no checkpoint, or if the newest checkpoint cannot be read.
        """
        try:
            from safetensors import SafetensorError

            from .rank_files import read_shards
        except ImportError as error:
            raise ValueError(
                "a run is loaded with safetensors: pip install 'ring-dilated-attention[train]'"
            ) from error
        checkpoint = newest_checkpoint(Path(folder))
        try:
            state = check_whole(checkpoint)
            model = LongNetLM(LongNetConfig.of_run(state["hyperparameters"]), parallel=parallel)
            # The model's state_dict also has records of the pattern, which the checkpoint's tensors lack. Take these
            # records from the model itself: it was made from the run's hyperparameters, so its pattern is the same.
            read = read_shards(checkpoint, dict(model.named_parameters()))
            model.load_state_dict(model.state_dict() | read, strict=True)
        except (KeyError, OSError, SafetensorError, RuntimeError) as error:
            raise ValueError(f"{checkpoint} cannot be loaded: {error}") from error
        return model

    def loss(
        self,
        tokens_BN: Tensor,
        cu_seqlens: Tensor | None = None,
        *,
        over: ContextParallel | None = None,
        step_count: int | Tensor | None = None,
    ) -> Tensor:
        """Mean cross-entropy, in nats, of predicting every token but the first of each sequence or packed document.

        Under `parallel` a position's label may be a token of another rank, and every rank returns the mean over all
        ranks. DDP and FSDP2 average gradients over the ranks. Averaged over the ranks, what a backward computes is the
        gradient of the mean of the ranks' losses.

        DDP and FSDP2 hook `forward`, not this method: wrap the model in `NextTokenLoss` first.

        over, step_count: as for `ContextParallel.mean_loss`. `over` is for replicas with sequences of different
            lengths, `step_count` for micro-batches of one step.
        """
        if over is not None and self.parallel is None:
            raise ValueError(
                "`over` needs a model whose ranks share sequences: make the model with parallel=ContextParallel(...)."
            )
        documents = self._agree(tokens_BN, cu_seqlens)
        num_labels = tokens_BN.shape[0] * sum(
            max(stop - start - 1, 0) for start, stop in pairwise(documents.borders)
        )
        labels_BN = self._labels(tokens_BN, documents)
        hidden_BNE = self._hidden(tokens_BN, documents, cu_seqlens)
        num_rows = loss_slice_rows(self.config.vocab_size)
        # Compute `local_sum` also on a rank without positions, where it is 0, so that every parameter gets a gradient.
        local_sum = sum_in_slices(self._cross_entropy, hidden_BNE, labels_BN, num_rows)
        if self.parallel is not None:
            local_count = (labels_BN != IGNORED_LABEL).sum()
            return self.parallel.mean_loss(local_sum, local_count, over=over, step_count=step_count)
        if step_count is not None:
            return mean_loss(ALONE, local_sum, num_labels, step_count)
        return local_sum / max(num_labels, 1)  # a batch without labels has loss 0

    def _hidden(self, tokens_BN: Tensor, documents: Documents, cu_seqlens: Tensor | None) -> Tensor:
        positions = on_device(positions_of(documents.shard, documents.borders), tokens_BN.device)
        table = next(self.each_block()).attention.rotary_table(positions)
        x_BNE = self.embedding(tokens_BN.long())
        for block in self.blocks:
            x_BNE = run_layer(
                block, x_BNE, table, cu_seqlens, recompute=self.activation_checkpointing
            )
        return self.final_layernorm(x_BNE)

    def _cross_entropy(self, hidden_TE: Tensor, labels_T: Tensor) -> Tensor:
        logits_TV = self.head(hidden_TE)
        logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
        return F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORED_LABEL, reduction="sum")

    def _agree(self, tokens_BN: Tensor, cu_seqlens: Tensor | None) -> Documents:
        """The documents of all ranks. Raises ValueError on every rank if one rank's tokens or borders do not fit."""
        failure = why_no_tokens(tokens_BN, self.config.vocab_size)
        return agree_on_documents(
            "LongNetLM", tokens_BN, parallel=self.parallel, cu_seqlens=cu_seqlens, failure=failure
        )

    def each_block(self) -> Iterator[LongNetBlock]:
        """The blocks, in the order in which `forward` runs them."""
        for block in self.blocks:
            assert isinstance(block, LongNetBlock)
            yield block

    def _labels(self, tokens_BN: Tensor, documents: Documents) -> Tensor:
        """The labels (B, N): at each position the next token, and IGNORED_LABEL at the last position of a document."""
        if self.parallel is None:
            next_BN = tokens_BN.long().roll(-1, 1)
        else:
            next_BN = shift_left(self.parallel, tokens_BN.long(), IGNORED_LABEL, documents.borders)
        last_rows = torch.tensor(documents.last_rows, dtype=torch.int64, device="cpu")
        return next_BN.index_fill(1, on_device(last_rows, next_BN.device), IGNORED_LABEL)


class NextTokenLoss(nn.Module):
    """A module with `LongNetLM.loss` as its `forward`, because DDP and FSDP2 hook only `forward`.

    loss_of = DistributedDataParallel(NextTokenLoss(model))
    loss_of(tokens).backward()
    """

    def __init__(self, model: LongNetLM) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        tokens_BN: Tensor,
        cu_seqlens: Tensor | None = None,
        *,
        over: ContextParallel | None = None,
        step_count: int | Tensor | None = None,
    ) -> Tensor:
        return self.model.loss(tokens_BN, cu_seqlens, over=over, step_count=step_count)


def shift_left(
    parallel: ContextParallel, x: Tensor, fill: int, documents: tuple[int, ...] | None = None
) -> Tensor:
    """The integers x (B, N_local) shifted by one position: each position gets the integer of the next position.

    The next position may lie on another rank. The last position of the sequence gets `fill`.
    """
    ranks = parallel.ranks
    ranks.check_all_here("shift_left")
    batch, num_rows = x.shape
    with ranks.turn:
        fields: dict[str, object] = {"call": "shift_left", "batch": batch, "fill": fill}
        lengths = ranks.handshake(num_rows, fields)
        shards = ranks.shards(lengths, documents)
        shard = shards[ranks.rank]
        with ranks.all_or_none():
            # A shard consists of spans (runs of consecutive positions). Send the first integer of each span of this
            # rank to all ranks. The position before a span needs this integer, and any rank may hold that position.
            record = torch.zeros(max(2, *map(len, shards)), batch, dtype=torch.int64, device="cpu")
            for first_B, row, _ in zip(record, first_rows(shard), shard, strict=False):
                first_B.copy_(x[:, row])
            records = ranks.records(record, "the exchange of labels")
    firsts: dict[int, Tensor] = {}  # a span's first position -> its first integers (B,)
    for spans, record in zip(shards, records, strict=True):
        for span, first_B in zip(spans, record, strict=False):
            firsts[span.start] = first_B
    shifted = x.roll(-1, dims=1)  # the loop below corrects the last position of each span
    for row, span in zip(first_rows(shard), shard, strict=False):
        last = row + span.stop - span.start - 1
        shifted[:, last] = firsts[span.stop].to(x) if span.stop in firsts else fill
    return shifted
