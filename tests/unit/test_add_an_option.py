"""An option added where CONTRIBUTING says, and nowhere else, works; backends that lack it refuse it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import rooftile

PACKAGE = Path(rooftile.__file__).parent
ROOT = PACKAGE.parent

# an option that adds a number to every score: (file, line that is there, what stands in its place)
LIFT = (
    ("exact/spec.py", "    backend: Any = None\n", "    backend: Any = None\n    lift: Any = 0.0\n"),
    ("exact/spec.py", "    has_bias: bool = False\n", "    lift: float = 0.0\n    has_bias: bool = False\n"),
    ("exact/spec.py", '"bias": self.has_bias,', '"lift": self.lift != 0, "bias": self.has_bias,'),
    ("exact/spec.py", "deterministic=False, softcap=0.0,", "deterministic=False, lift=0.0, softcap=0.0,"),
    ("exact/spec.py", "{v_order} {size}", "{v_order} {size} {lift}"),
    ("exact/spec.py", "v_order, size = rest", "v_order, size, lift = rest"),
    ("exact/spec.py", "        softcap=float(softcap),\n", "        softcap=float(softcap),\n        lift=float(lift),\n"),
    (
        "exact/validate.py",
        "        has_alibi=",
        '        lift=_number("lift", settings.lift, -math.inf, math.inf),\n        has_alibi=',
    ),
    ("exact/reference/attention.py", "    softcap: float = 0.0,\n", "    softcap: float = 0.0,\n    lift: float = 0.0,\n"),
    ("exact/reference/attention.py", "    if alibi is not None:\n", "    x = x + lift\n    if alibi is not None:\n"),
    ("exact/backends/eager/__init__.py", 'OPTIONS = ("softcap",', 'OPTIONS = ("softcap", "lift",'),
    ("exact/backends/eager/__init__.py", '"softcap": spec.softcap,', '"softcap": spec.softcap, "lift": spec.lift,'),
    ("exact/api.py", "    dropout: float = 0.0,\n", "    dropout: float = 0.0,\n    lift: float = 0.0,\n"),
    ("exact/api.py", "precision, True, backend)\n", "precision, True, backend, lift)\n"),
    ("exact/api.py", "precision, False, backend)\n", "precision, False, backend, lift)\n"),
)

PROGRAM = """
import torch, rooftile as rt
assert rt.__file__.startswith({root!r}), rt.__file__
q, k, v = (torch.randn(1, 9, 2, 32) for _ in range(3))
for _ in range(2):  # the second call is a repeated one
    o, lse = rt.attention_with_lse(q, k, v, rt.CAUSAL)
    lifted, lifted_lse = rt.attention_with_lse(q, k, v, rt.CAUSAL, lift=2.0)
    assert torch.allclose(lifted, o, atol=1e-5) and torch.allclose(lifted_lse, lse + 2, atol=1e-5)
for backend in ("hopper", "triton", "sdpa", "tiled"):
    try:
        rt.attention(q, k, v, lift=2.0, backend=backend)
    except rt.Unsupported as refusal:
        assert "lift; has" in str(refusal), refusal
    else:
        raise AssertionError(backend + " ignores an option that it does not have")
try:
    rt.attention(q, k, v, lift="2")
except rt.InvalidInput as refusal:
    assert "lift is '2'; must be a number" in str(refusal), refusal
else:
    raise AssertionError("not checked")
"""


def test_an_option_added_where_contributing_says_works(tmp_path: Path) -> None:
    section = re.search(r"## Add an option\n(.*?)\n## ", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    assert section is not None
    for name in {name for name, _, _ in LIFT}:
        place = "rooftile/exact/backends/" if name.startswith("exact/backends/") else f"rooftile/{name}"
        assert place in section[1], f"CONTRIBUTING does not say that an option touches {name}"
    copy = tmp_path / "rooftile"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name, old, new in LIFT:
        text = (copy / name).read_text()
        assert old in text, f"{name} has no {old!r} any more: say here and in CONTRIBUTING where an option goes"
        (copy / name).write_text(text.replace(old, new))
    program = PROGRAM.format(root=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
