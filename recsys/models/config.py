"""The settings of each model, without torch: the recipe reads them, the model is built from them."""

from typing import Annotated, ClassVar, Literal

import pydantic


class _Config(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, strict=True, extra="forbid", use_attribute_docstrings=True)


Activation = Literal["relu", "prelu", "dice"]
Widths = tuple[Annotated[int, pydantic.Field(ge=1)], ...]


class DeepFMConfig(_Config):
    """DeepFM: first order + factorization machine + deep tower over shared vectors."""

    attends: ClassVar[bool] = False
    name: Literal["deepfm"] = "deepfm"
    hidden: Widths = pydantic.Field(default=(400, 400, 400), strict=False)
    """Widths of the deep tower's hidden layers; empty means no deep part."""
    activation: Activation = "relu"
    """Activation of the deep tower."""
    batch_norm: bool = False
    """Batch normalisation before each activation of the deep tower."""
    dropout: float = pydantic.Field(default=0.0, ge=0, lt=1)
    """Share of hidden units that are zeroed in training."""
    embedding_dropout: float = pydantic.Field(default=0.0, ge=0, lt=1)
    """Share of the deep tower's inputs that are zeroed in training."""


class DINConfig(_Config):
    """Deep Interest Network: a local activation unit weighs every event of a history against the candidate."""

    attends: ClassVar[bool] = True
    name: Literal["din"] = "din"
    attention_hidden: Widths = pydantic.Field(default=(80, 40), strict=False)
    """Widths of the activation unit's hidden layers."""
    attention_activation: Activation = "dice"
    """Activation inside the activation unit."""
    attention_normalization: Literal["none", "softmax"] = "none"
    """`none` keeps the intensity of interest, as in the paper; `softmax` makes the weights of a history sum to 1."""
    first_order: bool = False
    """Add one trained weight per id of every field to the logit, from the same lookup as the id's vector."""
    interest_product: bool = False
    """Give the tower candidate * pooled history, element by element, beside the pooled history."""
    hidden: Widths = pydantic.Field(default=(200, 80), strict=False)
    """Widths of the tower's hidden layers."""
    activation: Activation = "dice"
    """Activation of the tower."""
    batch_norm: bool = True
    """Batch normalisation before each activation of the tower."""
    dropout: float = pydantic.Field(default=0.0, ge=0, lt=1)
    """Share of the tower's hidden units that are zeroed in training."""
    embedding_dropout: float = pydantic.Field(default=0.0, ge=0, lt=1)
    """Share of the tower's inputs that are zeroed in training."""


ModelConfig = Annotated[DeepFMConfig | DINConfig, pydantic.Field(discriminator="name")]
