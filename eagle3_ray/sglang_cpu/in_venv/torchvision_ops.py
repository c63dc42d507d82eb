"""Declares the two operators without which torchvision does not import.

The torchvision wheel for CUDA, the only one on the public index, cannot load its compiled operators beside a CPU
build of torch, and its Python part then fails on registering shape functions for `nms` and `qnms`. transformers and
SGLang import torchvision whatever the model; neither calls these operators for a text model.
"""

import torch

LIBRARY = torch.library.Library("torchvision", "DEF")
"""Held for the life of the process: torch drops the declarations when the library object is collected."""

for operator in ("nms", "qnms"):
    LIBRARY.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
