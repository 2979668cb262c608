"""What makers say of their cards: peaks by number format, memory, and bandwidths. Every number with its source.

Peaks are of dense matrices, in FLOP/s, in fp32 as torch computes by default, without TF32; bandwidths are in bytes a
second, in one direction. What of a peak is reached is not here: that is measured (fit.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.errors import ConfigError
from shoal.table import Table


@dataclass(frozen=True)
class Card:
    """One kind of card, in the machine that it is sold in."""

    peak: Mapping[str, float]
    """FLOP/s, by number format."""
    memory: float
    """Bytes."""
    memory_bandwidth: float
    inside: float
    """Bytes a second that a card sends to its neighbours of one host."""
    between: float
    """Bytes a second that a card sends to other hosts, in the maker's own machine."""
    per_host: int
    source: str

    def peak_of(self, precision: str) -> float:
        """The peak in a format; what a card cannot do in a narrow one it does in 16 bits."""
        if precision == "fp32" and precision not in self.peak:
            raise ConfigError(
                "the card's peak in fp32 is not known; give it, as in peak = { bf16 = 312e12, fp32 = 19.5e12 }, or use "
                "precision='bf16'."
            )
        return self.peak.get(precision, self.peak["bf16"])


_GB, _T = 1e9, 1e12

CARDS = Table(
    "card",
    {
        # NVIDIA V100 data sheet: 125 TFLOPS tensor, 900 GB/s, NVLink 300 GB/s; DGX-2: 16 cards, 8 × 100 Gb/s.
        "V100": Card(
            {"bf16": 125 * _T, "fp32": 15.7 * _T},
            32 * _GB,
            900 * _GB,
            150 * _GB,
            6.25 * _GB,
            16,
            "NVIDIA V100 data sheet, DGX-2",
        ),
        # NVIDIA A100 data sheet: 312 TFLOPS bf16, 1,555 and 2,039 GB/s, NVLink 600 GB/s; DGX A100: 8 × 200 Gb/s.
        "A100-40GB": Card(
            {"bf16": 312 * _T, "fp32": 19.5 * _T},
            40 * _GB,
            1555 * _GB,
            300 * _GB,
            25 * _GB,
            8,
            "NVIDIA A100 data sheet, DGX A100",
        ),
        "A100-80GB": Card(
            {"bf16": 312 * _T, "fp32": 19.5 * _T},
            80 * _GB,
            2039 * _GB,
            300 * _GB,
            25 * _GB,
            8,
            "NVIDIA A100 data sheet, DGX A100",
        ),
        # NVIDIA H100 data sheet, SXM, halved as it is given with sparsity: 1,979/2 bf16, 3,958/2 fp8; 3.35 TB/s;
        # NVLink 900 GB/s; DGX H100: 8 × 400 Gb/s.
        "H100": Card(
            {"bf16": 989.4 * _T, "fp8": 1978.9 * _T, "fp32": 67 * _T},
            80 * _GB,
            3350 * _GB,
            450 * _GB,
            50 * _GB,
            8,
            "NVIDIA H100 data sheet, DGX H100",
        ),
        # NVIDIA DGX B200 data sheet: 72 PFLOPS fp8 and 144 fp4 with sparsity, for 8 cards; 64 TB/s; NVLink 14.4 TB/s.
        "B200": Card(
            {"bf16": 2250 * _T, "fp8": 4500 * _T, "fp4": 9000 * _T, "fp32": 75 * _T},
            180 * _GB,
            8000 * _GB,
            900 * _GB,
            50 * _GB,
            8,
            "NVIDIA DGX B200 data sheet",
        ),
        # NVIDIA DGX B300 data sheet: 72 PFLOPS fp8, 108 fp4 dense, for 8 cards; 2.3 TB of memory; 8 × 800 Gb/s.
        "B300": Card(
            {"bf16": 2250 * _T, "fp8": 4500 * _T, "fp4": 13500 * _T},
            288 * _GB,
            8000 * _GB,
            900 * _GB,
            100 * _GB,
            8,
            "NVIDIA DGX B300 data sheet",
        ),
        # NVIDIA GB200 NVL72 page: 360 PFLOPS bf16, 720 fp8, 1,440 fp4 with sparsity, for 72 cards; 576 TB/s.
        "GB200": Card(
            {"bf16": 2500 * _T, "fp8": 5000 * _T, "fp4": 10000 * _T, "fp32": 80 * _T},
            186 * _GB,
            8000 * _GB,
            900 * _GB,
            50 * _GB,
            72,
            "NVIDIA GB200 NVL72 page",
        ),
        # NVIDIA GB300 NVL72 page: 360 PFLOPS bf16, 720 fp8 with sparsity, 1,080 fp4 dense, for 72 cards; 800 Gb/s.
        "GB300": Card(
            {"bf16": 2500 * _T, "fp8": 5000 * _T, "fp4": 15000 * _T},
            279 * _GB,
            8000 * _GB,
            900 * _GB,
            100 * _GB,
            72,
            "NVIDIA GB300 NVL72 page",
        ),
        # AMD Instinct MI300X data sheet: 1,307.4 bf16, 2,614.9 fp8; 5.3 TB/s; 7 links of 64 GB/s in one direction.
        "MI300X": Card(
            {"bf16": 1307.4 * _T, "fp8": 2614.9 * _T, "fp32": 163.4 * _T},
            192 * _GB,
            5300 * _GB,
            448 * _GB,
            50 * _GB,
            8,
            "AMD Instinct MI300X data sheet",
        ),
    },
)
