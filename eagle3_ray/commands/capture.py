"""`eagle3-capture`, and jobs/capture.py."""

from eagle3_ray import capture, cli


def main() -> int:
    """Does as the command line says and returns the exit code."""
    return cli.main(capture.__doc__ or "", capture.run, capture.dry_run)
