"""Draws the two pictures of the README, from the code: python tests/readme_pictures.py. `test_readme.py` compares."""

from pathlib import Path

from ring_dilated_attention import DilatedPattern
from ring_dilated_attention.commands.plan.figures import draw_pattern, draw_ring, pictures_at, save
from ring_dilated_attention.forecast.call import Way, count
from ring_dilated_attention.plan.job import Job
from ring_dilated_attention.plan.sharding import make_shards


def draw_readme(folder: Path) -> list[Path]:
    """A causal pattern, and a ring of 4 ranks in which one of two branches travels."""
    shown = DilatedPattern((8, 16, 32), (1, 2, 4), is_causal=True)
    job = Job(DilatedPattern((4, 32), (1, 4)), make_shards("contiguous", (8, 8, 8, 8)), 4, 4)
    files = pictures_at(folder)
    save({files[0]: draw_pattern(shown, 32, 4), files[1]: draw_ring(job, count(job, Way()).branches)})
    return list(files)


if __name__ == "__main__":
    print(*draw_readme(Path(__file__).parents[1] / "docs"), sep="\n")
