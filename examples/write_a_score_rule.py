"""A score rule with a learned tensor: written, checked against its formula, and trained.

    python examples/write_a_score_rule.py
    python examples/write_a_score_rule.py --quick     # fewer training steps

The rule is ALiBi (Press et al. 2022, https://arxiv.org/abs/2108.12409, section 3) with slopes that are learned and a
distance that is clipped: ``score - softplus(slope[head]) * min(|q_pos - k_pos|, reach)``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus

import clearhead as ch

HEADS, REACH = 4, 16
MASK = ch.Causal() & ch.Window(before=63)  # the last 64 tokens


class LearnedAlibi(nn.Module):
    """A penalty on distance, with a learned slope for each head."""

    def __init__(self, num_heads: int, *, reach: int) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.linspace(-2.0, 1.0, num_heads))
        self.reach = reach

    def forward(
        self,
        score: Tensor,  # a tile [batch, heads, q_len, k_len] of scaled scores
        batch: Tensor,  # index tensors that broadcast to it
        head: Tensor,
        q_pos: Tensor,
        k_pos: Tensor,
    ) -> Tensor:
        """The new scores of the tile."""
        distance = (q_pos - k_pos).abs().clamp(max=self.reach)
        changed: Tensor = score - softplus(self.slope)[head] * distance
        return changed


def formula(query: Tensor, key: Tensor, value: Tensor, slope: Tensor, mask: ch.Mask) -> Tensor:
    """The same attention, written with torch on whole matrices."""
    length = query.shape[-2]
    scores = query @ key.mT / query.shape[-1] ** 0.5
    place = torch.arange(length)
    distance = (place[:, None] - place).abs().clamp(max=REACH)
    scores = scores - softplus(slope)[:, None, None] * distance
    weights: Tensor = scores.masked_fill(~mask.dense(length, length), -torch.inf).softmax(-1)
    return weights @ value


def check_against_formula() -> None:
    """Outputs and gradients of the rule, beside those of the formula in float64."""
    rule = LearnedAlibi(HEADS, reach=REACH)
    inputs = [*(torch.randn(2, HEADS, 300, 16, requires_grad=True) for _ in range(3)), rule.slope]
    ours = ch.attention(inputs[0], inputs[1], inputs[2], mask=MASK, scores=ch.ScoreFunction(rule))
    doubled = [tensor.detach().double().requires_grad_() for tensor in inputs]
    theirs = formula(doubled[0], doubled[1], doubled[2], doubled[3], MASK)
    weight = torch.randn(ours.shape)
    gradients = torch.autograd.grad((ours * weight).sum(), inputs)
    expected = torch.autograd.grad((theirs * weight).sum(), doubled)
    print(f"output      {relative(ours, theirs):.1e}")
    names = ("query", "key", "value", "slope")
    for name, gradient, other in zip(names, gradients, expected, strict=True):
        print(f"d {name:<9} {relative(gradient, other):.1e}")


def relative(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float(((ours - theirs).abs().max() / theirs.abs().max()).detach())


class Reader(nn.Module):
    """An embedding without positions, one attention under a score rule, and logits."""

    def __init__(self, vocabulary: int, scores: list[ch.ScoreRule]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 64)
        self.attention = ch.nn.MultiHeadAttention(64, HEADS, scores=scores)
        self.logits = nn.Linear(64, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids ``[batch, len]`` to logits ``[batch, len, vocabulary]``."""
        logits: Tensor = self.logits(self.attention(self.embedding(ids), mask=MASK))
        return logits


def train(model: Reader, steps: int) -> None:
    """Learn to name the token before the present one, in random sequences."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps + 1):
        ids = torch.randint(0, 16, (16, 64))
        loss = cross_entropy(model(ids)[:, 1:].flatten(0, 1), ids[:, :-1].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % max(1, steps // 4) == 0:
            print(f"  step {step:4d}  loss {loss.item():.3f}")


def train_with_and_without(steps: int) -> None:
    """Only the rule tells this model about distances: without it the loss stays high."""
    rule = LearnedAlibi(HEADS, reach=REACH)
    print("training with the rule")
    start, model = softplus(rule.slope).tolist(), Reader(16, [ch.ScoreFunction(rule)])
    train(model, steps)
    slopes = zip(start, softplus(rule.slope).tolist(), strict=True)
    print(f"  slopes {[f'{a:.2f} to {b:.2f}' for a, b in slopes]}")
    print(f"  in the state dict as {[name for name in model.state_dict() if 'scores' in name]}")
    print("training without it")
    train(Reader(16, []), steps)


def where_rules_run() -> None:
    """Which rules the CPU kernels run, and which run in tiles of torch operations."""
    x, table = torch.randn(1, HEADS, 256, 16), torch.randn(256)
    rules: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]] = {
        "bias of head and distance": LearnedAlibi(HEADS, reach=REACH),
        "bias of the key": lambda score, batch, head, q_pos, k_pos: score + table[k_pos],
        "soft cap": lambda score, batch, head, q_pos, k_pos: 30 * torch.tanh(score / 30),
        "bias of query and key": lambda score, batch, head, q_pos, k_pos: score + table[q_pos] * table[k_pos],
        "masked score": lambda score, batch, head, q_pos, k_pos: torch.where(table[k_pos] > 0, score, -torch.inf),
        "product with the score": lambda score, batch, head, q_pos, k_pos: score * (1 + table[k_pos]),
    }
    for name, rule in rules.items():
        report = ch.explain_dispatch(x, x, x, mask=ch.Causal(), scores=ch.ScoreFunction(rule))
        print(f"{name:<26} {report.choice:<7} {'; '.join(report.reasons['native'])}".rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(description="A score rule with a learned tensor.")
    parser.add_argument("--quick", action="store_true", help="40 training steps")
    steps = 40 if parser.parse_args().quick else 150
    torch.manual_seed(0)
    print("relative difference to the formula in float64")
    check_against_formula()
    train_with_and_without(steps)
    print("which backend runs a rule, and why not the kernels")
    where_rules_run()


if __name__ == "__main__":
    main()
