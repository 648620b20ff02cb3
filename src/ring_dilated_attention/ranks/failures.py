"""`ExchangeError` is raised if a message does not arrive. Two functions find the reason and the usual cause."""

import re

NOT_MADE = "did not enter making a ContextParallel"

# Usual reasons why a rank that still runs does not take part in a call. `usual_cause` looks for each key (such as "did
# not enter backward") in the error's text, and takes the sentence of the first key that it finds.
_USUAL_CAUSES = {
    "did not enter backward": "A rank runs the backward of a call only if its loss depends on the output of that call.",
    NOT_MADE: (
        "If it did make one, these ranks may have made different numbers of contexts of just these ranks before. A "
        "group is named by this number, and each rank waits under another name: make contexts alike on all ranks."
    ),
    "did not enter": (
        "If that rank is well, only some ranks make this call, as in an evaluation under `if rank == 0`, and it waits "
        "for the others. Make it on all ranks, or with a model without `parallel`."
    ),
}


class ExchangeError(RuntimeError):
    """Raised if a rank died, is stuck, or gave up. The context stays broken: make a new ContextParallel of the
    ranks that still run."""


def usual_cause(absence: str, reason: str) -> str:
    """The usual cause of a timeout, as a sentence; "" for other errors.

    absence: the part of the error's text that says what is missing, such as "rank 1 did not enter backward 3". reason:
    the error text of gloo or NCCL.
    """
    if not re.search("[Tt]imed out|timeout", reason):
        return ""
    for what_is_missing, cause in _USUAL_CAUSES.items():
        if what_is_missing in absence:
            return f" {cause}"
    return ""


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def reason_of(error: Exception) -> str:
    """The reason that gloo or NCCL gives in an error, without the place in the source code and without advice."""
    reason = (
        re.sub(r"^\[\S+:\d+\] ", "", first_line(error)).split(". This is typically")[0].rstrip(".")
    )
    if re.search("onnection (closed|reset|refused)", reason) and "that rank" not in reason:
        reason += ": that rank died, or gave up after an error of its own"
    return reason + "."
