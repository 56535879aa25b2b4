"""What a user hands over as a model: the torch module, its configuration, its processor."""

from typing import Any

from attnflow.errors import OptionError


def unwrap_module(model: Any) -> Any:
    """The torch module itself; what attnflow cannot run is refused."""
    module = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    kind = type(module).__name__
    if hasattr(type(model), "predicts"):
        raise OptionError("Model takes a Hugging Face model; got a Model: use it as it is")
    if not hasattr(module, "named_modules") or not hasattr(find_part(module), "config"):
        raise OptionError(
            "Model takes a Hugging Face model, or a module that holds one;"
            f" got {kind} (for plain PyTorch modules there is af.record)"
        )
    # accelerate leaves weights there, and brings them in when they are needed
    is_offloaded = hasattr(module, "hf_device_map")
    if not is_offloaded and any(tensor.is_meta for tensor in module.parameters()):
        raise OptionError(
            f"a model must have its weights; {kind} is on the meta device,"
            " which holds none: load it with from_pretrained"
        )
    return module


def read_processor(processor: Any) -> tuple[Any, Any]:
    """The tokenizer and the image processor that a processor is or holds; each may be None."""
    is_tokenizer = hasattr(processor, "convert_ids_to_tokens")
    tokenizer = getattr(processor, "tokenizer", processor if is_tokenizer else None)
    is_for_images = tokenizer is None and callable(processor)
    images = getattr(processor, "image_processor", processor if is_for_images else None)
    if processor is not None and tokenizer is None and images is None:
        raise OptionError(
            "a Model's processor must be a tokenizer or an image processor;"
            f" got {type(processor).__name__}"
        )
    return tokenizer, images


def find_part(module: Any) -> Any:
    """The module itself if it has a configuration, else the first of its parts that has one."""
    if hasattr(module, "config") or not hasattr(module, "modules"):
        return module
    return next((part for part in module.modules() if hasattr(part, "config")), module)
