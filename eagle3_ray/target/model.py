"""Loads the target as transformers has it, with the code that comes with it where that is trusted."""

from pathlib import Path
from typing import Any

import torch

from eagle3_ray.target.files import TargetError


def load_model(folder: Path, dtype: torch.dtype, trust_remote_code: bool, **options: Any) -> Any:
    """The causal language model in `folder`; `options` are more of `from_pretrained`.

    Raises:
        TargetError: only the folder's own code can load it, and `trust_remote_code` is off.
    """
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=trust_remote_code, **options)
    except ValueError as error:
        if trust_remote_code or "trust_remote_code" not in str(error):
            raise
        raise TargetError(
            f"target.trust_remote_code=false, and {folder} can only be loaded by the Python code in it. "
            "Read that code, and set target.trust_remote_code=true if you trust it."
        ) from None
