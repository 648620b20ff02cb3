"""`rda doctor`: what one process says of itself, its host and its environment."""

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ...kernels.choose import BACKENDS, reasons
from ...training.run_report import hardware, versions
from ..limits import physical_bytes

# What runs are known to be slow, or to hang, by; and what no library reads any more.
HARMFUL = {
    "NCCL_TREE_THRESHOLD": "NCCL reads it no more since 2.5; unset it (NCCL_ALGO chooses, and chooses well by itself)",
    "NCCL_LL_THRESHOLD": "NCCL reads it no more since 2.5; unset it",
    "NCCL_ASYNC_ERROR_HANDLING": "torch reads TORCH_NCCL_ASYNC_ERROR_HANDLING; rename or unset it",
    "NCCL_BLOCKING_WAIT": "torch reads TORCH_NCCL_BLOCKING_WAIT; unset it",
    "TORCH_NCCL_BLOCKING_WAIT": "the host waits for every message, and nothing overlaps; unset it",
    "NCCL_P2P_DISABLE": "GPUs of a host talk through its memory instead of NVLink; unset it",
    "NCCL_IB_DISABLE": "hosts talk over sockets instead of InfiniBand; unset it unless there is none",
    "NCCL_SHM_DISABLE": "processes of a host talk over sockets; unset it",
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for; unset it",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every tensor is a call of the driver; unset it",
    "TRITON_INTERPRET": "Triton's kernels run in Python; unset it",
}
OBSOLETE = ("NCCL_TREE_THRESHOLD", "NCCL_LL_THRESHOLD")  # whatever their values
MATTER = (
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_P2P_LEVEL", "NCCL_ALGO", "NCCL_DEBUG"),
    *("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF"),
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_DISTRIBUTED_DEBUG"),
)
WORTH_16_BITS = 1.1  # times as fast; less is within what measurements differ by, and float32 is more exact
OFF = ("", "0", "false", "False")
WRITTEN_BYTES = 32 * 2**20
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def facts(rank: int, device: str, folder: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """All that can be said without another rank. environment: as the user set it."""
    card = gpu(device)
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "versions": versions() | gpu_versions(),
        "hardware": hardware(),
        "threads": torch.get_num_threads(),
        "device": device,
        "gpu": card,
        "memory_bytes": float(card["memory_bytes"]) if card else physical_bytes(),
        "backends": against(device),
        "harmful": harmful(environment),
        "matter": {name: environment[name] for name in MATTER if name in environment},
        "folder": storage(folder),
    }


def gpu(device: str) -> dict[str, Any] | None:
    if not device.startswith("cuda"):
        return None
    found = torch.cuda.get_device_properties(device)
    return {"name": found.name, "capability": [found.major, found.minor], "memory_bytes": found.total_memory}


def gpu_versions() -> dict[str, str]:
    """The versions of torch's CUDA and NCCL, and of the driver's kernel module; "none" where there is none."""
    found = {"CUDA": torch.version.cuda or "none", "NCCL": "none", "GPU driver": "none"}
    with suppress(AttributeError, ImportError, RuntimeError):  # torch is built without NCCL
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    with suppress(OSError, UnicodeDecodeError, IndexError):
        first = NVIDIA_DRIVER.read_text().splitlines()[0]
        found["GPU driver"] = " ".join(first.removeprefix("NVRM version:").split())
    return found


def dtype_advice(card: dict[str, Any] | None, speedup: float) -> str:
    """Which dtype to train in, and why. speedup: of attention in bfloat16 over float32, as measured."""
    if card is None:
        faster = "bfloat16" if speedup >= WORTH_16_BITS else "float32"
        return f"{faster}: attention in bfloat16 was {speedup:.2f} times as fast as in float32 on this CPU"
    major = card["capability"][0]
    if major >= 8:
        return "bfloat16: its matrix units are 16-bit, and its range is float32's"
    if major == 7:
        return "float16 with loss scaling: its matrix units know no bfloat16"
    return "float32: Pascal and older have no matrix units, and compute 16-bit types no faster"


def against(device: str) -> dict[str, str | None]:
    """Why each backend cannot serve a 16-bit tensor on a GPU, or float32 on a CPU; None if it can."""
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    found = reasons(torch.empty(1, 1, 1, 64, dtype=dtype, device=device))
    return {name: reason or BACKENDS[name].ONLY_BY_NAME for name, reason in found.items()}


def harmful(environment: Mapping[str, str]) -> dict[str, str]:
    is_set = {name: name in environment and environment[name] not in OFF for name in HARMFUL}
    return {name: why for name, why in HARMFUL.items() if is_set[name] or (name in environment and name in OBSOLETE)}


def storage(folder: Path) -> dict[str, Any]:
    """Free bytes, and bytes in a second of one file that is flushed to the disk; or why nothing can be written."""
    there = folder
    try:
        there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
        with tempfile.NamedTemporaryFile(dir=there) as file:
            began = time.perf_counter()
            file.write(os.urandom(2**20) * (WRITTEN_BYTES // 2**20))
            file.flush()
            os.fsync(file.fileno())
            seconds = time.perf_counter() - began
        free = shutil.disk_usage(there).free
    except OSError as error:
        return {"path": str(there), "failure": error.strerror or str(error)}
    return {"path": str(there), "free_bytes": free, "bytes_per_second": WRITTEN_BYTES / seconds}
