"""Compares a padded with a packed batch of sequences of different lengths: the same outputs, fewer pairs.

Run: python examples/packed.py
"""

import torch

import rooftile as rt
from rooftile.exact.masks import pairs

torch.manual_seed(0)
lengths = [200, 31, 90, 12]
B, T, H, D = len(lengths), max(lengths), 4, 64

padded = torch.randn(B, T, H, D)
real = torch.arange(T) < torch.tensor(lengths)[:, None]  # (B, T)
packed = padded[real]  # (total, H, D)
cu = torch.tensor([0, *lengths]).cumsum(0)

# under a causal mask, only padding sees the padding at the end
with_padding = rt.attention(padded, padded, padded, rt.CAUSAL)[real]
without = rt.attention_packed(packed, packed, packed, cu, cu, rt.CAUSAL)
torch.testing.assert_close(without, with_padding)

computed, needed = B * pairs(rt.CAUSAL, T, T), sum(pairs(rt.CAUSAL, n, n) for n in lengths)
print(f"padded computes {computed:,} pairs per head, packed {needed:,}: {100 * needed / computed:.0f} %")
