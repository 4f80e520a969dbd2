"""Read the vision tower beside the text model of a ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Keys of an encoder's size, and what the families call them.
_NAMES = {
    "layers": ("depth", "vt_num_hidden_layers"),
    "hidden": ("hidden_size", "vt_hidden_size"),
    "width": ("intermediate_size", "vt_intermediate_size"),
    "patch": ("patch_size",),
    "merge": ("spatial_merge_size", "merge_kernel_size"),
}
#: Keys of towers that are not plain: heads wider than the model, layers of windows, embeddings for later layers.
_OTHERWISE = ("qkv_hidden_size", "layer_types", "deepstack_visual_indexes", "fullatt_block_indexes", "window_size")


def encoder_of(vision: Mapping[str, Any]) -> dict[str, int] | None:
    """The encoder of a ``vision_config``; None for a tower of another kind than ``EncoderSpec`` describes.

    >>> encoder_of({"vt_num_hidden_layers": 27, "vt_hidden_size": 1152, "vt_intermediate_size": 4304,
    ...     "patch_size": 14, "merge_kernel_size": [2, 2]})
    {'layers': 27, 'hidden': 1152, 'width': 4304, 'patch': 14, 'merge': 2}
    """
    gated = "gelu" not in str(vision.get("hidden_act", "gelu"))
    if gated or any(vision.get(key) for key in _OTHERWISE):
        return None
    found: dict[str, int] = {}
    for key, names in _NAMES.items():
        value = next((vision[name] for name in names if name in vision), None)
        if isinstance(value, list) and len({*map(str, value)}) == 1:
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            return None
        found[key] = value
    return found
