"""`eagle3-evaluate`, and jobs/evaluate.py."""

from eagle3_ray import cli, evaluate


def main() -> int:
    """Does as the command line says and returns the exit code."""
    return cli.main(evaluate.__doc__ or "", evaluate.run, evaluate.dry_run)
