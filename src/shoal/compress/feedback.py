"""Error feedback: what a payload leaves out of one vector is added to the next.

Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; Karimireddy et al., "Error Feedback Fixes SignSGD
and other Gradient Compression Schemes", ICML 2019.
When to use: with every code that drops much (sign, topk, randomk, powersgd). Nothing is lost then, only late: the sum
of all that was decoded, and the residual, is the sum of all that went in.
"""

from __future__ import annotations

import torch

from shoal.compress.base import Code, Layout


class Feedback:
    """The residual of one vector on one worker.

    A turn is: `before`, then the code's `encode`, then `after`; with codes of two rounds `after` follows `decode`.

    >>> from shoal.compress.bf16 import Bf16
    >>> layout = Layout(1, torch.float32, torch.device("cpu"))
    >>> code = Bf16().code(layout)
    >>> feedback, vector, payload = Feedback(code, layout), torch.tensor([1.001953125]), code.payload()
    >>> feedback.before(vector); code.encode(vector, payload, turn=0); feedback.after(payload, among=1)
    >>> payload.item(), feedback.residual.item()
    (1.0, 0.001953125)
    """

    def __init__(self, code: Code, layout: Layout) -> None:
        self._code = code
        self.residual = torch.zeros(layout.size, dtype=layout.dtype, device=layout.device)

    def before(self, vector: torch.Tensor) -> None:
        """Add what was left out so far to the vector, in place."""
        self.residual.copy_(vector.add_(self.residual))

    def after(self, payload: torch.Tensor, among: int) -> None:
        """Keep what the payload does not say. What is not finite is not kept: it would never go away again."""
        self._code.lose(self.residual, payload, among)
        # A sum is finite if all its parts are, but for very large ones, and it is cheaper than a look at each.
        # On a card it is looking that costs: the host would wait.
        if not self.residual.is_cpu or not torch.isfinite(self.residual.sum()):
            self.residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def reset(self) -> None:
        """Forget what was left out."""
        self.residual.zero_()

    def scale(self, by: float) -> None:
        """Multiply what was left out, as when the vectors change their unit."""
        self.residual.mul_(by)
