"""Serving a long prompt: several ranks compute it, then one rank writes on.

    torchrun --nproc-per-node 2 examples/serve.py
    torchrun --nproc-per-node 2 examples/serve.py \\
             --model runs/NAME --prompt-file book.txt     a run of `rda train`

The ranks hand over only those rows that a later token can still see. Rank 0
then computes the prompt alone too, and the two texts are compared. Without
--model the parameters are random, and the text means nothing.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_dilated_attention import ContextParallel, DilatedCache
from ring_dilated_attention.layers import rotate
from ring_dilated_attention.models import LongNetConfig, LongNetLM


@torch.no_grad()
def prefill(model: LongNetLM, prompt: Tensor, max_len: int, to: int) -> tuple[Tensor, list[Any]]:
    """The likeliest token after the prompt (1, N), on every rank; and on rank `to` a cache of each layer, else None.

    The hook reads what a layer's attention is given, and makes the keys and values from it, as the attention does.
    """
    parallel, caches = model.parallel, []

    def hand_over(attention: Any, args: tuple[Tensor, ...], kwargs: dict[str, Any], out: Any) -> None:
        projected = nn.functional.linear(args[0], attention.in_proj_weight, attention.in_proj_bias)
        width = attention.num_kv_heads * attention.head_dim
        sizes = (attention.embed_dim, width, width)
        _, key, value = (x.unflatten(-1, (-1, attention.head_dim)) for x in projected.split(sizes, dim=-1))
        key = rotate(key, kwargs["positions"])
        limits = {"to": to, "max_len": max_len}
        caches.append(DilatedCache.gather(parallel, key, value, attention.pattern, attention.num_heads, **limits))

    hooks = [block.attention.register_forward_hook(hand_over, with_kwargs=True) for block in model.blocks]
    logits = model(parallel.shard(prompt))
    for hook in hooks:
        hook.remove()
    token = logits[:, -1:].argmax(-1)  # of this shard's last position: that of the last rank is the prompt's
    if dist.is_initialized():
        dist.broadcast(token, src=dist.get_world_size() - 1)
    return token, caches


def write(model: LongNetLM, prompt: Tensor, count: int, caches: list[DilatedCache] | None = None) -> list[int]:
    return [token.item() for token in model.generate(prompt, count, temperature=0, caches=caches)]


def make_model(run: Path | None, parallel: ContextParallel | None) -> LongNetLM:
    if run is not None:
        return LongNetLM.from_run(run, parallel=parallel)
    torch.manual_seed(0)  # the same parameters on every rank
    config = LongNetConfig((256, 4096, 65_536), (1, 16, 256), embed_dim=64, num_layers=2, num_heads=4, num_kv_heads=2)
    return LongNetLM(config, parallel=parallel)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="the folder of a run of rda train (default: random parameters)")
    parser.add_argument("--prompt-file", type=Path, help="its bytes are the prompt (default: random bytes)")
    parser.add_argument("--prompt-len", type=int, default=65_000, help="at most so many bytes (default %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64, help="bytes to write (default %(default)s)")
    options = parser.parse_args(argv)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    parallel = ContextParallel()
    model = make_model(options.model, parallel)
    if options.prompt_file is None:
        noise = torch.Generator().manual_seed(1)  # the same prompt on every rank
        prompt = torch.randint(model.config.vocab_size, (1, options.prompt_len), generator=noise)
    else:
        prompt = torch.tensor([list(options.prompt_file.read_bytes()[: options.prompt_len])])
    length = prompt.shape[1]
    if length < parallel.world_size:
        parser.exit(2, f"a prompt of {length} tokens: {parallel.world_size} ranks need at least one each\n")
    first, caches = prefill(model, prompt, max_len=length + options.new_tokens, to=0)
    parallel.close()
    if dist.is_torchelastic_launched():
        dist.destroy_process_group()
    if parallel.rank == 0:  # the other ranks are done
        alone = make_model(options.model, None)
        written = [first.item(), *write(alone, first, options.new_tokens - 1, caches)]
        again = write(alone, prompt, options.new_tokens)
        held, rows = sum(cache.num_bytes for cache in caches), length * 2 * len(caches)
        every = rows * caches[0].plan.num_kv_heads * caches[0].head_dim * caches[0].dtype.itemsize
        print(f"{parallel.world_size} ranks computed a prompt of {length:,} tokens")
        print(f"the caches on rank 0: {held:,} bytes; all keys and values: {every:,}")
        if options.model is not None:
            print(bytes(written))
        same = sum(a == b for a, b in zip(written, again, strict=True))
        print(f"{same} of {options.new_tokens} tokens are those of rank 0 alone; {len(set(written))} different tokens")


if __name__ == "__main__":
    main()
