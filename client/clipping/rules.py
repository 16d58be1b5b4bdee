"""Which layer has which rule. A new rule is a small file and a line here."""

from collections.abc import Iterator

from torch import nn

from client.clipping.any_layer import AnyLayerRule
from client.clipping.attention import AttentionRule
from client.clipping.convolution import ConvolutionRule
from client.clipping.embedding import EmbeddingRule
from client.clipping.explicit import NormalisationRule
from client.clipping.linear import LinearRule
from client.clipping.rule import LayerRule, Masks
from common.errors import ModelError

# Exact types: a subclass may compute something else under the same name.
_RULES: dict[type[nn.Module], type] = {
    nn.Linear: LinearRule,
    nn.Conv1d: ConvolutionRule,
    nn.Conv2d: ConvolutionRule,
    nn.Embedding: EmbeddingRule,
    nn.MultiheadAttention: AttentionRule,
    nn.LayerNorm: NormalisationRule,
    nn.GroupNorm: NormalisationRule,
    nn.InstanceNorm1d: NormalisationRule,
    nn.InstanceNorm2d: NormalisationRule,
    nn.InstanceNorm3d: NormalisationRule,
}


def layers_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield, by name, the layers that are book-kept one by one: together they own every trainable parameter once.

    A module with a rule of its own, or with parameters of its own, is one layer with all that is inside it.
    """

    def walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if not any(p.requires_grad for p in module.parameters()):
            return
        if type(module) in _RULES or any(p.requires_grad for p in module.parameters(recurse=False)):
            yield name, module
            return
        for child_name, child in module.named_children():
            yield from walk(f"{name}.{child_name}" if name else child_name, child)

    owners: dict[int, str] = {}
    for name, layer in walk("", module):
        for parameter_name, parameter in layer.named_parameters():
            if parameter.requires_grad and owners.setdefault(id(parameter), name) != name:
                raise ModelError(
                    f"parameter {parameter_name!r} of layer {name!r} is shared with layer {owners[id(parameter)]!r}: "
                    "its per-record gradient mixes two layers; give each a parameter of its own"
                )
        yield name, layer


def rule_of(layer: nn.Module, masks: Masks) -> LayerRule:
    """Return the rule of a layer for the masks of its trainable parameters."""
    if draws_inside(layer):
        raise ModelError(
            f"a {type(layer).__name__} with dropout inside cannot be redone record by record: set its dropout to 0 and "
            "put an nn.Dropout beside it"
        )
    if isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.scale_grad_by_freq):
        raise ModelError("nn.Embedding with max_norm or scale_grad_by_freq is not supported: leave those options out")
    rule: LayerRule = _RULES.get(type(layer), AnyLayerRule)(layer, masks)
    return rule


def draws_inside(layer: nn.Module) -> bool:
    """Tell whether a layer that has to be redone draws random numbers of its own."""
    inner = any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in layer.modules())
    rate = getattr(layer, "dropout", 0.0)
    return inner or (isinstance(rate, float | int) and rate > 0)


def entries_per_record(layer: nn.Module) -> int:
    """Return how many numbers a layer's rule writes down for every record."""
    writes = _RULES.get(type(layer), AnyLayerRule) in (AnyLayerRule, ConvolutionRule)
    return sum(p.numel() for p in layer.parameters() if p.requires_grad) if writes else 0
