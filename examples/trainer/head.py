# SPDX-License-Identifier: Apache-2.0
"""A small EAGLE-3-style draft head, and what it needs of its target model.

At position i it sees the target's auxiliary states of position i, fused, and the embedding of token
i + 1, and says which token the target will choose next. Embedding and output rows are the target's,
frozen; only the fusion and one decoder layer are trained.

Letters in names: B batch (1), T tokens, H hidden, V vocabulary of the draft.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn


@dataclass(frozen=True)
class Target:
    """The frozen parts of the target model that a draft head shares with it."""

    embedding: Tensor  # [vocabulary, H]; also the output layer, which SmolLM2 ties to it
    norm: Tensor  # [H]
    epsilon: float
    heads: int

    @classmethod
    def read(cls, folder: Path) -> "Target":
        """From a model's folder; only two of its tensors are read."""
        config = json.loads((folder / "config.json").read_text())
        with safe_open(folder / "model.safetensors", "pt") as file:
            embedding = file.get_tensor("model.embed_tokens.weight").float()
            norm = file.get_tensor("model.norm.weight").float()
        return cls(embedding, norm, config["rms_norm_eps"], config["num_attention_heads"])

    def logits(self, last_BTH: Tensor) -> Tensor:
        """The target's own logits, out of its last layer's states before the final norm."""
        normed = F.rms_norm(last_BTH, self.norm.shape, self.norm, self.epsilon)
        return normed @ self.embedding.T


class DraftHead(nn.Module):
    """Fusion of the auxiliary layers, one decoder layer, the target's output rows."""

    embedding: Tensor
    rows: Tensor

    def __init__(self, target: Target, draft_ids: Tensor, layers: int) -> None:
        super().__init__()
        hidden = target.norm.numel()
        self.heads = target.heads
        self.fuse = nn.Linear(layers * hidden, hidden, bias=False)
        self.norm_token = nn.RMSNorm(hidden)
        self.norm_state = nn.RMSNorm(hidden)
        self.qkv = nn.Linear(2 * hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.norm_mlp = nn.RMSNorm(hidden)
        self.gate_up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(2 * hidden, hidden, bias=False)
        self.norm = nn.RMSNorm(hidden, target.epsilon)
        self.norm.weight.data.copy_(target.norm)
        self.register_buffer("embedding", target.embedding, persistent=False)
        self.register_buffer("rows", target.embedding[draft_ids], persistent=False)

    def forward(
        self, aux_BTA: Tensor, next_ids_BT: Tensor, positions_BT: Tensor, allowed_BTT: Tensor
    ) -> Tensor:
        """Logits ``[B, T, V]`` over the draft's vocabulary."""
        state = self.fuse(aux_BTA)
        token = F.embedding(next_ids_BT, self.embedding)
        both = torch.cat([self.norm_token(token), self.norm_state(state)], dim=-1)
        state = state + self.out(self._attend(self.qkv(both), positions_BT, allowed_BTT))
        gate, up = self.gate_up(self.norm_mlp(state)).chunk(2, dim=-1)
        state = state + self.down(F.silu(gate) * up)
        logits: Tensor = self.norm(state) @ self.rows.T
        return logits

    def _attend(self, qkv: Tensor, positions_BT: Tensor, allowed_BTT: Tensor) -> Tensor:
        b, t, _ = qkv.shape
        q, k, v = qkv.view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = (_rotate(x, positions_BT) for x in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed_BTT[:, None])
        return mixed.transpose(1, 2).reshape(b, t, -1)


def _rotate(x_BNTD: Tensor, positions_BT: Tensor) -> Tensor:
    """Rotary position embedding."""
    half = x_BNTD.shape[-1] // 2
    steps = torch.arange(half, device=x_BNTD.device) / half
    angles = positions_BT[:, None, :, None] * 10_000.0**-steps
    first, second = x_BNTD.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@dataclass(frozen=True)
class Lesson:
    """One packed batch of ``shmconn.collate.Collator``, made ready: n positions have a goal."""

    inputs: tuple[Tensor, Tensor, Tensor, Tensor]  # of DraftHead.forward
    valid_BT: Tensor
    goal_nV: Tensor  # the target's distribution over the draft's vocabulary
    choice_n: Tensor  # draft id of the target's choice; -1 = not in the draft's vocabulary

    @classmethod
    def of(cls, batch: dict[str, Any], target: Target, draft_ids: Tensor) -> "Lesson":
        """Position i needs the token, and the target's choice, at i + 1 of the same sample."""
        documents = batch["document_ids"]
        valid = (documents[:, :-1] == documents[:, 1:]) & (documents[:, 1:] >= 0)
        same = documents[:, :-1, None] == documents[:, None, :-1]
        with torch.no_grad():
            wanted = target.logits(batch["verifier_last_hidden_states"][:, 1:][valid])
            best = wanted.argmax(-1)
            at = torch.searchsorted(draft_ids, best).clamp(max=len(draft_ids) - 1)
            choice = torch.where(draft_ids[at] == best, at, -1)
            goal = wanted[:, draft_ids].softmax(-1)
        inputs = (
            batch["hidden_states"][:, :-1],
            batch["input_ids"][:, 1:],
            batch["position_ids"][:, :-1].float(),
            same & torch.ones_like(same).tril(),
        )
        return cls(inputs, valid, goal, choice)

    def judge(self, head: DraftHead) -> tuple[Tensor, float]:
        """Loss, and acceptance: the share of positions at which the head chose the very token that
        the target chose, so that a speculative step would have been accepted."""
        logits = head(*self.inputs)[self.valid_BT]
        known = self.choice_n >= 0
        accepted = (logits.argmax(-1) == self.choice_n) & known
        each = -(self.goal_nV * logits.log_softmax(-1)).sum(-1)
        loss = (each * known).sum() / known.sum().clamp(min=1)
        return loss, accepted.float().mean().item()
