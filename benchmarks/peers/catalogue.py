"""The list of peers: where each comes from, what it claims to compute, and which inputs its interface can express."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from ring_dilated_attention.pattern import DilatedPattern

from . import adapters

TORCH_VERSION = "2.13.0"
SEQ_LEN = 4096  # the patterns below are for this length; for another length they are scaled
DENSE = DilatedPattern.dense()
DILATED = DilatedPattern((1024, 4096), (1, 4))
BLOCKED = DilatedPattern((1024, 4096), (1, 4), phase="blocked")
SPLIT = DilatedPattern((1024, 4096), (1, 4), heads="split")


class Environment(NamedTuple):
    """A Python environment for peers.

    installs: the arguments of pip install, command by command. torch is installed before them.
    checkout: the environment variable that holds the folder of a clone, or "".
    prepare: a line of Python that is run in the environment before anything is checked or timed.
    """

    installs: tuple[str, ...] = ()
    checkout: str = ""
    prepare: str = ""


# Peers share an environment if their requirements agree, or if they are installed without requirements. "" is the
# environment in which `python -m benchmarks` runs.
ENVIRONMENTS = {
    "": Environment(),
    "rings": Environment(
        ("numpy ring-attention-pytorch==0.5.20 ring-flash-attn==0.1.8 yunchang==0.6.4",)
    ),
    "dilated": Environment(
        (
            "numpy einops==0.6.1",
            "--no-deps dilated-attention-pytorch==0.2.0 LongNet==0.5.7 zetascale==2.8.8 fairscale==0.4.13",
        ),
        checkout="TORCHSCALE_CHECKOUT",
    ),
    "deepspeed": Environment(
        ("numpy setuptools wheel ninja", "--no-build-isolation deepspeed==0.19.8"),
        # DeepSpeed compiles this op at its first use, which takes a minute or more. If a time limit ends the process
        # meanwhile, later processes hang.
        prepare="from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder as B; B().is_compatible() and B().load()",
    ),
}


class Peer(NamedTuple):
    """A library, or one way to call it: one row of the table.

    pattern: what the peer claims to compute, at SEQ_LEN positions.
    beside: the pattern that this library computes where costs are compared, if it is not the same.
    lacks: inputs that the peer's interface cannot express.
    not_run: inputs that the peer takes by a function that needs a GPU, and has no stand-in here.
    stands_in: what a stand-in replaces, and by what.
    shown_by: scripts in benchmarks/peer_errors that show a wrong result.
    """

    name: str
    version: str
    adapter: Callable[[adapters.Call], adapters.Attend]
    pattern: DilatedPattern
    environment: str = ""
    needs: str = ""  # an environment variable that must be set
    ranks: int = 1
    sharding: str = "contiguous"
    is_causal: bool = False  # whether the calls that are timed are causal
    dtype: torch.dtype = torch.float32
    has_backward: bool = True
    beside: DilatedPattern | None = None
    lacks: tuple[str, ...] = ()
    not_run: tuple[str, ...] = ()
    stands_in: str = ""
    shown_by: tuple[str, ...] = ()

    @property
    def lines(self) -> int:
        """The number of lines of the peer's adapter, without its first line, comments and blank lines."""
        function = self.adapter.func if isinstance(self.adapter, partial) else self.adapter
        lines = [line.strip() for line in inspect.getsource(function).splitlines()]
        return len([line for line in lines if line and not line.startswith("#")]) - 1


FLASH = "flash_attn by torch's CPU op"

PEERS = (
    Peer("this library", "", adapters.this_library, DILATED),
    Peer("this library, 2 ranks", "", adapters.this_library, DILATED, ranks=2),
    Peer("this library, dense ring", "", adapters.this_library, DENSE, ranks=2),
    Peer("torch SDPA", TORCH_VERSION, adapters.dense, DENSE, beside=DILATED),
    Peer("torch FlexAttention", TORCH_VERSION, adapters.flex, DILATED, has_backward=False),
    Peer(
        "torchscale",
        "4d1e0e8",
        adapters.torchscale,
        BLOCKED,
        environment="dilated",
        needs="TORCHSCALE_CHECKOUT",
        lacks=("grouped", "packed"),
        stands_in=FLASH,
        shown_by=("torchscale_gradient",),
    ),
    Peer(
        "torchscale seq_parallel",
        "4d1e0e8",
        adapters.torchscale,
        BLOCKED,
        environment="dilated",
        needs="TORCHSCALE_CHECKOUT",
        ranks=2,
        lacks=("grouped", "packed"),
        stands_in=FLASH,
        shown_by=("torchscale_causal",),
    ),
    Peer(
        "dilated-attention-pytorch",
        "0.2.0",
        adapters.dilated_attention_pytorch,
        SPLIT,
        environment="dilated",
        lacks=("packed",),
        stands_in="xformers by torch's SDPA",
        shown_by=("dilated_attention_pytorch_future",),
    ),
    Peer(
        "LongNet",
        "0.5.7",
        adapters.long_net,
        DilatedPattern((1024,), (2,)),
        environment="dilated",
        lacks=("grouped", "packed"),
        stands_in="zeta's __init__, by nothing",
        shown_by=("long_net_rows",),
    ),
    Peer(
        "ring-attention-pytorch",
        "0.5.20",
        adapters.ring_attention_pytorch,
        DENSE,
        environment="rings",
        ranks=2,
        lacks=("packed",),
        shown_by=("ring_attention_pytorch_dk",),
    ),
    *(
        Peer(
            f"ring-flash-attn {sharding}",
            "0.1.8",
            adapters.ring_flash_attn,
            DENSE,
            environment="rings",
            ranks=2,
            sharding=sharding,
            is_causal=sharding != "contiguous",
            dtype=torch.bfloat16,
            lacks=() if sharding == "contiguous" else ("full",),
            not_run=("packed",),
            stands_in=f"{FLASH}, __init__ (wants transformers) by nothing",
        )
        for sharding in ("contiguous", "zigzag", "stripe")
    ),
    *(
        Peer(
            f"yunchang {name}",
            "0.6.4",
            partial(adapters.yunchang, ulysses=ulysses),
            DENSE,
            environment="rings",
            ranks=2,
            sharding=sharding,
            is_causal=sharding == "zigzag",
            dtype=torch.bfloat16,
            lacks=() if sharding == "contiguous" else ("full",),
            not_run=("packed",),
            stands_in=FLASH,
        )
        for name, ulysses, sharding in (("Ulysses", 2, "contiguous"), ("zigzag ring", 1, "zigzag"))
    ),
    Peer(
        "yunchang ring, torch_math",
        "0.6.4",
        partial(adapters.yunchang, ulysses=1, attention="TORCH_MATH", ring="basic"),
        DENSE,
        environment="rings",
        ranks=2,
        has_backward=False,
        lacks=("packed",),
        shown_by=("yunchang_torch_math",),
    ),
    Peer(
        "DeepSpeed Ulysses",
        "0.19.8",
        adapters.deepspeed_ulysses,
        DENSE,
        environment="deepspeed",
        ranks=2,
    ),
    Peer(
        "torch context_parallel",
        TORCH_VERSION,
        adapters.torch_context_parallel,
        DENSE,
        ranks=2,
        sharding="zigzag",
        lacks=("packed",),
    ),
    Peer(
        "torch's private ring",
        TORCH_VERSION,
        adapters.torch_private_ring,
        DENSE,
        ranks=2,
        lacks=("packed",),
    ),
)
