"""One rank that runs snippets of docs/migrating.md, in an environment that has torch and perhaps peers.

    torchrun --nproc-per-node 2 peer.py FOLDER SIDE

FOLDER/jobs.pt holds snippets and the tensors that they are given, by names. FOLDER/NAME/SIDE0.pt receives what rank 0
found, and so on: `out` and the gradients of the sum of its squares, or what was raised. A snippet runs in FOLDER/NAME:
what it saves is there for the other snippet of its pair.
"""

import os
import sys
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist


def torchscale_on_a_cpu() -> None:
    """torchscale takes flash_attn's function only if there is a GPU, and asks CUDA where to gather."""
    from torchscale.component import flash_attention

    def flash(q, k, v, dropout, bias, scale, is_causal):
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = op(*(x.transpose(1, 2) for x in (q, k, v)), dropout, is_causal, scale=scale)
        return out.transpose(1, 2), lse

    flash_attention.flash_attn_func = flash
    torch.cuda.current_device = lambda: "cpu"


def found_by(snippet: str, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's `out` (the whole, where the snippet has a ContextParallel), and its gradients."""
    torch.manual_seed(0)  # every rank makes the same weights
    names = {"torch": torch, "dist": dist, **given}
    leaves = {f"d{name[0]}": names[name].requires_grad_() for name in ("query", "key", "value")}
    exec(compile(snippet, "snippet", "exec"), names)
    out = names["out"]
    if "parallel" in names:
        out = names["parallel"].unshard(out, cu_seqlens=names.get("borders"))
    if out.requires_grad:
        out.float().square().sum().backward()
    if "parallel" in names:
        names["parallel"].close()
    return {"out": out.detach()} | {
        name: x.grad for name, x in leaves.items() if x.grad is not None
    }


def main(folder: Path, side: str) -> None:
    jobs = torch.load(folder / "jobs.pt", weights_only=True)
    if os.environ["WORLD_SIZE"] != "1":
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    if find_spec("torchscale"):
        torchscale_on_a_cpu()
    for name, job in jobs.items():
        (folder / name).mkdir(exist_ok=True)
        os.chdir(folder / name)
        try:
            found = found_by(**job)
        except Exception as error:  # noqa: BLE001  whatever it is, the page may say so
            found = {"raised": f"{type(error).__name__}: {error}"}
        torch.save(found, f"{side}{os.environ['RANK']}.pt")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
