"""Errors that end a job in order, and how they are told to people."""

import errno

import ray

ENDS = (ray.exceptions.RayError, OSError, SystemExit, KeyboardInterrupt)
"""What ends a job's work in order: a lost cluster, a full disk, SIGTERM, Ctrl-C."""


class StoppedEarly(RuntimeError):
    """The run ends before its rows do (an audit's finding, no server left); everything finished is kept."""


def explain(error: BaseException) -> str:
    """One sentence for people: what ended the run, and what to do about it."""
    if isinstance(error, SystemExit | KeyboardInterrupt):
        return "SIGTERM" if isinstance(error, SystemExit) else "Ctrl-C"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"The disk is full ({error.filename or 'run.dir'}). Free some space and run the same command again."
    return str(error) if isinstance(error, StoppedEarly) else f"{type(error).__name__}: {error}"


def root_cause(error: BaseException) -> BaseException:
    """The error behind those that Ray wraps around it."""
    inner = getattr(error, "cause", None) or error.__cause__
    if isinstance(error, ray.exceptions.RayError) and isinstance(inner, BaseException):
        return root_cause(inner)
    return error
