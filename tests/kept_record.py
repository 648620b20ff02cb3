"""`--record FILE` of a script of the tests: a record like those of the benchmarks, with the script's own command."""

import json
import sys
from pathlib import Path
from shlex import quote

from ring_dilated_attention.training.files import MOST_BYTES, check_mine, json_object, write_whole

ROOT = Path(__file__).parents[1]  # of the clone


def add_record(parser):
    parser.add_argument("--record", type=Path, help="a file for what was found, as JSON")


def kept_record(parser, path, case, script, **about):
    """A function that writes rows into the record, and more fields. It may be called again.

    The commit and the date are those of now. The script ends with a sentence if the file is another's.
    """
    sys.path.append(str(ROOT))
    # the tests of a script's jobs need not wait for this import
    from benchmarks.record import make_record

    def is_ours(file):
        return json_object(file.read(MOST_BYTES)).get("case") == case

    def write(rows, **more):
        if path is not None:
            write_whole(
                path,
                (json.dumps(record | more | {"rows": rows}, indent=1) + "\n").encode(),
                is_ours,
                script,
            )

    try:
        if path is not None:
            check_mine(path, is_ours, script)
    except ValueError as error:
        parser.error(str(error))
    command = " ".join([f"python {script}", *map(quote, sys.argv[1:])])
    record = make_record(case, [], is_quick=False) | {"command": command, **about}
    return write
