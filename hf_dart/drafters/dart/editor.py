"""Edit passes: a head runs again on its own draft (as DEdit does, arXiv 2609.38510, here on the head itself).

First draft, edited draft, 1 to 3 passes. Mask slot j, which drafts token j + 1, now holds draft token j and what the
first pass knew there. If a slot attends to earlier slots only, its new distribution is that of token j + 1
after the draft tokens 1..j, and passes are Jacobi iterations: the k-th has the k + 1 first tokens of the draft that
tokens drafted one by one would have. That needs the passes to be one function of the draft: all start from the
hidden states of the first pass, never from each other's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_dart.drafters.dart.configuration import DartConfig


class Editor(nn.Module):
    """Layers that put a draft token into a mask slot and correct the hidden state there.

    The token stands where a real position has the token after it; the missing features are guessed from it and from
    the slot's hidden state. The pass corrects that state, by nothing as long as the editor is untrained.
    """

    def __init__(self, config: DartConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.embedding_size + config.hidden_size, config.hidden_size, bias=False)
        self.correction = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def features(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """Fused features [..., H] of slots, from normed embeddings [..., E] and hidden states [..., H]."""
        return self.fc(torch.cat([embeddings, hidden], dim=-1))

    def forward(self, first: Tensor, again: Tensor) -> Tensor:
        """Hidden states [..., H] of the edited draft.

        Args:
            first: [..., H] of the first draft.
            again: [..., H] of the pass over the slots that hold it.
        """
        return first + self.correction(again)
