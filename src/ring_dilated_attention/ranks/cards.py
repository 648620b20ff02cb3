"""Which GPU a process takes. (No GPU has run this.)"""

import os
from collections.abc import Mapping

import torch
import torch.distributed as dist

# Environment variables in which launchers (torchrun, srun) put the number of a process on its host.
_LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID")


def number_of_card(
    bound: torch.device | None, current: int, environment: Mapping[str, str], count: int
) -> int:
    """The number of the GPU that a process takes. `bound` decides first, then `current`, then `environment`.

    Args:
        bound: the `device_id` that was passed to init_process_group, or None. If `bound` has a number, this number is
            returned.
        current: the number of torch's current GPU. If this number is not 0, torch.cuda.set_device has chosen the GPU,
            and the number is returned.
        environment: the environment variables. A launcher's variable holds r, the number of the process on its host.
            Then r % `count` is returned. Without such a variable `current` is returned.
        count: the number of GPUs that the process sees, which is 1 if the launcher shows each process only one GPU.
    """
    if bound is not None and bound.index is not None:
        return bound.index
    numbers = [environment[name] for name in _LOCAL_RANK if environment.get(name, "").isdecimal()]
    if current or not numbers or not count:
        return current
    return int(numbers[0]) % count


def card_of(group: dist.ProcessGroup | None) -> torch.device:
    """The GPU of this process, as `number_of_card` chooses it. Its argument `bound` is the GPU to which `group` is
    bound, if there is one."""
    bound = None if group is None else group.bound_device_id
    number = number_of_card(
        bound, torch.cuda.current_device(), os.environ, torch.cuda.device_count()
    )
    return torch.device("cuda", number)
