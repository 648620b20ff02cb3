"""Packs a padded batch: each batch entry becomes a document of its own length, in a batch of one.

A row is the E numbers of one position. Shape suffixes: B batch, N positions, T packed rows, E width of a row.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.validate import valid_lengths, valid_lengths_op
from ..run.views import on_device
from .rotary import RotaryTable


class ValidRows:
    """The rows of a padded batch that are not padding, packed one after the other.

    rows_T: the indices of the valid rows among all B N rows of the batch. cu_seqlens: the borders of the documents, or
    None if no position is valid, because then there is no document.
    """

    def __init__(self, mask_BN: Tensor, x_BNE: Tensor) -> None:
        self.batch, self.num_positions, _ = x_BNE.shape
        lengths_B = valid_lengths(mask_BN, self.batch, self.num_positions)
        is_valid_BN = torch.arange(self.num_positions, device=lengths_B.device) < lengths_B[:, None]
        self.rows_T = on_device(is_valid_BN.flatten().nonzero().squeeze(1), x_BNE.device)
        self.cu_seqlens: Tensor | None = None
        if len(self.rows_T):
            borders = F.pad(lengths_B[lengths_B > 0].cumsum(0), (1, 0))
            self.cu_seqlens = borders.to(torch.int32)

    def pack(self, x_BNE: Tensor) -> Tensor:
        return x_BNE.flatten(0, 1)[self.rows_T].unsqueeze(0)

    def pack_table(self, table: RotaryTable) -> RotaryTable:
        return table.of_rows(self.rows_T % self.num_positions)

    def unpack(self, x_1TE: Tensor) -> Tensor:
        """The padded batch, with zeros at padding."""
        zeros = x_1TE.new_zeros(self.batch * self.num_positions, x_1TE.shape[-1])
        rows = zeros.index_copy(0, self.rows_T, x_1TE[0])
        return rows.unflatten(0, (self.batch, self.num_positions))


class AllRows:
    """All rows of a padded batch, packed. Compiled code uses this class instead of `ValidRows`, because here no shape
    depends on the mask.

    Each batch entry becomes two documents: its valid positions, and its padding, set to zero. Each entry gets one more
    position of padding, because no document may be empty.
    """

    def __init__(self, mask_BN: Tensor, x_BNE: Tensor) -> None:
        self.batch, self.num_positions, _ = x_BNE.shape
        lengths_B = valid_lengths_op(mask_BN, self.batch, self.num_positions)
        starts_B = torch.arange(self.batch, device=lengths_B.device) * (self.num_positions + 1)
        padding_starts_B = starts_B + lengths_B.clamp(min=1)
        ends = torch.stack([padding_starts_B, starts_B + self.num_positions + 1], dim=1)
        self.cu_seqlens = F.pad(ends.flatten(), (1, 0)).to(torch.int32)
        self.positions_N = torch.arange(self.num_positions, device=x_BNE.device)
        is_padding_BN = self.positions_N >= on_device(lengths_B, x_BNE.device)[:, None]
        self.is_padding_BN1 = is_padding_BN[..., None]

    def pack(self, x_BNE: Tensor) -> Tensor:
        rows_BNE = F.pad(x_BNE.masked_fill(self.is_padding_BN1, 0), (0, 0, 0, 1))
        return rows_BNE.flatten(0, 1).unsqueeze(0)

    def pack_table(self, table: RotaryTable) -> RotaryTable:
        return table.of_rows(F.pad(self.positions_N, (0, 1)).repeat(self.batch))

    def unpack(self, x_1TE: Tensor) -> Tensor:
        """The padded batch, with zeros at padding."""
        rows_BNE = x_1TE[0].unflatten(0, (self.batch, self.num_positions + 1))[:, :-1]
        return rows_BNE.masked_fill(self.is_padding_BN1, 0)


def packed_rows(mask_BN: Tensor, x_BNE: Tensor) -> ValidRows | AllRows:
    """An object that packs tensors like x (B, N, E) by a mask (B, N), True at padding.

    Raises:
        ValueError: for a mask that does not fit.
    """
    if torch.compiler.is_compiling():
        return AllRows(mask_BN, x_BNE)
    return ValidRows(mask_BN, x_BNE)
