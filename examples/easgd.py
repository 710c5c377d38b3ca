"""Registers a new algorithm: elastic averaging SGD (Zhang, Choromanska, LeCun; arXiv 1412.6651).

Every h steps each rank's weights move a little towards a centre, and the centre moves towards the mean of all
ranks' weights.

    torchrun --nproc-per-node 4 examples/easgd.py
"""

import torch
from torch import nn

import trigram
from trigram.mixing import Mean


class Elastic(Mean):
    """``x <- x - alpha (x - centre)`` and ``centre <- centre + alpha n (mean x - centre)``."""

    exact = False  # the ranks' weights differ after the step

    def __init__(self, tensors, groups, alpha):
        super().__init__(tensors, groups)
        self.pull, self.beta = alpha, min(alpha * groups.size, 1.0)
        self.take()
        self.centre = self.inp.clone()

    def wait(self):
        """Waits for the mean, computes this rank's new weights in `out`, and moves the centre."""
        super().wait()  # `out` is the mean of all `inp`
        step = self.beta * (self.out - self.centre)
        torch.lerp(self.inp, self.centre, self.pull, out=self.out)
        self.centre += step

    def state(self):
        """The state that a checkpoint must contain."""
        return {"centre": self.centre.clone()}

    def load(self, state):
        """Restores what :meth:`state` returned."""
        self.centre.copy_(state["centre"])


trigram.register("easgd", trigram.Trigram("central", "full", "every:4", "weights"), step=Elastic, alpha=0.2)


def main() -> None:
    """Fits a random linear map, and prints the loss of the averaged weights."""
    torch.manual_seed(0)
    model = trigram.with_bagua(nn.Linear(8, 2), "easgd", alpha=0.3)
    target = torch.randn(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.Generator().manual_seed(trigram.rank())
    for _ in range(200):
        x = torch.randn(16, 8, generator=inputs)
        optimizer.zero_grad()
        (model(x) - x @ target).square().mean().backward()
        optimizer.step()
    with trigram.consensus(model):
        loss = (model(x) - x @ target).square().mean().item()
    print(f"rank {trigram.rank()}: loss {loss:.6f}")


if __name__ == "__main__":
    main()
