"""Times a matrix product in --dtype fp32 or bf16, or a --convolution: what an environment makes of the machine's arithmetic."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from rooftile_lab.bench.diagnosis.public.course import Course


def main() -> None:
    course = Course(dtype="fp32", convolution=False)
    dtype = torch.bfloat16 if course.options.dtype == "bf16" else torch.float32
    side = course.sized(384, 4096, 8)
    x, y = (torch.randn(side, side, device=course.device, dtype=dtype) for _ in range(2))
    images, weight = x.reshape(-1, 8, 8, 8)[: side // 8].repeat(1, 16, 4, 4), torch.randn(128, 128, 3, 3, device=course.device)
    while course.goes_on():
        for _ in range(8):
            F.conv2d(images, weight.to(dtype), padding=1) if course.options.convolution else x @ y


if __name__ == "__main__":
    main()
