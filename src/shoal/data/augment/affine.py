"""Images turned, scaled, sheared and moved at random, between pixels by bilinear interpolation.

When to use: photographs and drawings whose objects may lie at any place and tilt. Digits and letters bear 10 degrees;
a 6 turned by 180 is a 9.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from shoal.data.augment.base import Augmentation, as_before, as_floats
from shoal.data.augment.sample_draws import SampleDraws
from shoal.errors import ConfigError

_FILLS = ("zeros", "border", "reflection")


@dataclass(frozen=True)
class Affine(Augmentation):
    """`affine(10, scale=0.1, shift=0.1)`: up to 10 degrees, 0.9 to 1.1 times as large, moved by up to a tenth."""

    summary: ClassVar[str] = "turn, scale, shear and move images"
    takes: ClassVar[str] = "images"
    degrees: float
    scale: float = 0.0
    shift: float = 0.0
    shear: float = 0.0
    fill: str = "zeros"

    def __post_init__(self) -> None:
        if self.fill not in _FILLS:
            raise ConfigError(f"augment: affine has fill={self.fill}; it is {', '.join(_FILLS)}.")
        if not 0.0 <= self.scale < 1.0:
            raise ConfigError(f"augment: affine has scale={self.scale:g}; it is from 0 to below 1.")

    def change(self, rows: torch.Tensor, draws: SampleDraws) -> torch.Tensor:
        """From where in the image each pixel comes."""
        images = as_floats(rows)
        images = images[:, None] if rows.dim() == 3 else images
        grid = self._grid(draws, images)
        # Not by affine_grid: its matrix products may round otherwise in a batch of another size.
        moved = F.grid_sample(images, grid, "bilinear", self.fill, align_corners=False)
        return as_before(moved.reshape(rows.shape), rows)

    def _grid(self, draws: SampleDraws, images: torch.Tensor) -> torch.Tensor:
        height, width = images.shape[-2:]
        unit = draws.symmetric(5, 1.0).tolist()
        numbers = torch.tensor(
            [self._inverse(row, width, height) for row in unit], dtype=images.dtype, device="cpu"
        )
        xx, xy, yx, yy, x0, y0 = [numbers[:, i, None, None] for i in range(6)]
        x = ((torch.arange(width, dtype=images.dtype, device="cpu") + 0.5) - width / 2)[None, None, :]
        y = ((torch.arange(height, dtype=images.dtype, device="cpu") + 0.5) - height / 2)[None, :, None]
        across = (xx * x + xy * y + x0) * (2.0 / width)
        down = (yx * x + yy * y + y0) * (2.0 / height)
        return torch.stack([across, down], dim=-1)

    def _inverse(self, unit: list[float], width: int, height: int) -> tuple[float, ...]:
        """From a pixel's place to its source, in pixels about the middle; in double, one sample at a time."""
        angle, scale, right, down, shear = unit
        turn = math.radians(angle * self.degrees)
        size = 1.0 / (1.0 + scale * self.scale)
        slant = math.tan(math.radians(shear * self.shear))
        xx, xy = math.cos(turn) * size, math.sin(turn) * size
        yx, yy = -math.sin(turn) * size, math.cos(turn) * size
        xx, yx = xx + slant * yx, yx
        xy = xy + slant * yy
        x0, y0 = right * self.shift * width, down * self.shift * height
        return xx, xy, yx, yy, -(xx * x0 + xy * y0), -(yx * x0 + yy * y0)
