"""Work that is done again and again beside a block of code."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeated(work: Callable[[], None], every_s: float, name: str) -> Iterator[None]:
    """Calls `work` at once and then every so many seconds, in a thread of that name, for as long as the block lasts."""
    end = threading.Event()

    def run() -> None:
        while not end.is_set():
            work()
            end.wait(every_s)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
