"""The pairs of snippets of docs/migrating.md, and what the page's table says of each.

A case is a row of that table. It takes a pair from the page, perhaps with a word exchanged or with inputs of another
size, so that the page can say with numbers where two functions part.
"""

import re
from typing import Any, NamedTuple

import torch
from pages import block, text_of
from torch import Tensor

PAGE = "docs/migrating.md"
COLUMNS = ("out", "dq", "dk", "dv")
HEADS, HEAD_DIM = 4, 8
SIDES = ("theirs", "ours")


def snippets_of(snippets: str) -> dict[str, str]:
    """The snippets of a block, by the comments at their heads: "theirs" and "ours"."""
    _, *texts = re.split(r"^# (theirs.*|ours)\n", snippets, flags=re.MULTILINE)
    return dict(zip(texts[::2], texts[1::2], strict=True))


IMPORTS = block("docs/migrating.md", "imports")
CHECK = snippets_of(block("docs/migrating.md", "check"))
TORCHSCALE = snippets_of(block("docs/migrating.md", "torchscale"))
MODULE = snippets_of(block("docs/migrating.md", "torchscale's module"))
DIVIDED = snippets_of(block("docs/migrating.md", "dilated-attention-pytorch"))
RING = snippets_of(block("docs/migrating.md", "ring"))
ZIGZAG = snippets_of(block("docs/migrating.md", "zigzag"))
OF_DOCUMENTS = snippets_of(block("docs/migrating.md", "zigzag varlen"))
LLAMA3 = snippets_of(block("docs/migrating.md", "llama3"))
LUCIDRAINS = snippets_of(block("docs/migrating.md", "ring-attention-pytorch"))
GROUPED = snippets_of(block("docs/migrating.md", "ring-attention-pytorch's order of heads"))
CONTEXT_PARALLEL = snippets_of(block("docs/migrating.md", "context_parallel"))
DEEPSPEED = snippets_of(block("docs/migrating.md", "DeepSpeed"))
FAIRSCALE = snippets_of(block("docs/fairscale.md", "FairScale"))
CLASSES = snippets_of(block("docs/migrating.md", "RingDilatedAttention"))

# What ImprovedDilatedAttention computes: the heads of a position are the sequence.
AMONG_HEADS = """
out = torch.zeros_like(query)
for heads, rows in ((slice(0, 2), slice(0, None)), (slice(2, 4), slice(1, None, 2))):
    out[:, rows, heads] = F.scaled_dot_product_attention(*(x[:, rows, heads] for x in (query, key, value))) / 2
"""


# dilated-attention-pytorch's module, and ours between its projections and its norm.
ITS_MODULE = """
from dilated_attention_pytorch.dilated_attention import MultiheadDilatedAttention

attention = MultiheadDilatedAttention(32, 4, dilation_rates=[1, 2], segment_lengths=[16, 64]).double()
out, _ = attention(x, x, x)
torch.save(attention.state_dict(), "weights.pt")
"""
BY_HAND = """
weights = torch.load("weights.pt")
query, key, value = (F.linear(x, weights[f"{n}_proj.weight"], weights[f"{n}_proj.bias"]) for n in "qkv")
query, key, value = (x.unflatten(2, (4, 8)) for x in (query, key, value))
ATTENTION
out = F.layer_norm(out.flatten(2), (32,), weights["norm.weight"], weights["norm.bias"])
out = F.linear(out, weights["out_proj.weight"], weights["out_proj.bias"])
""".replace("ATTENTION", DIVIDED["ours"])


class Case(NamedTuple):
    """A row. `environment` is where theirs runs; `order` is how its ranks deal positions."""

    name: str
    theirs: str
    ours: str
    environment: str = ""
    ranks: int = 1
    order: str = "contiguous"
    checkouts: tuple[str, ...] = ()
    replaced: tuple[tuple[str, str], ...] = ()  # in both snippets
    num_positions: int = 64
    num_kv_heads: int = HEADS
    dtype: torch.dtype = torch.float32

    @property
    def key(self) -> str:
        """A name for a folder."""
        return re.sub(r"\W+", "_", self.name)

    @property
    def loads_weights(self) -> bool:
        """Whether ours reads what theirs saved."""
        return "torch.load(" in self.ours

    @property
    def snippets(self) -> tuple[str, str]:
        """Theirs and ours, with what is replaced."""
        theirs, ours = self.theirs, self.ours
        for old, new in self.replaced:
            assert old in theirs + ours, f"{self.name}: {old!r} is in neither snippet"
            theirs, ours = theirs.replace(old, new), ours.replace(old, new)
        return IMPORTS.partition("\nfrom ring_dilated")[0] + theirs, IMPORTS + ours

    def given(self) -> dict[str, Tensor]:
        """What a snippet is given: query, key, value; and x for a module."""
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(1, self.num_positions, *shape, generator=generator).to(self.dtype)

        names = {"query": HEADS, "key": self.num_kv_heads, "value": self.num_kv_heads}
        given = {name: random(heads, HEAD_DIM) for name, heads in names.items()}
        return given | {"x": random(HEADS * HEAD_DIM)}


CAUSAL = "is_causal=False", "is_causal=True"
SHARDED = (  # torchscale over ranks
    ("flash_attention=True", "flash_attention=True, seq_parallel=True"),
    ("x.flatten(2) for", "x.chunk(dist.get_world_size(), 1)[dist.get_rank()].flatten(2) for"),
    (
        "pattern = ",
        "parallel = ContextParallel()\nquery, key, value = map(parallel.shard, (query, key, value))\npattern = ",
    ),
    ("value, pattern)", "value, pattern, parallel=parallel)"),
)
PADDED = (
    ("pattern = ", "from ring_dilated_attention.models import torchscale_attention\npattern = "),
)
PADDED += (("= dilated_attention(", "= torchscale_attention("),)
MODULE_ALONE = re.sub(
    r"^(# the function|attention\.q_proj|out).*\n", "", TORCHSCALE["theirs"], flags=re.MULTILINE
)
SDPA = "F.scaled_dot_product_attention(*rows, is_causal=True).transpose(1, 2)"
DILATED = (
    (
        "def attention(*x):",
        "from ring_dilated_attention import DilatedPattern, dilated_attention\n\n\ndef attention(*x):",
    ),
    (SDPA, "dilated_attention(*x, DilatedPattern.dense(is_causal=True))"),
    ("DilatedPattern.dense(is_causal=True)", "DilatedPattern([16, 64], [1, 4])"),
)
UNDIVIDED = DIVIDED["ours"].partition("# leave this out")[0]
THREE = (("[16, 64]", "[16, 32, 64]"), ("[1, 2]", "[1, 2, 4]"))


def _of_torchscale(name: str, *replaced: tuple[str, str], **options: Any) -> Case:
    pair = options.pop("pair", (TORCHSCALE["theirs"], TORCHSCALE["ours"]))
    return Case(
        name, *pair, "dilated", checkouts=("TORCHSCALE_CHECKOUT",), replaced=replaced, **options
    )


def _of_fkodom(
    name: str,
    *replaced: tuple[str, str],
    theirs: str = DIVIDED["theirs"],
    ours: str = DIVIDED["ours"],
) -> Case:
    """In float64: the division by a sum amplifies rounding."""
    name = f"dilated-attention-pytorch{name}"
    return Case(name, theirs, ours, "dilated", replaced=replaced, dtype=torch.float64)


def _of_flash(name: str, theirs: str, ours: str, **options: Any) -> Case:
    """In 16 bits, as flash_attn has it. (In float32 the rings add gradients up in a buffer that is written again.)"""
    return Case(name, theirs, ours, "rings", 2, dtype=torch.float16, **options)


def _of_rings(
    name: str, theirs: str, ours: str, *replaced: tuple[str, str], **options: Any
) -> Case:
    return Case(name, theirs, ours, "rings", 2, replaced=replaced, **options)


def _class(name: str, made: str, *replaced: tuple[str, str], ours: str = CLASSES["ours"]) -> Case:
    """Another class of the package, called alike."""
    imports = "from dilated_attention_pytorch import DilatedAttention"
    replaced = (
        (
            imports,
            "\n".join(
                [
                    imports,
                    *(f"from dilated_attention_pytorch{module} import *" for module in _MODULES),
                ]
            ),
        ),
        ("attention = DilatedAttention([16, 64], [1, 2])", f"attention = {made}.eval()"),
        *replaced,
    )
    checkouts = ("DARCSTAR_CHECKOUT", "TORCHSCALE_CHECKOUT")  # it imports the other
    return Case(name, CLASSES["theirs"], ours, "dilated", checkouts=checkouts, replaced=replaced)


_RINGS = ("true_ring", "simulated_ring", "ring_distributed")
_MODULES = ("", *(f".{ring}_dilated_attention" for ring in _RINGS))
_IMPROVED = "ImprovedDilatedAttention([16, 64], [1, 2])"
_COLLECTIVE = "RingDilatedAttentionV2Collective([16, 64], [1, 2])"
_PRODUCTION = "RingDilatedAttentionProduction(RingAttentionConfig([16, 64], [1, 2]))"
_UNDIVIDED = (" / len(pattern.branches)", "")
CASES = (
    _of_torchscale("torchscale"),
    _of_torchscale("torchscale, causal", CAUSAL),
    _of_torchscale("torchscale beside ours by default", (', phase="blocked"', "")),
    _of_torchscale("torchscale, 60 positions", num_positions=60),
    _of_torchscale("torchscale, 60 positions, causal", CAUSAL, num_positions=60),
    _of_torchscale("torchscale, 60 positions, `torchscale_attention`", *PADDED, num_positions=60),
    _of_torchscale("torchscale's module", pair=(MODULE_ALONE + MODULE["theirs"], MODULE["ours"])),
    _of_torchscale("torchscale, 2 ranks", *SHARDED, ranks=2),
    _of_torchscale("torchscale, 2 ranks, causal", *SHARDED, CAUSAL, ranks=2),
    _of_fkodom(""),
    _of_fkodom(", causal", CAUSAL),
    _of_fkodom(", 3 branches", *THREE),
    _of_fkodom(" beside ours without the last line", ours=UNDIVIDED),
    _of_fkodom("'s module", theirs=ITS_MODULE, ours=BY_HAND),
    _of_flash("ring_flash_attn_func", RING["theirs"], RING["ours"]),
    _of_flash(
        "ring_flash_attn_func, 2 key/value heads", RING["theirs"], RING["ours"], num_kv_heads=2
    ),
    _of_flash("zigzag_ring_flash_attn_func", ZIGZAG["theirs"], ZIGZAG["ours"], order="zigzag"),
    _of_flash("stripe_flash_attn_func", ZIGZAG["theirs, striped"], ZIGZAG["ours"], order="stripe"),
    _of_flash(
        "zigzag_ring_flash_attn_varlen_func",
        OF_DOCUMENTS["theirs"],
        OF_DOCUMENTS["ours"],
        order="zigzag_documents",
    ),
    _of_flash("llama3_flash_attn_varlen_func", LLAMA3["theirs"], LLAMA3["ours"]),
    _of_rings("ring-attention-pytorch", LUCIDRAINS["theirs"], LUCIDRAINS["ours"]),
    _of_rings(
        "ring-attention-pytorch, buckets of 24",
        LUCIDRAINS["theirs"],
        LUCIDRAINS["ours"],
        ("=16", "=24"),
    ),
    _of_rings(
        "ring-attention-pytorch, 2 key/value heads",
        LUCIDRAINS["theirs"],
        LUCIDRAINS["ours"],
        num_kv_heads=2,
    ),
    _of_rings(
        "the same, ours in its order of heads",
        LUCIDRAINS["theirs"],
        GROUPED["ours"],
        num_kv_heads=2,
    ),
    _of_rings(
        "ring-attention-pytorch, bfloat16",
        LUCIDRAINS["theirs"],
        LUCIDRAINS["ours"],
        dtype=torch.bfloat16,
    ),
    Case(
        "`context_parallel`", CONTEXT_PARALLEL["theirs"], CONTEXT_PARALLEL["ours"], "", 2, "zigzag"
    ),
    Case(
        "`context_parallel`, causal",
        CONTEXT_PARALLEL["theirs"],
        CONTEXT_PARALLEL["ours"],
        "",
        2,
        replaced=(CAUSAL,),
    ),
    Case("DeepSpeed Ulysses", *(DEEPSPEED[side] for side in SIDES), "deepspeed", 2),
    Case(
        "DeepSpeed Ulysses around ours, rate 4",
        *(DEEPSPEED[side] for side in SIDES),
        "deepspeed",
        2,
        replaced=DILATED,
    ),
    Case("FairScale's `checkpoint_wrapper`", *(FAIRSCALE[side] for side in SIDES), "dilated"),
    _class("`DilatedAttention`", "DilatedAttention([16, 64], [1, 2])"),
    _class("`ImprovedDilatedAttention`", _IMPROVED),
    _class("the same, beside attention among heads", _IMPROVED, ours=AMONG_HEADS),
    _class(
        "`RingDilatedAttentionV2Collective`, likewise",
        "RingDilatedAttentionV2Collective([16, 64], [1, 2])",
        ours=AMONG_HEADS,
    ),
    _class("`RingDilatedAttentionV2`", "RingDilatedAttentionV2([16, 64], [1, 2])"),
    _class("`TrueRingDilatedAttention`", "TrueRingDilatedAttention([16, 64], [1, 2])"),
    _class("`SimulatedRingDilatedAttention`", "SimulatedRingDilatedAttention([16, 64], [1, 2])"),
    _class(
        "`RingDilatedAttentionProduction`, ours without `/ len(pattern.branches)`",
        _PRODUCTION,
        _UNDIVIDED,
    ),
    _class("the same, causal", _PRODUCTION, _UNDIVIDED, CAUSAL),
    _class(
        "`RingDistributedDilatedAttention`",
        "RingDistributedDilatedAttention(32, 4, [16, 64], [1, 2])",
    ),
)


def _bare(cell: str) -> str:
    return cell.strip(" `")


def stated() -> dict[str, dict[str, str]]:
    """What the page's table says: by case, by column."""
    _, _, rows = text_of(PAGE).partition(
        "| theirs from ours | out | dq | dk | dv |\n|---|---|---|---|---|\n"
    )
    cells = [line.strip("| ").split(" |") for line in rows.partition("\n\n")[0].splitlines()]
    return {
        name: dict(zip(COLUMNS, map(_bare, (*found, *[""] * 4)), strict=False))
        for name, *found in cells
    }
