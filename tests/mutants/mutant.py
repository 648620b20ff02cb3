"""The type of a mutant, and the tests of each room."""

from typing import NamedTuple

# The core must be noticed by two cases: one that is dropped or changed then leaves another.
CORE = ("plan", "run", "ranks", "kernels", "attention", "pattern.py")

# What should notice, the likeliest and quickest first.
PLAN = ("tests/plan/test_plan.py", "tests/plan/test_counts.py")
COUNTS = tuple(reversed(PLAN))
WINDOWS = ("tests/plan/test_windows.py", *PLAN)
CHOICE = ("tests/plan/test_choose.py",)
CALL = ("tests/attention/test_attention.py",)
CACHE = ("tests/run/test_cache.py", "tests/ranks/test_cache_ranks.py")
MESSAGES = ("tests/attention/test_messages.py",)
SDPA = ("tests/kernels/test_sdpa.py", "tests/kernels/test_cuda.py")
TRITON = ("tests/kernels/test_row_kernels.py",)
RANKS = (
    "tests/ranks/test_ring.py",
    "tests/ranks/test_parallel.py",
    "tests/ranks/test_gradients.py",
)
AGREEMENT = (
    "tests/ranks/test_handshake.py",
    "tests/ranks/test_parallel.py",
    "tests/ranks/test_repeated_calls.py",
)
BATCHES = ("tests/ranks/test_context.py", "tests/ranks/test_group_without_cpu.py")
LAYERS = ("tests/layers/test_layers.py",)
COMPILED = ("tests/layers/test_deploy.py",)
GENERATE = ("tests/models/test_generate.py",)
SIMULATE = (
    "tests/simulate/test_measuring.py",
    "tests/simulate/test_one_rank.py",
    "tests/simulate/test_weighing.py",
    "tests/ranks/test_ring.py",
)
LANGUAGE_MODEL = ("tests/models/test_model.py", "tests/ranks/test_parallel.py")
TORCHSCALE = ("tests/models/test_torchscale_attention.py", "tests/models/test_torchscale_models.py")
SLIDES = ("tests/models/test_longnet_vit.py", "tests/models/test_slide_weights.py")
AGREED = ("tests/training/test_agreement.py",)
TRAINING = ("tests/training/test_training.py",)
SCORING = ("tests/training/test_scoring.py", "tests/commands/test_writing.py")
CHECKPOINT = ("tests/training/test_checkpoint.py",)
CONVENTIONS = ("tests/integrations/test_torch_conventions.py",)

# By how the paths of tests begin: a package without which they are not collected.
NEEDS = {TRITON[0]: "triton", "tests/integrations/test_transformers": "accelerate"}


class Mutant(NamedTuple):
    """A change of one place in a file of the package, the idea that it breaks, and the tests that should notice."""

    idea: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def enough(self) -> int:
        """How many cases must notice."""
        return 2 if self.file.split("/")[0] in CORE else 1

    @property
    def needs(self) -> str | None:
        """The package that its tests need, if the environment of `make test` may lack it."""
        return next((NEEDS[start] for start in NEEDS if self.tests[0].startswith(start)), None)
