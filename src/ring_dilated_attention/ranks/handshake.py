"""Checks that all ranks make the same call: before each call they compare fingerprints. Only if these differ do they
exchange what they call, in records of one fixed size."""

import hashlib

import torch

from .link import GroupLink

_NUM_FIELDS = 16  # a record has room for so many; no call compares more
# The last fields. Ranks compare which module calls only if all have made equally many: else numbers say nothing.
NUM_MODULES = "the number of modules made with this context"
CALLER = "which module calls (numbered as modules were made with this context)"


class RefusedError(ValueError):
    """Raised on all ranks alike: one of them refuses a call, or their calls differ. Nothing was sent."""


def agree(control: GroupLink, length: int, fields: dict[str, object], failure: str | None) -> tuple[int, ...]:
    """Every rank's number of positions, once it is clear that all make the same call. The numbers are gathered only if
    some rank has another number than in its last call of this kind.

    Args:
        length: this rank's number of positions, or any other number that ranks tell each other.
        fields: what must be the same on all ranks, by name. Fingerprints are compared; only a mismatch is sent as text.
        failure: why this rank refuses the call, if it does.

    Raises:
        ValueError: on every rank, if any refuses or fields differ.
    """
    moment = str(fields.get("call", "the call that this rank refuses"))
    kind, agreed = moment.rstrip(" 0123456789"), control.agreed
    is_new = kind not in agreed or agreed[kind][control.rank] != length
    mark = 0 if failure is not None else _fingerprint(fields)
    largest, opposite, any_new = control.largest(torch.tensor([mark, -mark, is_new], device="cpu"), moment).tolist()
    control.last_words.is_connecting = False  # all ranks are here: none connects for an earlier call
    if largest != -opposite or not largest:
        _raise_alike(control, fields, failure, moment)
    if any_new:
        own = torch.full((control.world_size,), torch.iinfo(torch.int64).min, device="cpu")
        own[control.rank] = length
        agreed[kind] = tuple(control.largest(own, moment).tolist())
    return agreed[kind]


def _raise_alike(control: GroupLink, fields: dict[str, object], failure: str | None, moment: str) -> None:
    """Find the words for what is wrong: a rank refuses, or a field differs. Only `NUM_MODULES` may differ."""
    assert len(fields) <= _NUM_FIELDS, "records of two lengths would meet"
    marks = [*map(_fingerprint, fields.values()), *[0] * (_NUM_FIELDS - len(fields))]
    records = control.records(torch.tensor([failure is not None, *marks], device="cpu"), moment)
    table = torch.stack(records).tolist()
    if any(row[0] for row in table):
        found = zip(control.members, control.texts(failure or "", moment), strict=True)
        reasons = {member: text for member, text in found if text}
        refused = "; ".join(f"rank {member} refused the call: {text}" for member, text in reasons.items())
        raise RefusedError(failure if failure is not None and len(set(reasons.values())) == 1 else refused)
    name = next(name for k, name in enumerate(fields, start=1) if len({row[k] for row in table}) > 1)
    if name == NUM_MODULES:
        control.counts_modules = False
        return
    texts = control.texts(str(fields[name]), moment)
    listed = ", ".join(f"rank {m} has {text}" for m, text in zip(control.members, texts, strict=True))
    remedy = "All ranks of a group must make the same call; nothing was sent."
    if name == CALLER:
        remedy += " If layers are dropped at random, drop the same ones on all ranks."
    raise RefusedError(f"ranks disagree on {name}: {listed}. {remedy}")


def _fingerprint(value: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest())
