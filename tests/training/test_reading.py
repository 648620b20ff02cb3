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


def text_of(name, content, how=None, most=10**9):
    """The bytes that are read, and what is said of them."""
    text = Text(name, how or {}, most)
    return b"".join(text.blocks(io.BufferedReader(io.BytesIO(content)))), str(text)


def refusal(name, content):
    with pytest.raises(ValueError) as caught:
        text_of(name, content)
    return str(caught.value)


def told(said):
    """The records and the letters that a text says were read."""
    found = re.search(r" (\d+) records?, (\d+) letters", said)
    return int(found[1]), int(found[2])


def test_fasta_is_its_letters_however_it_comes_in_blocks(monkeypatch):
    """Catches a header or an end of line that lies across the border of two blocks; and records that are lost."""
    for seed in range(300):
        draw = random.Random(seed)
        content = b"A\n" + bytes(
            draw.choice(b">;ACGT\n\r\n \x0b\x0c\x85") for _ in range(draw.randint(0, 60))
        )
        monkeypatch.setattr(data, "BLOCK", draw.randint(1, 9))
        found, said = text_of("x.fa", content)
        assert found == strip_fasta(content)
        records = [
            strip_fasta(lines_of_one)
            for lines_of_one in re.split(rb"^>.*$", content, flags=re.MULTILINE)
        ]
        assert told(said) == (sum(map(bool, records)), len(found))
        bordered, _ = text_of("x.fa", content, {"fasta_records": "newline"})
        assert bordered == b"".join(
            lines_of_one + b"\n" for lines_of_one in records if lines_of_one
        )
        for how, whole in (({}, found), ({"fasta_records": "newline"}, bordered)):
            most = draw.randint(1, len(whole))
            some, said = text_of("x.fa", content, how, most)
            assert some == whole[:most]
            letters = some.replace(b"\n", b"")
            assert told(said)[1] == len(letters)
            shown = ascii(bytes(sorted({*letters})).decode("latin-1"))[1:-1]
            assert said.endswith(f" letters ({shown})")
            if how:
                assert told(said)[0] == len(some.split(b"\n")) - some.endswith(b"\n")


def test_choices_about_fasta():
    kept = (b"acGTNN", "a.fa: FASTA, 2 records, 6 letters (GNTac)")
    assert text_of("a.fa", b">1\nac\nGT\n>2\nNN\n") == kept
    assert (
        text_of("a.fa", b">1\nac\nGT\n>2\nNN\n", {"fasta_case": "keep", "fasta_records": "join"})
        == kept
    )
    found = text_of(
        "a.fa", b">1\r\nac\r\nGT\r\n>2\r\nNN", {"fasta_case": "upper", "fasta_records": "newline"}
    )
    assert found == (b"ACGT\nNN\n", "a.fa: FASTA, 2 records, 6 letters (ACGNT)")
    assert text_of("a.txt", b"a\nac\n", {"fasta_case": "upper"}) == (b"a\nac\n", "a.txt: 5 bytes")


@pytest.mark.parametrize("suffix", ["fa", "FASTA", "fna", "ffn", "faa", "fas", "frn"])
def test_fasta_is_known_by_its_name(suffix):
    assert text_of(f"some/x.{suffix}", FASTA) == (
        b"ACGTACGG>TTT",
        f"x.{suffix}: FASTA, 2 records, 12 letters (>ACGT)",
    )


def test_letters_outside_are_shown():
    assert (
        text_of("a.fa", b">1\nAC-*1\xff\x00")[1]
        == "a.fa: FASTA, 1 record, 7 letters (\\x00*-1AC\\xff)"
    )
    assert text_of("a.fa", b"ACGT")[1] == "a.fa: FASTA, 1 record, 4 letters (ACGT)"


@pytest.mark.parametrize(("suffix", "kind"), [("gz", "gzip"), ("bz2", "bzip2"), ("xz", "xz")])
def test_compressed_files_are_unpacked(suffix, kind, monkeypatch):
    """By how they begin, in several streams too. The name inside says whether it is FASTA."""
    monkeypatch.setattr(data, "BLOCK", 100)
    content = bytes(random.Random(0).choices(b"some letters\n", k=1000))
    compress = COMPRESS[suffix]
    assert text_of(f"book.txt.{suffix}", compress(content)) == (
        content,
        f"book.txt.{suffix}: {kind}, 1,000 bytes",
    )
    assert text_of("download", compress(content[:300]) + compress(content[300:]))[0] == content
    assert text_of(f"x.fna.{suffix}", compress(FASTA)) == (
        b"ACGTACGG>TTT",
        f"x.fna.{suffix}: {kind}, FASTA, 2 records, 12 letters (>ACGT)",
    )
    # something has unpacked it, and left the name
    assert text_of("x.fa.gz", FASTA)[0] == b"ACGTACGG>TTT"
    packed = bytearray(compress(content))
    assert re.match(
        r"x is damaged or cut short \(.+\): fetch it again", refusal("x", bytes(packed[:-9]))
    )
    packed[len(packed) // 2] ^= 255
    assert "x is damaged or cut short" in refusal("x", bytes(packed))
    assert f"x is gzip inside {kind}, whose bytes are no text" in refusal(
        "x", compress(gzip.compress(content))
    )


@pytest.mark.parametrize(
    # the time of packing stays out: workers that began in two seconds must name one test alike
    ("begins", "kind"),
    [
        (b"PK\x03\x04", "zip"),
        (b"\x28\xb5\x2f\xfd", "zstd"),
        (gzip.compress(b"BAM\x01...", mtime=0), "BAM inside gzip"),
        (b"PAR1\x15\x04", "Parquet"),
        (b"\x89HDF\r\n\x1a\n", "HDF5"),
        (gzip.compress(bytes(257) + b"ustar\x0000", mtime=0), "tar inside gzip"),
        (b"%PDF-1.7", "PDF"),
    ],
)
def test_containers_are_refused(begins, kind):
    assert refusal("some/x.fa", begins) == (
        f"some/x.fa is {kind}, whose bytes are no text: give the text that is in it"
    )


def test_what_only_looks_like_a_container_is_read():
    for content in (b"BZh is no name", b"PARIS", b"CRAMPED", b"7z", b"", b"\x1f"):
        assert text_of("x", content)[0] == content


def test_fastq_and_headers_alone_are_refused():
    assert refusal("reads.fq.gz", b"@read") == (
        "reads.fq.gz is FASTQ, reads with qualities: make FASTA of it with seqtk seq -A"
    )
    for content in (b"", b";\n", b">1\n>2\n"):
        assert refusal("x.fa", content) == "x.fa is FASTA without letters: there is nothing to read"


def test_no_more_is_given_than_asked_for(monkeypatch):
    monkeypatch.setattr(data, "BLOCK", 7)
    assert text_of("x", bytes(100), most=20) == (bytes(20), "x: 20 bytes")


def test_files_make_one_document(tmp_path):
    """And it says what was read: a line for each of a few, one line for many."""
    names = ["c.txt", "a.fa", "b.FASTA", "d.txt", "e.txt"]
    paths = [tmp_path / name for name in names]
    for path in paths:
        path.write_bytes(FASTA)
    document = load_document([str(path) for path in paths[:3]], 4, 1, {"fasta_case": "upper"})
    assert document.content == FASTA + 2 * b"ACGTACGG>TTT"
    said = "a.fa: FASTA, 2 records, 12 letters (>ACGT)"
    hint = "begins as FASTA does, but its name does not end in .fa: read as text"
    read = [f"c.txt: {len(FASTA)} bytes", f"  {hint}", said, said.replace("a.fa", "b.FASTA")]
    assert document.read == "\n".join(read)
    assert document.identity()["read"] == document.read
    paths[1].write_bytes(gzip.compress(b">x\nNN\n"))
    content, said = read_files(paths, {})
    kinds = "; 1 of them packed by gzip; 2 of them are FASTA, with 3 records (>ACGNT)"
    hint = "\n  3 of them begin as FASTA does, but are not named .fa: read as text"
    assert said == f"5 files: {len(content)} bytes{kinds}{hint}"
    paths[0].write_bytes(b"text")
    assert read_files(paths[:1] * 5, {})[1] == "5 files: 20 bytes"


def test_fasta_under_another_name_is_noticed():
    for name, content in (
        ("-", b">a\nACGT"),
        ("x.txt.gz", gzip.compress(b";note\r\n>a b\r\nACGT-*\r\n>b")),
    ):
        assert text_of(name, content)[1].endswith(
            "begins as FASTA does, but its name does not end in .fa: read as text"
        )
    for content in (
        b">>> print(1)\n1\n",
        b"> quoted\nsome words\n",
        b"text\n>a\nACGT\n",
        b">a",
        b"",
    ):
        assert text_of("x.txt", content)[1] == f"x.txt: {len(content)} bytes"


def test_a_file_that_unpacks_to_more_than_fits_is_refused(tmp_path, monkeypatch):
    """A few kilobytes may hold a terabyte: no more than one block beyond what fits is unpacked."""
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(bytes(10**7)))
    monkeypatch.setattr(data, "physical_bytes", lambda: 10**6)
    with pytest.raises(
        ValueError, match=r"bomb\.gz does not fit: files may have 500,000 bytes in all, half of the"
    ):
        read_files([tmp_path / "bomb.gz"], {})
