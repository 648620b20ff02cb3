"""Chooses the backend that computes an attention call. A backend's function `why_not` returns the reason why this
backend cannot serve a tensor, or None."""

from torch import Tensor

from . import cpu, sdpa
from .contract import Kernel

BACKENDS: dict[str, Kernel] = {kernel.NAME: kernel for kernel in (cpu, sdpa)}


def check_backend(backend: object) -> None:
    if not isinstance(backend, str) or (backend != "auto" and backend not in BACKENDS):
        raise ValueError(f"backend={backend!r} is unknown; choose one of {('auto', *BACKENDS)}.")


def reasons(query: Tensor) -> dict[str, str | None]:
    """For each backend the reason why it cannot serve the tensor, or None if it can."""
    return {name: kernel.why_not(query) for name, kernel in BACKENDS.items()}


def choose(backend: str, query: Tensor) -> Kernel:
    """The kernel of the named backend. Under "auto" it is the first kernel that can serve the tensor.

    Raises:
        ValueError: if the named backend, or under "auto" every backend, cannot serve the tensor. The message says why.
    """
    check_backend(backend)
    if backend != "auto":
        if reason := BACKENDS[backend].why_not(query):
            raise ValueError(f"backend={backend!r} {reason}. Use backend='auto', or other tensors.")
        return BACKENDS[backend]
    for kernel in BACKENDS.values():
        if kernel.why_not(query) is None:
            return kernel
    listed = "; ".join(f"{name} {why}" for name, why in reasons(query).items())
    raise ValueError(f"no backend can run this: {listed}.")
