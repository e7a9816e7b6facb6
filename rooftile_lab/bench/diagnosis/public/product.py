"""Times a matrix product, in --dtype fp32 or bf16: what an environment makes of the machine's arithmetic."""

from __future__ import annotations

import torch

from rooftile_lab.bench.diagnosis.public.course import Course


def main() -> None:
    course = Course(dtype="fp32")
    dtype = torch.bfloat16 if course.options.dtype == "bf16" else torch.float32
    side = course.sized(384, 4096, 8)
    x, y = (torch.randn(side, side, device=course.device, dtype=dtype) for _ in range(2))
    while course.goes_on():
        for _ in range(8):
            x @ y


if __name__ == "__main__":
    main()
