"""Checks that all ranks make the same call. A call has fields, such as its pattern, its shape and its dtype.

Before each call the ranks compare one number, a hash of all fields. If the hashes differ, they send each other a record
(a tensor with a hash of each field), and then the text of the field that differs.
"""

import hashlib

import torch

from .link import GroupLink

_NUM_FIELDS = 16  # the number of fields in a record; no call has more fields
_NOT_THIS_RANK = torch.iinfo(torch.int64).min
# The names of the last two fields of a call. Each rank numbers its modules 1, 2, ... as it makes them. So ranks can
# compare the number of the calling module only if all ranks have made equally many modules.
NUM_MODULES = "the number of modules made with this context"
CALLER = "which module calls (numbered as modules were made with this context)"


class RefusedError(ValueError):
    """Raised on all ranks, before any tensor is sent, if a rank refuses a call because its arguments are wrong, or if
    the calls of the ranks differ."""


def agree(
    control: GroupLink, length: int, fields: dict[str, object], failure: str | None
) -> tuple[int, ...]:
    """Check that all ranks make the same call. Returns every rank's `length`.

    Ranks send each other their lengths only if the length of some rank has changed since the last call of this kind
    (forward, backward, shard, ...).

    Args:
        length: this rank's number of positions, or another number that ranks send each other.
        fields: the values that must be the same on all ranks, by name.
        failure: why this rank refuses the call, or None if the rank accepts the call.

    Raises:
        RefusedError: on every rank, if any rank refuses the call or a field differs between ranks.
    """
    moment = str(fields.get("call", "the call that this rank refuses"))
    kind = moment.rstrip(" 0123456789")
    is_new = kind not in control.agreed or control.agreed[kind][control.rank] != length
    mark = 0 if failure is not None else _fingerprint(fields)
    record = torch.tensor([mark, -mark, is_new], device="cpu")
    largest, opposite_of_smallest, any_is_new = control.largest(record, moment).tolist()
    if largest != -opposite_of_smallest or not largest:
        _raise_alike(control, fields, failure, moment)
    if any_is_new:
        lengths = torch.full((control.world_size,), _NOT_THIS_RANK, device="cpu")
        lengths[control.rank] = length
        control.agreed[kind] = tuple(control.largest(lengths, moment).tolist())
    return control.agreed[kind]


def _raise_alike(
    control: GroupLink, fields: dict[str, object], failure: str | None, moment: str
) -> None:
    """Raise RefusedError on all ranks. The error says which rank refuses the call, or which field differs.

    If the first field that differs is `NUM_MODULES`, no error is raised. In this case some ranks have made more modules
    than others, and the same layer may be module 3 on one rank and module 4 on another. From then on ranks do not
    compare the numbers of the calling modules.
    """
    assert len(fields) <= _NUM_FIELDS, "records of two lengths would meet"
    marks = [_fingerprint(value) for value in fields.values()]
    padding = [0] * (_NUM_FIELDS - len(fields))
    records = control.records(
        torch.tensor([failure is not None, *marks, *padding], device="cpu"), moment
    )
    # `refuses` and each of `columns` have an entry for every rank. `columns[i]` has the hashes of field i.
    refuses, *columns = torch.stack(records).T.tolist()
    if any(refuses):
        texts = control.texts(failure or "", moment)
        reasons = {
            member: text for member, text in zip(control.members, texts, strict=True) if text
        }
        if failure is not None and len(set(reasons.values())) == 1:
            raise RefusedError(failure)
        listed = (f"rank {member} refused the call: {text}" for member, text in reasons.items())
        raise RefusedError("; ".join(listed))

    name = next(name for name, column in zip(fields, columns, strict=False) if len(set(column)) > 1)
    if name == NUM_MODULES:
        control.counts_modules = False
        return

    texts = control.texts(str(fields[name]), moment)
    values = ", ".join(
        f"rank {member} has {text}" for member, text in zip(control.members, texts, strict=True)
    )
    remedy = "All ranks of a group must make the same call; nothing was sent."
    if name == CALLER:
        remedy += " If layers are dropped at random, drop the same ones on all ranks."
    raise RefusedError(f"ranks disagree on {name}: {values}. {remedy}")


def _fingerprint(value: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest())
