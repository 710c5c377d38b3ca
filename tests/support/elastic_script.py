"""A script of an elastic job of two ranks, for tests of what starts ranks again."""

from __future__ import annotations

_TEXT = """
import os, pathlib, signal, time, torch, trigram
torch.set_num_threads(1)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
trigram.init(elastic=True)
net = trigram.with_bagua(net, optimizer=optimizer, elastic=True)
rank, died = os.environ["RANK"], pathlib.Path("died")
for step in range(trigram.stats(net)["steps"], 400):
    if rank == "VICTIM" and step == 5 and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if died.exists() and trigram.world_size() == 2:
        pathlib.Path(f"again{rank}").touch()
        if step > 10:
            break
    time.sleep(0.05)
"""


def dies_once(victim: int) -> str:
    """It ends when the victim, which kills itself in the sixth step, trains again: "again0" and "again1"."""
    return _TEXT.replace("VICTIM", str(victim))
