"""Names of hosts; tests/run/backends/hosts_worker.py describes those of several ranks."""

from placewise.measure.all_hosts import host_names


def test_hosts_of_the_same_name_get_their_rank() -> None:
    """Two processes on one machine, and one on another."""
    assert host_names(["here", "there", "here"]) == ["here-0", "there", "here-2"]
