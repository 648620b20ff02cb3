"""Writes the embeddings of a file as a table (CSV), for pandas, R or a spreadsheet."""

import csv
from io import StringIO
from pathlib import Path

from ...training.files import check_mine, write_whole
from .embeddings import EmbeddingFile


def write_table(path: Path, file: EmbeddingFile) -> None:
    """Write a line for each slide of the file, or each of its layers. If it holds none, only check the path. Raises
    ValueError if something has this path with other lines than the new table's: somebody else wrote or changed it."""
    text, settings = StringIO(), file.settings
    lines = csv.writer(text, lineterminator="\n")
    digits = 17 if settings["dtype"] == "float64" else 9  # enough to read the same numbers again
    for name, entry in sorted(file.entries.items()):
        layers = file.embeddings[name].reshape(-1, file.embeddings[name].shape[-1]).tolist()
        if not text.tell():
            about = ["slide", "embedding", "layer", "num_tiles", "tile_size", "stated_tile_size"]
            lines.writerow(about + [f"e{i}" for i in range(len(layers[0]))])
        for i, numbers in enumerate(layers):
            row = [name, settings["embedding"], i if settings["layer"] == "all" else settings["layer"], *entry[1:]]
            lines.writerow([*row, *(f"{x:.{digits}g}" for x in numbers)])
    content = text.getvalue().encode()
    new = set(content.splitlines())
    owner = (lambda old: new.issuperset(old.read(len(content) + 1).splitlines()), f"`rda embed --out {file.path}`")
    check_mine(path, *owner)
    if content:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content, *owner)
