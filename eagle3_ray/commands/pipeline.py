"""`eagle3-pipeline`, and jobs/pipeline.py."""

from eagle3_ray import cli, pipeline


def main() -> int:
    """Does as the command line says and returns the exit code."""
    return cli.main(pipeline.__doc__ or "", pipeline.run, pipeline.dry_run)
