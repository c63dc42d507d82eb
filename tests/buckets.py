"""An object store for tests: moto's server, which speaks S3."""

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow.fs as pafs
import pytest
from moto.server import ThreadedMotoServer


@contextmanager
def s3_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Starts a server with one empty bucket; gives the URI of a place in it, `{}` for the path."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        _, port = server.get_host_and_port()
        options = f"scheme=http&endpoint_override=127.0.0.1:{port}&region=us-east-1&allow_bucket_creation=true"
        filesystem, bucket = pafs.FileSystem.from_uri(f"s3://bucket?{options}")
        filesystem.create_dir(bucket)
        yield f"s3://bucket/{{}}?{options}"
    finally:
        server.stop()
