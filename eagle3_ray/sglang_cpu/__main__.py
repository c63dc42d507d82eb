"""python -m eagle3_ray.sglang_cpu install | model | serve: a real SGLang server on this machine's CPU."""

import argparse
import signal
import sys
from pathlib import Path

from eagle3_ray.sglang_cpu import InstallFailed, Server, ServerFailed, install, model


def parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="python -m eagle3_ray.sglang_cpu", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("install", help="make SGLang's virtual environment in the cache folder")
    commands.add_parser("model", help="make SmolLM2-135M-Instruct's folder in the cache folder")
    serve = commands.add_parser(
        "serve",
        help="serve a model until Ctrl-C or SIGTERM; arguments not listed here go to SGLang",
        allow_abbrev=False,
    )
    serve.add_argument("--model", type=Path, metavar="DIR", help="a Hugging Face folder (SmolLM2-135M-Instruct)")
    serve.add_argument("--port", type=int, default=0, metavar="N", help="0 (the default) takes a free port")
    serve.add_argument("--threads", type=int, metavar="N", help="CPU threads of the model (one a core, at most 4)")
    arguments, rest = parser.parse_known_args(words)
    if rest and arguments.command != "serve":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return arguments, rest


def serve(arguments: argparse.Namespace, sglang_arguments: list[str]) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both signals leave the with block below
    server = Server(
        arguments.model or model(),
        port=arguments.port,
        args=sglang_arguments,
        threads=arguments.threads,
    )
    print(f"starting SGLang, log in {server.log}", flush=True)
    try:
        with server:
            print(server.url, flush=True)
            server.wait()
    except KeyboardInterrupt:
        print("stopped", flush=True)


def main(words: list[str]) -> int:
    arguments, rest = parse(words)
    try:
        if arguments.command == "install":
            print(install())
        elif arguments.command == "model":
            print(model())
        else:
            serve(arguments, rest)
    except (InstallFailed, ServerFailed) as failure:
        print(f"{type(failure).__name__}: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
