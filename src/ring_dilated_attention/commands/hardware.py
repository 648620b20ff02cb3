"""Reads the rates of the hardware that a forecast assumes: a preset, or a TOML file such as `rda doctor --save` writes.

A file has the fields of `Hardware`, and memory_bytes, dtype, kernel and source (docs/planning.md has an example).
"""

import tomllib
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any, NamedTuple

from ..forecast.clock import Hardware
from ..kernels.traits import TRAITS
from ..training.options import in_short
from .arguments import amount


class Machine(NamedTuple):
    """A rank's rates, the dtype and kernel that reach these rates, the rank's memory if known, and the source of the
    numbers."""

    hardware: Hardware
    dtype: str
    memory_bytes: int | None
    source: str
    kernel: str = "cpu"  # the name of a kernel in TRAITS


LARGE_MESSAGE = 16 * 2**20  # the bytes of a message by which `rda doctor` measures bandwidth
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
FLOPS = "FLOPs in a second; 500 TFLOP/s are 5e14"
BYTES = "bytes in a second, one way; 50 GB/s are 5e10"
SECONDS = "seconds; 5 µs are 5e-6"
# For each field: the smallest number accepted, the largest, and the unit. A number outside this range is refused,
# because the user probably meant another unit. The smallest accepted rates are low, because tiny tensors on a busy
# machine are slow: examples/video.py reached only 5e7 FLOP/s.
NUMBERS = {
    "flops_per_second": (1e6, 1e17, FLOPS),
    "backward_flops_per_second": (1e6, 1e17, FLOPS),
    "bytes_per_second": (1e6, 1e14, BYTES),
    "host_bytes_per_second": (1e6, 1e14, BYTES),
    "gpus_per_host": (1, 1e6, "GPUs on a host, all of them"),
    "memory_bytes": (1e6, 1e15, "bytes; 80 GB are 8e10"),
    "latency_seconds": (0, 0.1, SECONDS),
    "host_latency_seconds": (0, 0.1, SECONDS),
    "call_seconds": (0, 0.1, SECONDS),
    "handshake_seconds": (0, 1, SECONDS),
}
# For each option, the field of `Hardware` or `Machine` whose number the option replaces.
OPTIONS = {
    "bandwidth": "bytes_per_second",
    "latency": "latency_seconds",
    "memory": "memory_bytes",
}
WORDS = {"dtype": tuple(ITEMSIZE), "kernel": tuple(TRAITS)}


def add_hardware_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--hardware",
        metavar="NAME",
        help=f"model a step's time in its dtype: a TOML file, or {', '.join(PRESETS)}",
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
    """The machine of a preset or of a file. name: the name of the preset, or the path of the file.

    Raises ValueError if `name` is neither, or if the file is malformed.
    """
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
        # A ValueError means that the file is not text or not TOML, or has a number with thousands of digits.
        raise ValueError(f"--hardware {name} cannot be read: {error}") from error
    fields = content.get("hardware")
    if not isinstance(fields, dict):
        raise ValueError(
            f"--hardware {name} has no table [hardware]; rda doctor --save FILE.toml writes one"
        )
    try:
        return _machine(name, fields)
    except ValueError as error:
        raise ValueError(f"--hardware {name}: {error}") from error


def _machine(name: str, fields: dict[str, Any]) -> Machine:
    fields = {"dtype": "float32", "kernel": "cpu", "source": name} | fields
    for key, value in fields.items():
        if key in NUMBERS:
            check_number(f"{key} =", key, value)
        elif key in WORDS:
            if value not in WORDS[key]:
                choices = ", ".join(WORDS[key])
                raise ValueError(f"{key} = {value!r} is unknown; choose one of {choices}")
        elif key != "source":
            names = ", ".join((*NUMBERS, *WORDS, "source"))
            raise ValueError(f"{key} is unknown; the table [hardware] takes {names}")
    for key in ("flops_per_second", "bytes_per_second"):
        if key not in fields:
            raise ValueError(f"{key} is missing")
    if ("gpus_per_host" in fields) != ("host_bytes_per_second" in fields):
        raise ValueError("give both gpus_per_host and host_bytes_per_second, or neither")
    numbers = {key: fields[key] for key in Hardware._fields if key in fields}
    # If the file gives no latency inside a host, take the latency between hosts.
    if "host_bytes_per_second" in fields:
        numbers.setdefault("host_latency_seconds", fields.get("latency_seconds", 0.0))
    memory = int(fields["memory_bytes"]) if "memory_bytes" in fields else None
    return Machine(
        Hardware(**numbers), fields["dtype"], memory, str(fields["source"]), fields["kernel"]
    )


def check_number(what: str, key: str, value: object) -> None:
    least, most, unit = NUMBERS[key]
    kinds = (int,) if key == "gpus_per_host" else (int, float)
    if type(value) not in kinds or not least <= value <= most:  # type: ignore[operator]
        raise ValueError(
            f"{what} {in_short(repr(value))} must be from {least:g} to {most:g} {unit}: "
            "which unit is meant?"
        )


_PRESETS = tomllib.loads(Path(__file__).with_name("presets.toml").read_text("utf-8"))
PRESETS = {card: _machine(card, fields) for card, fields in _PRESETS.items()}


def machine_for(arguments: Namespace) -> Machine | None:
    """The machine that --hardware names. --bandwidth, --latency and --memory replace its numbers. Returns None if none
    of the four options is given. Raises ValueError for a number out of range, and if --bandwidth, --latency or --memory
    is given without --hardware.
    """
    replaced: dict[str, Any] = {}
    for option, key in OPTIONS.items():
        value = getattr(arguments, option)
        if value is not None:
            check_number(f"--{option}", key, value)
            replaced[key] = value
    if arguments.hardware is None:
        if replaced:
            raise ValueError(
                f"{', '.join(replaced)}: give --hardware too: these numbers replace some of the hardware's"
            )
        return None
    machine = machine_of(arguments.hardware)
    memory = replaced.pop("memory_bytes", machine.memory_bytes)
    # Drop the rates inside hosts if --bandwidth is given, because --bandwidth applies to all messages.
    if "bytes_per_second" in replaced:
        replaced |= {"gpus_per_host": None, "host_bytes_per_second": None}
    if "latency_seconds" in replaced:
        replaced["host_latency_seconds"] = replaced["latency_seconds"]
    hardware = machine.hardware._replace(**replaced)
    return machine._replace(hardware=hardware, memory_bytes=memory)


def known(hardware: Hardware) -> dict[str, float]:
    """The fields of the hardware by name, without the fields that are None."""
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
    """A line that tells the user which numbers a predicted time is based on, and where the numbers come from."""
    numbers = ", ".join(f"{name} {value:g}" for name, value in known(machine.hardware).items())
    return f"assumed of each rank: {numbers} ({machine.source})"
