"""Reads the hardware whose time is modelled: a preset, or a TOML file such as `rda doctor --save` writes.

The fields of the file are those of `Hardware`, and memory_bytes, dtype, kernel and source (docs/planning.md has an
example).
"""

import argparse
import math
import tomllib
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ..forecast.clock import Hardware, time_text
from ..kernels.traits import TRAITS
from ..training.files import MOST_BYTES
from ..training.options import flag
from .arguments import amount, check_given, count
from .console import counted, scaled


class Machine(NamedTuple):
    """A rank's rates, the itemsize of their dtype, the rank's memory where known, and the source of the numbers."""

    hardware: Hardware
    itemsize: int
    memory_bytes: int | None
    source: str
    kernel: str = "cpu"  # of TRAITS
    most_ranks: int | None = None  # of a network that joins no more


LARGE_MESSAGE = 16 * 2**20  # the bytes of a message by which `rda doctor` measures bandwidth
MAKER = "rda doctor"  # the source of numbers that `rda doctor` measured begins with this
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
LARGEST = 1e30  # a rate far beyond machines, and within floats
NO_NETWORK = LARGEST  # stands for bytes_per_second in a file that lacks it: one rank sends nothing
_FLOPS, _BYTES = (
    "FLOPs in a second; 500 TFLOP/s are 5e14",
    "bytes in a second, one way; 50 GB/s are 5e10",
)
_TIME, _HOST = "seconds; 5 µs are 5e-6", "GPUs on a host, all of them"
_SHORT = (0.0, math.nextafter(0.1, 0), _TIME)  # below 0.1
# The least number, the largest and the unit. No machine has a number outside: the user meant another unit.
# (Rates that were measured with tiny tensors on a busy machine are low: examples/video.py had 5e7 FLOP/s.)
_NUMBERS = {
    "flops_per_second": (1e6, 1e17, _FLOPS),
    "backward_flops_per_second": (1e6, 1e17, _FLOPS),
    "bytes_per_second": (1e6, 1e14, _BYTES),
    "host_bytes_per_second": (1e6, 1e14, _BYTES),
    "gpus_per_host": (1, 1e6, _HOST),
    "memory_bytes": (2**20, 1e15, "bytes; 80 GB are 8e10"),
    "latency_seconds": _SHORT,
    "host_latency_seconds": _SHORT,
    "call_seconds": _SHORT,
    "handshake_seconds": (0.0, math.nextafter(1.0, 0), _TIME),
}
# The fields of _NUMBERS that options give.
_GIVEN = {
    "flops": "flops_per_second",
    "bandwidth": "bytes_per_second",
    "latency": "latency_seconds",
    "gpus_per_host": "gpus_per_host",
    "memory": "memory_bytes",
}


def add_hardware_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--hardware",
        metavar="NAME",
        help=f"model a step's time: a TOML file, or {', '.join(PRESETS)}",
    )
    add(
        "--flops",
        type=amount,
        metavar="RATE",
        help="a rank's FLOPs per second; with --bandwidth, needs no --hardware",
    )
    add(
        "--bandwidth",
        type=amount,
        metavar="BYTES",
        help="bytes per second, one way, between any two ranks, also in hosts",
    )
    add(
        "--latency",
        type=amount,
        metavar="S",
        help="latency of any message in seconds (default --hardware's, or 0)",
    )
    add(
        "--gpus-per-host",
        type=count,
        metavar="G",
        help="ranks of a host (--hardware h100 and a100: 8)",
    )
    add(
        "--memory",
        type=amount,
        metavar="BYTES",
        help="memory of a rank, as 80G (default that of --hardware)",
    )


def machine_of(name: str) -> Machine:
    """A preset by its name, or the machine in a file. Raises ValueError for another name, and for a malformed file."""
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if not path.is_file():
        raise ValueError(
            f"--hardware {name} is no file and no preset; presets are {', '.join(PRESETS)}"
        )
    try:
        content = tomllib.loads(path.read_bytes().decode())
    except (OSError, ValueError) as error:
        # ValueError: not text, not TOML, or a number with thousands of digits
        raise ValueError(f"--hardware {name} cannot be read: {error}") from error
    if not isinstance(fields := content.get("hardware"), dict):
        raise ValueError(
            f"--hardware {name} has no table [hardware]; rda doctor --save FILE.toml writes one"
        )
    return _machine(name, fields)


def _machine(name: str, fields: dict[str, Any]) -> Machine:
    known = (*_NUMBERS, "dtype", "source", "kernel")
    for key, value in fields.items():
        if key not in known:
            raise ValueError(
                f"--hardware {name}: {key} is unknown; the table [hardware] takes {', '.join(known)}"
            )
        if key in _NUMBERS:
            _check_number(name, key, value)
    if "flops_per_second" not in fields:
        raise ValueError(f"--hardware {name} lacks flops_per_second")
    dtype = fields.get("dtype", "float32")
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        raise ValueError(
            f"--hardware {name}: dtype = {dtype!r} is unknown; choose one of {', '.join(ITEMSIZE)}"
        )
    kernel = fields.get("kernel", "cpu")
    if kernel not in TRAITS:
        raise ValueError(
            f"--hardware {name}: kernel = {kernel!r} is unknown; choose one of {', '.join(TRAITS)}"
        )
    numbers = {key: fields[key] for key in Hardware._fields if key in fields}
    if "host_bytes_per_second" in fields:  # inside hosts messages are no later than between them
        numbers.setdefault("host_latency_seconds", fields.get("latency_seconds", 0.0))
    hardware = Hardware(**{"bytes_per_second": NO_NETWORK} | numbers)
    memory = int(fields["memory_bytes"]) if "memory_bytes" in fields else None
    return Machine(hardware, ITEMSIZE[dtype], memory, str(fields.get("source", name)), kernel)


def _check_number(name: str, key: str, value: object) -> None:
    (least, most, unit), kinds = _NUMBERS[key], int if key == "gpus_per_host" else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not abs(value) < LARGEST:
        raise ValueError(f"--hardware {name}: {key} = {value!r} must be a plain number of {unit}")
    if value < 0 or value == 0 < least:
        raise ValueError(f"--hardware {name}: {key} = {value:g} must be positive, in {unit}")
    if not least <= value <= most:
        raise ValueError(
            f"--hardware {name}: {key} = {value:g} seems to be in another unit: write {unit}"
        )


def _presets() -> dict[str, Machine]:
    """Each card with NVLink in hosts and InfiniBand between them, and with each of these networks alone."""
    found: dict[str, Machine] = {}
    for card, fields in tomllib.loads(
        Path(__file__).with_name("presets.toml").read_bytes().decode()
    ).items():
        machine = _machine(card, fields)
        host = machine.hardware.gpus_per_host
        assert host is not None
        for network, last, most_ranks in (("nvlink", 0, host), ("infiniband", host, None)):
            alone = Hardware(machine.hardware.flops_per_second, *machine.hardware.network(0, last))
            found[f"{card}-{network}"] = machine._replace(hardware=alone, most_ranks=most_ranks)
        found[card] = machine
    return found


PRESETS = _presets()


def check_dtype(machine: Machine, name: str, dtype: str, remedy: str = "") -> None:
    """Raise ValueError if the machine's rates were reached in a dtype of another size."""
    if ITEMSIZE[dtype] != machine.itemsize:
        rates = f"the rate of {8 * machine.itemsize}-bit types"
        other = "bfloat16" if machine.itemsize == 2 else "float32"
        raise ValueError(
            f"--hardware {name} has {rates}, and --dtype is {dtype}. Choose --dtype {other}{remedy}."
        )


def machine_for(arguments: argparse.Namespace, num_ranks: int) -> Machine | None:
    """The preset or file, with its numbers replaced by those of the options. None if no option asks for a time."""
    given: dict[str, Any] = {}
    for option, key in _GIVEN.items():
        value = getattr(arguments, option)
        if value is not None:
            _check_option(option, key, value)
            given[key] = value
    memory_bytes = given.pop("memory_bytes", None)
    if arguments.hardware is None:
        if not given:
            return None
        check_given(
            arguments, ("flops", "bandwidth"), "a time needs --flops and --bandwidth, or --hardware"
        )
        machine = Machine(Hardware(**given), ITEMSIZE[arguments.dtype], None, "as given")
    else:
        machine = _replaced(machine_of(arguments.hardware), arguments, given)
        _check_network(machine, arguments.hardware, num_ranks)
    if memory_bytes is not None:
        machine = machine._replace(memory_bytes=int(memory_bytes))
    hardware = machine.hardware
    if (hardware.gpus_per_host is None) != (hardware.host_bytes_per_second is None):
        both = f"gpus_per_host {hardware.gpus_per_host} and host_bytes_per_second {hardware.host_bytes_per_second}"
        raise ValueError(
            f"{both}: a file of --hardware gives both, as h100 does, or neither (one network)"
        )
    return machine


def _check_option(option: str, key: str, value: float) -> None:
    least, most, unit = _NUMBERS[key]
    if not least <= value <= most:
        raise ValueError(
            f"{flag(option)} {value:g} must be from {least:g} to {most:.3g} {unit}: which unit is meant?"
        )


def _replaced(machine: Machine, arguments: argparse.Namespace, given: dict[str, Any]) -> Machine:
    """The machine with the numbers that options give. A bandwidth replaces all networks by one."""
    numbers = dict(given)
    if arguments.flops is None:
        check_dtype(machine, arguments.hardware, arguments.dtype, ", or give --flops")
    else:
        numbers["backward_flops_per_second"] = None
    if "bytes_per_second" in given:
        numbers |= {
            "host_bytes_per_second": None,
            "host_latency_seconds": 0.0,
            "gpus_per_host": None,
        }
        machine = machine._replace(most_ranks=None)
        if arguments.gpus_per_host is not None:
            raise ValueError(
                "--bandwidth makes one network of all, and --gpus-per-host asks for two: leave one out"
            )
    elif "latency_seconds" in given:
        numbers["host_latency_seconds"] = given["latency_seconds"]
    source = machine.source
    if given:
        source = f"{source}; {', '.join(given)} as given"
    return machine._replace(hardware=machine.hardware._replace(**numbers), source=source)


def _check_network(machine: Machine, name: str, num_ranks: int) -> None:
    if machine.hardware.bytes_per_second == NO_NETWORK and num_ranks > 1:
        remedy = "measure it with rda doctor --ranks 2 --save FILE.toml, or give --bandwidth and --latency"
        raise ValueError(
            f"--hardware {name} has no bytes_per_second, which several ranks need: {remedy}"
        )
    if machine.most_ranks is not None and num_ranks > machine.most_ranks:
        card = name.split("-")[0]
        hosts = -(-num_ranks // machine.most_ranks)
        one_host = f"--hardware {name} is one host of {machine.most_ranks} GPUs, and {num_ranks:,} need {hosts:,} hosts"
        raise ValueError(
            f"{one_host}: take --hardware {card}, which has the network between hosts too"
        )


def known(hardware: Hardware) -> dict[str, float | None]:
    """The numbers by name, without those of the network if none was measured."""
    left_out: set[str] = set()
    if hardware.bytes_per_second == NO_NETWORK:
        left_out |= {"bytes_per_second", "latency_seconds"}
    if not hardware.gpus_per_host:
        left_out |= {"gpus_per_host", "host_bytes_per_second", "host_latency_seconds"}
    return {name: value for name, value in hardware._asdict().items() if name not in left_out}


def as_toml(machine: Machine, notes: list[str]) -> str:
    """The text of a file that `machine_of` reads. The notes become comments."""
    numbers = known(machine.hardware) | {"memory_bytes": machine.memory_bytes}
    dtype = next(name for name, size in ITEMSIZE.items() if size == machine.itemsize)
    source = machine.source.replace("\\", "/").replace('"', "'")
    lines = [f"# {note}" for note in notes] + ["[hardware]"]
    lines += [f"{key} = {value!r}" for key, value in numbers.items() if value is not None]
    return "\n".join(
        [*lines, f'dtype = "{dtype}"', f'kernel = "{machine.kernel}"', f'source = "{source}"', ""]
    )


def is_saved(file: BinaryIO) -> bool:
    """Whether `rda doctor` wrote a file."""
    try:
        found = tomllib.loads(file.read(MOST_BYTES).decode())
        return len(found) == 1 and found["hardware"]["source"].startswith(f"{MAKER} ")
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return False


def described(hardware: Hardware, source: str) -> str:
    """A line with the rates that a time assumes."""
    numbers = [scaled(hardware.flops_per_second, "FLOP/s")]
    if hardware.backward_flops_per_second is not None:
        numbers[0] += f" forward, {scaled(hardware.backward_flops_per_second, 'FLOP/s')} backward"
    networks: list[tuple[float, float, str]] = []
    if hardware.bytes_per_second == NO_NETWORK:
        numbers.append("no network")
    elif hardware.gpus_per_host:
        where = f" inside hosts of {counted(hardware.gpus_per_host, 'GPU')}"
        networks.append((*hardware.network(0, 0), where))
        networks.append((hardware.bytes_per_second, hardware.latency_seconds, " between hosts"))
    else:
        networks.append((hardware.bytes_per_second, hardware.latency_seconds, ""))
    for rate, latency, where in networks:
        numbers.append(f"{scaled(rate, 'B/s')} one way{where}, latency {time_text(latency)}")
    if hardware.call_seconds:
        numbers.append(f"{time_text(hardware.call_seconds)} a kernel call")
    if hardware.handshake_seconds is not None:
        numbers.append(f"handshake {time_text(hardware.handshake_seconds)}")
    return f"assumed of each rank: {', '.join(numbers)} ({source})"
