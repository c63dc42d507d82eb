"""A real SGLang server on a CPU, for laptops and CI: installed, given a small model, started and stopped from here."""

from eagle3_ray.sglang.processes import ServerFailed
from eagle3_ray.sglang_cpu.server import Server
from eagle3_ray.sglang_cpu.smollm2 import model
from eagle3_ray.sglang_cpu.venv import InstallFailed, install

__all__ = ["InstallFailed", "Server", "ServerFailed", "install", "model"]
