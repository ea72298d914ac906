"""Plans of tensor parallelism: which layers are cut into parts, and how.

    class Training(fp.Module):
        def tensor_parallel_plan(self):
            return {"net.blocks.*.up": ColwiseParallel(), "net.blocks.*.down": RowwiseParallel()}

A plan gives torch's `ParallelStyle`s by patterns of module names. `*` stands for one part of a name. The outermost layer
that has a plan decides for all that is in it: the module, or a model in it. Names are relative to that layer.

The models of transformers have plans in words of their own, which are translated here:

    colwise, rowwise                  the parts of the outputs, and of the inputs, of a linear layer
    colwise_gather_output             every rank gets all outputs; colwise_rep is its earlier name
    rowwise_split_input               rowwise, for inputs that every rank has whole
    embedding_rowwise                 the parts of a vocabulary
    replicated_with_grad_allreduce    a norm over the heads of a rank: each rank has all of its weights, whose gradients are
                                      summed over the ranks

Layers without a style stay whole, and every rank of a group computes them alike.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from footplate.core.errors import ConfigError, did_you_mean

# A layer's name, the layer, and its style.
Planned = tuple[str, nn.Module, Any]


def planned_layers(module: nn.Module, size: int) -> list[Planned]:
    """The layers of a module that its plan, or the plans of models in it, name.

    Args:
        module: the user's module.
        size: the ranks of a tensor-parallel group.

    Raises:
        ConfigError: there is no plan, it names a layer that isn't there, or it can't be followed.
    """
    planned = [entry for name, owner in _owners(module, "") for entry in _layers_of(name, owner, size)]
    if not planned:
        kind = type(module).__name__
        raise ConfigError(
            f"tensor_parallel_size={size}: {kind} has no plan that says how its layers are cut. Define "
            f"{kind}.tensor_parallel_plan(), which returns torch's ParallelStyles by names of layers, such as "
            '{"net.*.up": ColwiseParallel()}, or call parallelize_module in configure_model. Many decoders of transformers '
            "have a plan."
        )
    return planned


def _owners(layer: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Find the outermost layers with plans."""
    if _has_plan(layer):
        yield name, layer
        return
    for part, child in layer.named_children():
        yield from _owners(child, f"{name}.{part}" if name else part)


def _has_plan(layer: Any) -> bool:
    return callable(getattr(layer, "tensor_parallel_plan", None)) or bool(_plan_of_transformers(layer))


def _plan_of_transformers(layer: Any) -> Mapping[str, str]:
    """The plan of a model of transformers, of any other layer an empty one."""
    is_property = isinstance(getattr(type(layer), "tp_plan", None), property)
    return layer.tp_plan if is_property else {}


def _layers_of(name: str, owner: Any, size: int) -> Iterator[Planned]:
    """The planned layers of a layer with a plan."""
    own = getattr(owner, "tensor_parallel_plan", None)
    if own is None:
        _check_heads(owner.config, name or type(owner).__name__, size)
        styles: Any = {pattern: _translated(word, pattern) for pattern, word in _plan_of_transformers(owner).items()}
    else:
        styles = _checked(own(), owner)

    names = {part: layer for part, layer in owner.named_modules() if part}
    patterns: dict[str, str] = {}
    for pattern, style in styles.items():
        parts = [part for part in names if _matches(part, pattern)]
        # Plans of transformers also name the layers of larger models of a family.
        if not parts and own is not None:
            raise ConfigError(
                f'{type(owner).__name__}.tensor_parallel_plan() names "{pattern}", and there is no such layer. '
                f"{did_you_mean(pattern, list(names))}"
            )
        for part in parts:
            if part in patterns:
                raise ConfigError(
                    f"{type(owner).__name__}: the plan of tensor parallelism has two styles for {part}, "
                    f'by "{patterns[part]}" and by "{pattern}". Give it one.'
                )
            patterns[part] = pattern
            yield f"{name}.{part}" if name else part, names[part], style


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def _checked(plan: Any, owner: nn.Module) -> Mapping[str, Any]:
    from torch.distributed.tensor.parallel.style import ParallelStyle

    kind = type(owner).__name__
    if not isinstance(plan, Mapping):
        raise ConfigError(
            f"{kind}.tensor_parallel_plan() returned {type(plan).__name__}: expected a dict of torch's ParallelStyles by "
            "names of layers."
        )
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle):
            raise ConfigError(
                f'{kind}.tensor_parallel_plan() has {style!r} for "{pattern}": expected a ParallelStyle of '
                "torch.distributed.tensor.parallel, such as ColwiseParallel()."
            )
    return plan


def _translated(word: str, pattern: str) -> Any:
    """The style of torch for a word of transformers.

    Raises:
        ConfigError: there is none.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    # A norm over each head sees other heads on each rank. All dimensions but the last are alike to it.
    styles: dict[str, Callable[[], Any]] = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
        "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=1, use_local_output=True),
    }
    if word not in styles:
        raise ConfigError(
            f'The plan of transformers cuts "{pattern}" by "{word}", which Footplate doesn\'t know. It knows '
            f"{', '.join(styles)}. Define tensor_parallel_plan() on your module, with a style for each layer to cut."
        )
    return styles[word]()


def _check_heads(config: Any, name: str, size: int) -> None:
    """Check that each rank gets the same number of the attention heads of a model of transformers.

    Raises:
        ConfigError: it doesn't.
    """
    config = config.get_text_config()
    for option in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, option, None) or size
        if heads % size:
            raise ConfigError(
                f"tensor_parallel_size={size}: {name} has {option}={heads}, and each rank takes the same number of heads. "
                f"Use a size that divides {heads}."
            )
