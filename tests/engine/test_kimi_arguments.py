"""What the Kimi preset's servers are started with, read and checked by SGLang's own code. Nothing is served.

SGLang resolves the arguments against Kimi's config for this machine's CPU, since there is no GPU to resolve them for.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from eagle3_ray.acceptance.serving import Serving
from eagle3_ray.acceptance.tally import PLAIN
from eagle3_ray.config import load
from eagle3_ray.drafter.config import DrafterConfig
from eagle3_ray.sglang import start
from eagle3_ray.sglang.processes import ServerProcess
from eagle3_ray.sglang_cpu import in_venv
from eagle3_ray.sglang_cpu.server import server_environment
from eagle3_ray.sglang_cpu.venv import install
from eagle3_ray.target.layers import resolve_layers
from eagle3_ray.target.sglang_server import capture_arguments
from tests.kimi_target import CONFIG, make_kimi_target

PRESET = load("kimi-k2.5-8xblackwell")
PARSE = """
import json, sys
import torchvision_ops
from sglang.srt.server_args import prepare_server_args
found = []
for words in json.loads(sys.argv[1]):
    args = prepare_server_args(words)
    found.append({name: getattr(args, name) for name in NAMES})
    args.resolve_once()
    args.check_server_args()
print(json.dumps(found))
"""
NAMES = (
    "model_path",
    "tp_size",
    "trust_remote_code",
    "dtype",
    "chunked_prefill_size",
    "disable_radix_cache",
    "enable_return_aux_hidden_states",
    "return_aux_hidden_state_layer_ids",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_num_steps",
    "speculative_num_draft_tokens",
)


def arguments(server: ServerProcess) -> list[str]:
    """Behind Python, the watch and the launch command, which is one word here."""
    return server._command[3:]


def sglang_reads(*command_lines: list[str]) -> list[dict[str, Any]]:
    code = f"NAMES = {NAMES!r}\n{PARSE}"
    environment = server_environment(threads=1) | {"PYTHONPATH": str(Path(in_venv.__file__).parent)}
    ran = subprocess.run(
        [install() / "bin" / "python", "-c", code, json.dumps(command_lines)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        raise ValueError(ran.stderr)
    found: list[dict[str, Any]] = json.loads(ran.stdout.splitlines()[-1])
    return found


def test_sglang_takes_the_arguments_of_every_stage_as_they_are_meant(tmp_path: Path) -> None:
    model, drafter = make_kimi_target(tmp_path / "kimi"), tmp_path / "drafter"
    drafter.mkdir()
    (drafter / "config.json").write_text(json.dumps(DrafterConfig.from_target(CONFIG).to_json()))
    ours = PRESET.target.server_args
    generate = start.server(
        str(model), PRESET.generate.gpus_per_server, "LAUNCH", [*ours, *PRESET.generate.server_args], port=1234
    )
    layers = resolve_layers(CONFIG, PRESET.capture.layers)
    words = [*ours, *PRESET.capture.server_args, "--dtype", "bfloat16", *capture_arguments(CONFIG, layers)]
    capture = start.server(str(model), PRESET.capture.gpus_per_target, "LAUNCH", words)
    serving = Serving(str(model), PRESET.evaluate.steps, "LAUNCH", PRESET.evaluate.gpus, args=tuple(ours))
    engines = [
        start.server(str(model), serving.gpus, serving.launch, serving.arguments(name), port=1234)
        for name in (PLAIN, str(drafter))
    ]
    read = sglang_reads(*map(arguments, [generate, capture, *engines]))
    assert all(args["model_path"] == str(model) and args["trust_remote_code"] for args in read)
    assert [args["tp_size"] for args in read] == [8, 4, 8, 8]
    assert [args["speculative_algorithm"] for args in read] == [None, "EAGLE3", None, "EAGLE3"]
    capturing, drafting = read[1], read[3]
    assert capturing["dtype"] == "bfloat16"
    assert (capturing["chunked_prefill_size"], capturing["disable_radix_cache"]) == (-1, True)
    assert capturing["enable_return_aux_hidden_states"]
    assert capturing["return_aux_hidden_state_layer_ids"] == [2, 30, 58]
    assert capturing["speculative_draft_model_path"] is None
    assert drafting["speculative_draft_model_path"] == str(drafter)
    assert (drafting["speculative_num_steps"], drafting["speculative_num_draft_tokens"]) == (5, 6)


def test_an_argument_that_sglang_does_not_know_is_found() -> None:
    with pytest.raises(ValueError, match="unrecognized arguments: --trust-remote-cod"):
        sglang_reads(["--model-path", "x", "--trust-remote-codes"])
