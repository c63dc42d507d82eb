"""Runs `sglang.launch_server` on a CPU without AMX: `python launch.py SGLANG_ARGUMENTS`.

SGLang spawns its scheduler and detokenizer, and a spawned process imports this file again (as `__mp_main__`), so what
stands at module level reaches all of them. Nothing here knows of the rest of eagle3_ray.
"""

import sys

import torchvision_ops  # noqa: F401  before SGLang, which imports torchvision
from parent_watch import die_with_parent


def report_amx() -> None:
    """Lets the EAGLE-3 worker run: it has no plain torch backend, only the AMX one (sglang 0.5.23).

    SGLang refuses that backend where the platform lacks AMX. The platform is therefore reported to have it, and the
    sgl_kernel stand-in beside this file supplies the operators in plain torch.
    """
    import sgl_kernel  # noqa: F401  registers torch.ops.sgl_kernel
    from sglang.srt.arg_groups import overrides

    real_platform = overrides.get_platform

    class PlatformWithAmx:
        has_amx = True

        def __getattr__(self, name: str) -> object:
            return getattr(real_platform(), name)

    overrides.get_platform = PlatformWithAmx


die_with_parent()

if "intel_amx" in sys.argv:  # a spawned process finds the server's own arguments here
    report_amx()

if __name__ == "__main__":
    import runpy

    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
