"""Mutants of what is built on the core, written by hand: models, training, integrations, commands.

One more was written and left out, since it changes no result: `num_seen - num_rows_seen` without `max`, in
models/torchscale/zero_rows.py. A phase is less than the rate, and so the rows that are seen are never less than none.
"""

from .mutant import (
    AGREED,
    CHECKPOINT,
    CONVENTIONS,
    GENERATE,
    LANGUAGE_MODEL,
    SCORING,
    SLIDES,
    TORCHSCALE,
    TRAINING,
    Mutant,
)

MUTANTS = (
    Mutant(
        "the label of a shard's last position is the first token of the next shard",
        "models/longnet.py",
        "shifted[:, last] = firsts[span.stop].to(x) if span.stop in firsts else fill",
        "shifted[:, last] = fill",
        LANGUAGE_MODEL,
    ),
    Mutant(
        "the last position of a document has no label",
        "models/documents.py",
        "if start < end <= stop:",
        "if start < end < stop:",
        LANGUAGE_MODEL,
    ),
    Mutant(
        "the temperature divides",
        "models/sampling.py",
        "return (shifted_BV / float(self.temperature)).softmax(-1)",
        "return (shifted_BV * float(self.temperature)).softmax(-1)",
        GENERATE,
    ),
    Mutant(
        "a row that has stopped appends nothing to its caches",
        "models/sampling.py",
        "counts_B = (~has_stopped_B).long()",
        "counts_B = torch.ones_like(has_stopped_B).long()",
        GENERATE,
    ),
    Mutant(
        "the last of a whole number of segments has rows",
        "models/torchscale/zero_rows.py",
        "return (length - 1) // branch.segment_length * branch.segment_length",
        "return length // branch.segment_length * branch.segment_length",
        TORCHSCALE,
    ),
    Mutant(
        "the mean of a slide is over the tiles of all ranks",
        "models/longnet_vit.py",
        ".sum(1, dtype=wide) / num_tiles",
        ".mean(1, dtype=wide)",
        SLIDES,
    ),
    Mutant(
        "held-out bytes are never trained on",
        "training/data.py",
        "% (self.num_train - length + 1)",
        "% (len(self.content) - length + 1)",
        TRAINING,
    ),
    Mutant(
        "the first held-out byte is scored too",
        "training/scoring.py",
        "for start in range(document.num_train - 1, len(content) - 1, size):",
        "for start in range(document.num_train, len(content) - 1, size):",
        SCORING,
    ),
    Mutant(
        "a rank that failed does not wait for the lock of a stopped one",
        "training/agreement.py",
        "ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))",
        "pass",
        AGREED,
    ),
    Mutant(
        "the newest two checkpoints stay",
        "training/checkpoint.py",
        "for path in ours[1:]:",
        "for path in ours:",
        CHECKPOINT,
    ),
    Mutant(
        "what every rank is given gets the gradients of all ranks' heads",
        "integrations/torch.py",
        "return whole.to_local(grad_placements=[Partial()])",
        "return whole.to_local()",
        CONVENTIONS,
    ),
    Mutant(
        "all ranks that share a sequence average their gradients, not some of them",
        "integrations/torch.py",
        "if not sharing <= set(averaging):",
        "if not sharing & set(averaging):",
        CONVENTIONS,
    ),
    Mutant(
        "lse must be -inf where the definition's is",
        "commands/errors.py",
        "if not torch.equal(result == -torch.inf, is_empty):",
        "if False:",
        ("tests/commands/test_check.py",),
    ),
    Mutant(
        "what a model writes cannot move the cursor of a terminal",
        "commands/generate.py",
        "if sys.stdout.isatty():",
        "if not sys.stdout.isatty():",
        ("tests/commands/test_writing.py",),
    ),
)
