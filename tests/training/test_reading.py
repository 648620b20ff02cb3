"""What is read of files: unpacked, without the headers of FASTA, refused if it is no text, and said."""

import bz2
import gzip
import io
import lzma
import random
import re

import pytest
from helpers import strip_fasta

from ring_dilated_attention.training import data
from ring_dilated_attention.training.data import Text, load_document, read_files

FASTA = b">chr1 some > header\nACGT\r\nAC\n;comment\n>chr2\nGG>T\n\nTT"
COMPRESS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


def text_of(name, content):
    """The bytes that are read, and what is said of them."""
    text = Text(name)
    return b"".join(text.blocks(io.BufferedReader(io.BytesIO(content)))), str(text)


def refusal(name, content):
    with pytest.raises(ValueError) as caught:
        text_of(name, content)
    return str(caught.value)


def test_fasta_is_its_letters_however_it_comes_in_blocks(monkeypatch):
    """Catches a header or an end of line that lies across the border of two blocks."""
    for seed in range(300):
        draw = random.Random(seed)
        content = b"A\n" + bytes(
            draw.choice(b">;ACGT\n\r\n \x0b\x0c\x85") for _ in range(draw.randint(0, 60))
        )
        monkeypatch.setattr(data, "BLOCK", draw.randint(1, 9))
        letters = strip_fasta(content)
        assert text_of("x.fa", content) == (letters, f"x.fa: FASTA, {len(letters)} letters")


@pytest.mark.parametrize("suffix", ["fa", "FASTA", "fna", "ffn", "faa", "fas", "frn"])
def test_fasta_is_known_by_its_name(suffix):
    assert text_of(f"some/x.{suffix}", FASTA) == (
        b"ACGTACGG>TTT",
        f"x.{suffix}: FASTA, 12 letters",
    )


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_files_are_unpacked(suffix, monkeypatch):
    """By how they begin, in several streams too. The name inside says whether it is FASTA."""
    monkeypatch.setattr(data, "BLOCK", 100)
    content = bytes(random.Random(0).choices(b"some letters\n", k=1000))
    compress = COMPRESS[suffix]
    assert text_of(f"book.txt.{suffix}", compress(content)) == (
        content,
        f"book.txt.{suffix}: 1,000 bytes",
    )
    assert text_of("download", compress(content[:300]) + compress(content[300:]))[0] == content
    assert text_of(f"x.fna.{suffix}", compress(FASTA)) == (
        b"ACGTACGG>TTT",
        f"x.fna.{suffix}: FASTA, 12 letters",
    )
    # something has unpacked it, and left the name
    assert text_of("x.fa.gz", FASTA)[0] == b"ACGTACGG>TTT"
    packed = bytearray(compress(content))
    assert re.match(
        r"x is damaged or cut short \(.+\): fetch it again", refusal("x", bytes(packed[:-9]))
    )
    packed[len(packed) // 2] ^= 255
    assert "x is damaged or cut short" in refusal("x", bytes(packed))


def test_files_make_one_document(tmp_path):
    """And it says what was read: a line for each of a few, one line for many."""
    names = ["c.txt", "a.fa", "b.FASTA", "d.txt", "e.txt"]
    paths = [tmp_path / name for name in names]
    for path in paths:
        path.write_bytes(FASTA)
    document = load_document([str(path) for path in paths[:3]], 4, 1)
    assert document.content == FASTA + 2 * b"ACGTACGG>TTT"
    said = [
        f"c.txt: {len(FASTA)} bytes",
        "a.fa: FASTA, 12 letters",
        "b.FASTA: FASTA, 12 letters",
    ]
    assert document.read == "\n".join(said)
    assert document.identity()["read"] == document.read
    content, said = read_files(paths)
    assert said == f"5 files: {len(content)} bytes"


def test_a_file_that_unpacks_to_more_than_fits_is_refused(tmp_path, monkeypatch):
    """A few kilobytes may hold a terabyte: no more than one block beyond what fits is unpacked."""
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(bytes(10**7)))
    monkeypatch.setattr(data, "physical_bytes", lambda: 10**6)
    with pytest.raises(
        ValueError, match=r"bomb\.gz does not fit: files may have 500,000 bytes in all, half of the"
    ):
        read_files([tmp_path / "bomb.gz"])
