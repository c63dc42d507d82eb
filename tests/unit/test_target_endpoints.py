"""Each target has a server of its own, on its machine."""

import pytest

from eagle3_ray.sglang.processes import free_port
from eagle3_ray.target.endpoints import claim
from eagle3_ray.target.files import TargetError


def test_two_targets_never_share_a_server_and_one_that_ends_leaves_its_own() -> None:
    urls = [f"http://{host}:{free_port()}" for host in ("127.0.0.1", "localhost")]
    first, second = claim(urls), claim(urls)
    assert {first.url, second.url} == set(urls)
    with pytest.raises(TargetError, match=r"None of capture\.endpoints=.* is free on .*lower capture\.targets"):
        claim(urls)
    first.lock.close()
    third = claim(urls)
    assert third.url == first.url
    for one in (second, third):
        one.lock.close()


def test_a_server_of_another_machine_is_none_whose_states_can_be_read() -> None:
    with pytest.raises(TargetError, match=r"198\.51\.100\.7"):
        claim(["http://198.51.100.7:30000"])
