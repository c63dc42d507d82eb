"""`eagle3-train`, and jobs/train.py."""

from eagle3_ray import cli, train


def main() -> int:
    """Does as the command line says and returns the exit code."""
    return cli.main(train.__doc__ or "", train.run, train.dry_run)
