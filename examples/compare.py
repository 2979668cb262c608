"""Did two runs see the same losses? Reads the event logs that Shoal writes.

python examples/compare.py demo/log demo/zero2
"""

import sys
from pathlib import Path

from shoal.report import last_pass, read_events


def main(first: str, second: str) -> None:
    losses = [[e["loss"] for e in last_pass(read_events(Path(f) / "events.jsonl"))] for f in (first, second)]
    both = list(zip(*losses, strict=False))
    gap = max(abs(a - b) / abs(a) for a, b in both)
    same = "the same losses" if gap < 1e-3 else "OTHER losses"
    print(f"{second} gave {same} as {first}: {len(both)} steps, largest relative difference {gap:.1e}")
    sys.exit(0 if gap < 1e-3 else 1)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
