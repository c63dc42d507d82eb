"""Starts a stand-in server with SGLang's own arguments, as `target.launch` of a job that starts its servers itself.

`--folder` holds `options.json` (fields of fake_engine.Options) and gets a request log, PID.log, of each server.
"""

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a job starts its servers without its own PYTHONPATH

from tests.fakes.fake_engine import Options
from tests.fakes.sglang_server import serve

SPECULATION = {
    "speculative_algorithm": str,
    "speculative_draft_model_path": str,
    "speculative_num_steps": int,
    "speculative_eagle_topk": int,
    "speculative_num_draft_tokens": int,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tp-size", type=int, required=True)
    for name, kind in SPECULATION.items():
        parser.add_argument("--" + name.replace("_", "-"), type=kind)
    arguments = parser.parse_args()
    options = Options(model_path=arguments.model_path, **json.loads((arguments.folder / "options.json").read_text()))
    options.server_info = {name: getattr(arguments, name) for name in SPECULATION}
    if arguments.speculative_algorithm:
        options.faults = {"speculative": 1.0}  # in training data it would be one
    log = os.open(arguments.folder / f"{os.getpid()}.log", os.O_CREAT | os.O_APPEND | os.O_RDWR)
    asyncio.run(serve(arguments.port, options, log, arguments.host))


if __name__ == "__main__":
    main()
