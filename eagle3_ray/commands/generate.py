"""`eagle3-generate`, and jobs/generate.py."""

from eagle3_ray import cli, generate


def main() -> int:
    """Does as the command line says and returns the exit code."""
    return cli.main(generate.__doc__ or "", generate.run, generate.dry_run)
