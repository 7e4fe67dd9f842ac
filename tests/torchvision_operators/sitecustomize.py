"""Lets Python import a torchvision that was built for another torch: for tests, by PYTHONPATH.

vLLM's classes with towers import torchvision, and there is no build of it for CPUs on the package
index. Its own operators, which cannot be loaded, are not used; two of them must be declared.
"""

import sys

SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class Declarations:
    """Declares the operators before torchvision is imported."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torchvision":
            import torch

            sys.meta_path.remove(Declarations)
            for operator in ("nms", "qnms"):
                torch.library.define(f"torchvision::{operator}", SCHEMA)
        # None: the next finder finds it.


sys.meta_path.insert(0, Declarations)
