"""Reads the hardware whose time is modelled: a preset, or a TOML file such as `rda doctor --save` writes.

The fields of the file are those of `Hardware`, and memory_bytes, dtype, kernel and source (docs/planning.md has an
example).
"""

import argparse
import math
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from ..forecast.clock import Hardware
from ..kernels.traits import TRAITS
from ..training.options import flag
from .arguments import amount


class Machine(NamedTuple):
    """A rank's rates, the dtype in which they are reached, its memory where known, and the source of the numbers."""

    hardware: Hardware
    dtype: str
    memory_bytes: int | None
    source: str
    kernel: str = "cpu"  # of TRAITS


LARGE_MESSAGE = 16 * 2**20  # the bytes of a message by which `rda doctor` measures bandwidth
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
LARGEST = 1e30  # a rate far beyond machines, and within floats
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
# The fields of _NUMBERS that options replace.
_OPTIONS = {
    "bandwidth": "bytes_per_second",
    "latency": "latency_seconds",
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
        "--bandwidth",
        type=amount,
        metavar="BYTES",
        help="bytes per second, one way, between any two ranks, also in hosts",
    )
    add("--latency", type=amount, metavar="S", help="latency of any message in seconds")
    add("--memory", type=amount, metavar="BYTES", help="memory of a rank, as 80G")


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
            _check_number(f"--hardware {name}: {key} =", key, value)
    for key in ("flops_per_second", "bytes_per_second"):
        if key not in fields:
            raise ValueError(f"--hardware {name} lacks {key}")
    if ("gpus_per_host" in fields) != ("host_bytes_per_second" in fields):
        raise ValueError(
            f"--hardware {name} has one of gpus_per_host and host_bytes_per_second: give both, or neither (one network)"
        )
    fields = {"dtype": "float32", "kernel": "cpu"} | fields
    for key, choices in (("dtype", ITEMSIZE), ("kernel", TRAITS)):
        if fields[key] not in list(choices):
            raise ValueError(
                f"--hardware {name}: {key} = {fields[key]!r} is unknown; choose one of {', '.join(choices)}"
            )
    numbers = {key: fields[key] for key in Hardware._fields if key in fields}
    if "host_bytes_per_second" in fields:  # inside hosts messages are no later than between them
        numbers.setdefault("host_latency_seconds", fields.get("latency_seconds", 0.0))
    memory = int(fields["memory_bytes"]) if "memory_bytes" in fields else None
    source = str(fields.get("source", name))
    return Machine(Hardware(**numbers), fields["dtype"], memory, source, fields["kernel"])


def _check_number(what: str, key: str, value: object) -> None:
    least, most, unit = _NUMBERS[key]
    kinds = int if key == "gpus_per_host" else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not abs(value) < LARGEST:
        raise ValueError(f"{what} {value!r} must be a plain number of {unit}")
    if not least <= value <= most:
        raise ValueError(
            f"{what} {value:g} must be from {least:g} to {most:.3g} {unit}: which unit is meant?"
        )


PRESETS = {
    card: _machine(card, fields)
    for card, fields in tomllib.loads(
        Path(__file__).with_name("presets.toml").read_bytes().decode()
    ).items()
}


def machine_for(arguments: argparse.Namespace) -> Machine | None:
    """The preset or file, with its numbers replaced by those of the options; fills in --dtype. None without
    --hardware."""
    replaced: dict[str, Any] = {}
    for option, key in _OPTIONS.items():
        value = getattr(arguments, option)
        if value is not None:
            _check_number(flag(option), key, value)
            replaced[key] = value
    if arguments.hardware is None:
        if replaced:
            raise ValueError(
                f"{', '.join(replaced)}: give --hardware too, whose numbers these replace"
            )
        arguments.dtype = arguments.dtype or "float32"
        return None
    machine = machine_of(arguments.hardware)
    arguments.dtype = arguments.dtype or machine.dtype
    if ITEMSIZE[arguments.dtype] != ITEMSIZE[machine.dtype]:
        rates = f"--hardware {arguments.hardware} has rates of {machine.dtype}"
        raise ValueError(f"{rates}, and --dtype is {arguments.dtype}: leave --dtype out")
    source = machine.source
    if replaced:
        source = f"{source}; {', '.join(replaced)} as given"
    memory = replaced.pop("memory_bytes", machine.memory_bytes)
    if "bytes_per_second" in replaced:  # one network of all
        replaced |= {"gpus_per_host": None, "host_bytes_per_second": None}
    if "latency_seconds" in replaced:
        replaced["host_latency_seconds"] = replaced["latency_seconds"]
    return machine._replace(
        hardware=machine.hardware._replace(**replaced), memory_bytes=memory, source=source
    )


def known(hardware: Hardware) -> dict[str, float]:
    """The numbers by name, without those that are not there."""
    return {name: value for name, value in hardware._asdict().items() if value is not None}


def as_toml(machine: Machine) -> str:
    """The text of a file that `machine_of` reads."""
    numbers: dict[str, float] = known(machine.hardware)
    if machine.memory_bytes is not None:
        numbers["memory_bytes"] = machine.memory_bytes
    source = machine.source.replace("\\", "/").replace('"', "'")
    lines = ["[hardware]", *(f"{key} = {value!r}" for key, value in numbers.items())]
    lines += [f'dtype = "{machine.dtype}"', f'kernel = "{machine.kernel}"', f'source = "{source}"']
    return "\n".join([*lines, ""])


def assumed(machine: Machine) -> str:
    """A line with the numbers that a time assumes."""
    numbers = ", ".join(f"{name} {value:g}" for name, value in known(machine.hardware).items())
    return f"assumed of each rank: {numbers} ({machine.source})"
