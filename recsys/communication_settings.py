"""In what precision ranks send each other vectors and gradients: the settings, and what excludes what and why.

No torch here, like in `recsys.recipe`. docs/communication.md tells what was measured.
"""

from collections.abc import Mapping
from typing import Literal

import pydantic

from recsys.features import Settings

Precision = Literal["fp32", "fp16", "bf16", "int8"]

SUMMING_KINDS = ("row_wise", "table_row_wise", "grid")
"""Kinds in which ranks hold partial sums of a bag, which are added up on the way; sequences are never summed."""

_HALVES = ("fp16", "bf16")
_TOP_K_BYTES = 8  # a number of 4 bytes, and 4 for its place


class CommunicationSettings(Settings):
    """What is sent in fewer bits than fp32 while training; evaluation and prediction send fp32."""

    embeddings: Precision = "fp32"
    """Of the vectors that ranks send to the rows that asked for them."""
    embedding_gradients: Precision | None = None
    """Of the vectors' gradients on their way back; None: that of `embeddings`."""
    dense: Literal["fp32", "fp16", "bf16", "top_k"] = "fp32"
    """Of the averaged gradients: of the dense layers and of replicated tables. `top_k` sends the largest gradients of
    the dense layers, adds what it keeps back to the next step's, and leaves replicated tables in fp32."""
    top_k_share: float = pydantic.Field(default=0.01, gt=0, le=0.5)
    """Share of the dense gradients that `dense: top_k` sends in a step."""

    @pydantic.model_validator(mode="after")
    def _only_top_k_has_a_share(self) -> "CommunicationSettings":
        if self.dense != "top_k" and self.top_k_share != type(self).model_fields["top_k_share"].default:
            raise ValueError("`top_k_share` has no effect without `dense: top_k`. Do: remove it, or set dense=top_k")
        return self

    @property
    def gradients(self) -> Precision:
        """Precision of the vectors' gradients."""
        return self.embedding_gradients or self.embeddings

    @property
    def compresses_embeddings(self) -> bool:
        """Whether the exchanges of vectors are other than plain fp32."""
        return (self.embeddings, self.gradients) != ("fp32", "fp32")

    @property
    def is_plain(self) -> bool:
        """Whether everything is sent in fp32."""
        return not self.compresses_embeddings and self.dense == "fp32"

    def excluded_kinds(self, *, attended: bool) -> Mapping[str, str]:
        """Sharding kind -> why a table cannot be split so; `attended`: the model reads it event by event."""
        if attended or "int8" not in (self.embeddings, self.gradients):
            return {}
        return dict.fromkeys(SUMMING_KINDS, _NO_INT8_SUMS)

    @property
    def replicas_share(self) -> float:
        """Bytes of the averaged gradients of replicated tables, against fp32."""
        return 0.5 if self.dense in _HALVES else 1.0

    def dense_bytes(self, num_weights: int, world_size: int) -> float:
        """Bytes that a rank receives in a step for the gradients of this many dense weights; an upper bound."""
        if self.dense == "top_k":
            return (world_size - 1) * _TOP_K_BYTES * self.top_k_share * num_weights
        return 2 * (2 if self.dense in _HALVES else 4) * num_weights


_NO_INT8_SUMS = (
    "With int8 in train.communication each block of numbers has a scale of its own, so that ranks cannot add up the "
    "partial sums of a bag, as they do here"
)

_WHERE = "Do: set train.communication.embeddings (vectors and their gradients) or train.communication.dense"
REFUSED_KEYS = {
    name: f"there is no such key. {_WHERE}"
    for name in ("comm_precision", "qcomms", "qcomms_config", "communication_precision", "allreduce_precision")
}
"""Other names for it -> where it is."""

_NO_FP8 = "TorchRec replaces it by other precisions where ranks add up vectors. Allowed: fp32, fp16, bf16, int8"
REFUSED_VALUES = {
    (key, value): _NO_FP8 for key in ("embeddings", "embedding_gradients") for value in ("fp8", "mx4")
} | {
    ("dense", "int8"): "int8 gradients cannot be added up, which is what an all-reduce does. "
    "Allowed: fp32, fp16, bf16, top_k",
}
"""(key, value) -> why there is no such choice."""
