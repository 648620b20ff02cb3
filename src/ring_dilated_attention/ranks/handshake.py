"""All ranks make the same call, or none does: one record of fixed size to and from everybody before each call."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from .link import GroupLink

# Columns of a record: at least as many as any call compares.
_NUM_FIELDS = 16


class Breakable(Protocol):
    """Connections that can be broken on purpose, so that the other ranks fail at once instead of waiting."""

    def abandon(self, reason: str) -> None: ...


class RefusedError(ValueError):
    """What all ranks raise alike: one of them refuses a call, or they make different ones. Nothing of it was sent."""


@contextmanager
def all_or_none(connections: Breakable, *agreed: type[Exception]) -> Iterator[None]:
    """Whatever fails on this rank alone (memory, say) must not leave the others waiting for it.

    `agreed` are the errors that all ranks raise alike: a call that all refuse breaks nothing.
    """
    try:
        yield
    except agreed:
        raise
    except BaseException as error:
        connections.abandon(f"{type(error).__name__}: {error}")
        raise


def agree(control: GroupLink, length: int, fields: dict[str, object], failure: str | None) -> tuple[int, ...]:
    """Every rank's local length, once all ranks turn out to make the same call.

    Args:
        length: this rank's number of positions.
        fields: what must agree, by name. Compared by fingerprint; only a mismatch is sent in words.
        failure: why this rank refuses the call, if it does.

    Raises:
        ValueError: on every rank, if any refuses or fields differ.
    """
    moment = str(fields.get("call", "the call that this rank refuses"))
    assert len(fields) <= _NUM_FIELDS, "records of two lengths would meet"
    marks = [_fingerprint(value) for value in fields.values()]
    marks += [0] * (_NUM_FIELDS - len(marks))
    records = control.all_to_all(torch.tensor([length, failure is not None, *marks], device="cpu"), moment)
    table = torch.stack(records).tolist()
    if any(row[1] for row in table):
        texts = control.texts(failure or "", moment)
        refused = [
            f"rank {member} refused the call: {text}"
            for member, text in zip(control.members, texts, strict=True)
            if text
        ]
        alike = len({text for text in texts if text}) == 1
        raise RefusedError(failure if failure is not None and alike else "; ".join(refused))
    for column, name in enumerate(fields, start=2):
        if len({row[column] for row in table}) > 1:
            texts = control.texts(str(fields[name]), moment)
            listed = ", ".join(f"rank {m} has {text}" for m, text in zip(control.members, texts, strict=True))
            raise RefusedError(
                f"ranks disagree on {name}: {listed}. All ranks of a group must make the same call; nothing was sent."
            )
    return tuple(row[0] for row in table)


def _fingerprint(value: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest())
