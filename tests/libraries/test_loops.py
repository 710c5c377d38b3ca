"""Loops of public implementations: REINFORCE and WGAN-GP."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

from tests.libraries.script import PATIENCE, Counts, Run, script
from tests.support.cases import Cases

CASES = Cases()


class Policy(nn.Module):
    """Returns a distribution of actions."""

    def __init__(self, actions: int, continuous: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, actions))
        self.spread = nn.Parameter(torch.zeros(actions)) if continuous else None

    def forward(self, observation: Tensor) -> Categorical | Normal:
        out = self.body(observation)
        return Categorical(logits=out) if self.spread is None else Normal(out, self.spread.exp())


@script(CASES, ("categorical",), ("normal",))
def reinforce(run: Run, kind: str) -> None:
    """The policy is called once for each action of an episode, and has one backward pass at its end.

    What falls is computed from the distributions, so that chance has no part in it: the probability of wrong
    actions, or the distance of the mean action from the right one.
    """
    policy = run.wrap(Policy(3, kind == "normal"))
    torch.manual_seed(run.rank)  # of the actions
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
    for episode in range(12):
        log_probs: list[Tensor] = []
        rewards: list[Tensor] = []
        wrong: list[Tensor] = []
        for time in range(4):
            observation = run.data(64, 4, salt=10 * episode + time)
            actions = policy(observation)
            action = actions.sample()
            if kind == "normal":
                right = observation[:, :3]
                log_probs.append(actions.log_prob(action).sum(1))
                rewards.append(-(action - right).square().sum(1))
                wrong.append((actions.mean - right).square().mean().detach())
            else:
                best = observation[:, :3].argmax(1, keepdim=True)
                log_probs.append(actions.log_prob(action))
                rewards.append((action == best.squeeze(1)).float())
                wrong.append(1 - actions.probs.gather(1, best).mean().detach())
        returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)
        returns = (returns - returns.mean(1, keepdim=True)) / (returns.std(1, keepdim=True) + 1e-6)
        loss = -(torch.stack(log_probs) * returns).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.losses.append(float(torch.stack(wrong).mean()))


def _mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 16), nn.LeakyReLU(0.2), nn.Linear(16, outputs))


@script(CASES, ("frozen",), ("not frozen",))
def wgan_gp(run: Run, critic: str) -> Counts:
    """Two steps of the critic, with a gradient penalty, for each of the generator.

    While the generator is trained the critic is frozen, or its gradients are dropped afterwards.
    """
    g, d = run.wrap(_mlp(4, 2)), run.wrap(_mlp(2, 1))
    torch.manual_seed(run.rank)  # of the noise
    o_g = torch.optim.Adam(g.parameters(), lr=0.02, betas=(0.5, 0.9))
    o_d = torch.optim.Adam(d.parameters(), lr=0.02, betas=(0.5, 0.9))
    goal, steps = torch.tensor([3.0, -2.0]), 40
    for step in range(steps):
        for k in range(2):
            real = goal + 0.3 * run.data(64, 2, salt=2 * step + k)
            with torch.no_grad():
                fake = g(torch.randn(64, 4))
            mix = torch.rand(64, 1)
            between = (mix * real + (1 - mix) * fake).requires_grad_(True)
            out = d(between)
            (slope,) = torch.autograd.grad(out, between, torch.ones_like(out), create_graph=True)
            penalty = 10 * (slope.norm(2, dim=1) - 1).square().mean()
            loss = d(fake).mean() - d(real).mean() + penalty
            o_d.zero_grad()
            loss.backward()
            o_d.step()
        if critic == "frozen":
            d.requires_grad_(False)
        fake = g(torch.randn(64, 4))
        o_g.zero_grad()
        (-d(fake).mean()).backward()
        o_g.step()
        d.requires_grad_(True)
        run.losses.append(float((fake.detach().mean(0) - goal).norm()))
    passes = (
        2 * steps if critic == "frozen" else 3 * steps
    )  # a pass is a step, whether or not an update follows
    return [(steps, steps), (passes, passes)]


@pytest.mark.parametrize("case", list(CASES))
def test_loops(in_launch: Callable[..., None], case: str) -> None:
    in_launch("CASES", case, 2, patience=PATIENCE)
