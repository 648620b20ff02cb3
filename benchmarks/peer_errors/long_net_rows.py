"""LongNet 0.5.7 from the package index: out has n / dilation_rate rows, not n. It lacks the rows that dilation skips.

(The packages' __init__ files are not run, since they import much that is not needed here.)
"""

import sys
from importlib.util import find_spec
from types import ModuleType

import torch

for name in ("zeta", "zeta.nn", "zeta.nn.attention", "zeta.utils", "long_net"):
    spec = find_spec(name)
    package = ModuleType(name)
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules[name] = package
from long_net.attention import DilatedAttention  # noqa: E402

attend = DilatedAttention(
    dim=64,
    heads=4,
    dilation_rate=2,
    segment_size=32,
    device="cpu",
)
out = attend(torch.randn(1, 128, 64))
print(f"out has {out.shape[1]} rows, should be 128")
