"""Bytes a decode of one sequence moves, from shapes alone: weights, keys and values, recurrent state.

Arithmetic of a machine that is bound by memory: a pass reads every weight once, however many rows it has, and
each row reads keys, values, convolution windows and the experts it is sent to, and reads and writes the
recurrent state. It knows nothing of caches, kernels or launch times.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftproof.cache import LayerShape
from draftproof.recurrent import RecurrentShape

EMBEDDING, ATTENTION, DELTA, MLPS = "embedding", "attention layers", "linear-attention layers", "MLPs"
EXPERTS, HEAD_EXPERTS = "experts", "native head's experts"
NORMS, OUTPUT, HEAD, OTHER = "norms", "output layer", "native head", "other"
KEYS, STATE = "keys and values", "recurrent state"
PARTS = (EMBEDDING, ATTENTION, DELTA, MLPS, EXPERTS, NORMS, OUTPUT, HEAD, HEAD_EXPERTS, OTHER)
_OF_HEAD = (HEAD, HEAD_EXPERTS)
_STATE_ITEMSIZE = 4  # fp32 whatever the weights are, as stock keeps it


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Parameters by part and the shapes of what a decode keeps, at ``itemsize`` bytes a number.

    A tied output layer has no parameters of its own; the target reads the embedding as one. A row is sent to
    ``expert_share`` of a layer's experts.
    """

    num_params: dict[str, int]
    vocab_size: int
    hidden: int
    itemsize: int
    is_tied: bool
    attention: tuple[LayerShape, ...]
    recurrent: tuple[RecurrentShape, ...] = ()
    head: LayerShape | None = None
    expert_share: float = 1.0

    @property
    def num_target_params(self) -> int:
        """Of the text model, the native head not counted."""
        return sum(count for part, count in self.num_params.items() if part not in _OF_HEAD)

    @property
    def state_bytes(self) -> int:
        """Recurrent state of all layers: one sequence, and one slot of a pending row."""
        return sum(s.num_heads * s.key_size * s.value_size for s in self.recurrent) * _STATE_ITEMSIZE

    @property
    def window_bytes(self) -> int:
        """Convolution windows of all layers."""
        return sum(s.conv_channels * s.conv_width for s in self.recurrent) * self.itemsize

    @property
    def position_bytes(self) -> int:
        """Keys and values one position adds, sliding layers included."""
        return sum(self._keys(shape, 1) for shape in self.attention)

    @property
    def head_position_bytes(self) -> int:
        """Keys and values one position adds to the native head."""
        return 0 if self.head is None else self._keys(self.head, 1)

    def token_bytes(self, context: int) -> dict[str, int]:
        """What one decoded token reads (state: and writes) at ``context`` positions, by part."""
        read = {part: self._weights(part) for part in self.num_params if part not in _OF_HEAD}
        read[EMBEDDING] = self._row
        read[OUTPUT] = self.vocab_size * self._row
        read[KEYS] = sum(self._keys(shape, context) for shape in self.attention)
        read[STATE] = 2 * self.state_bytes + self.window_bytes
        return {part: read[part] for part in (*PARTS, KEYS, STATE) if read.get(part)}

    def row_bytes(self, context: int) -> int:
        """What every further row of a verification adds: all but the weights every row shares."""
        token = self.token_bytes(context)
        return sum(token.get(part, 0) for part in (EMBEDDING, EXPERTS, KEYS, STATE))

    def draft_bytes(self, context: int, num_outputs: int) -> int:
        """What one step of the native head reads, with ``num_outputs`` rows of the output layer."""
        keys = 0 if self.head is None else self._keys(self.head, context)
        weights = self._weights(HEAD) + self._weights(HEAD_EXPERTS)
        return weights + self._row + min(num_outputs, self.vocab_size) * self._row + keys

    def _weights(self, part: str) -> int:
        """Bytes one row reads of a part's weights."""
        share = self.expert_share if part in (EXPERTS, HEAD_EXPERTS) else 1.0
        return round(self.num_params.get(part, 0) * share) * self.itemsize

    @property
    def _row(self) -> int:
        return self.hidden * self.itemsize

    def _keys(self, shape: LayerShape, context: int) -> int:
        seen = context if shape.window is None else min(context, shape.window)
        return 2 * shape.num_groups * shape.head_size * seen * self.itemsize
