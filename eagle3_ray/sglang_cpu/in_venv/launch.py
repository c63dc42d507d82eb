"""Runs `sglang.launch_server` on a CPU without AMX: `python launch.py SGLANG_ARGUMENTS`.

Its scheduler and detokenizer are forked from this process and so have what is done here. Nothing here knows of the rest
of eagle3_ray.
"""

import multiprocessing
from typing import Any

import torchvision_ops  # noqa: F401  before SGLang, which imports torchvision


def use_the_stand_in() -> None:
    """Sends attention and matrix products to the sgl_kernel stand-in beside this file.

    SGLang's plain torch attention loops over the requests in every layer, and the EAGLE-3 worker does not know it at
    all (sglang 0.5.23). Both can have the AMX backend, which is refused where the platform lacks AMX: the platform is
    therefore reported to have it. The same holds for packed weights, for which each module is asked.
    """
    import sgl_kernel  # noqa: F401  registers torch.ops.sgl_kernel
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from sglang.srt.runtime_context import override_platform

    override_platform(has_amx=True).install()
    UnquantizedLinearMethod.process_weights_after_loading = report_packed
    VocabParallelEmbedding.use_intel_amx_backend = True  # asked of an output head, which may be a tied embedding


def report_packed(_method: object, layer: Any) -> None:
    layer.use_intel_amx_backend = True


def fork_the_engine() -> None:
    """Scheduler and detokenizer begin as copies of a process that has imported all of SGLang, which takes the longest.

    SGLang spawns them because CUDA cannot be forked (sglang 0.5.23: entrypoints/engine.py); here is none.
    """
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *_, **__: None


if __name__ == "__main__":
    import runpy

    use_the_stand_in()
    fork_the_engine()
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
