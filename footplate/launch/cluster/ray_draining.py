"""Notices that a node of a Ray cluster is going to end. Ray calls such a node *draining*.

Ray's autoscaler drains a node before it ends it, for instance before a preemption, and people drain one with
`ray drain-node`. The node still runs until a deadline, and Ray places nothing new on it.

Ray's calls wait for a lost head for a minute. So a thread asks, and asks only while the head answers.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Any

from footplate.launch.cluster import ray_session

log = logging.getLogger(__name__)

LOOK_S = 2.0


def nodes(ray: Any) -> dict[str, int]:
    """The draining nodes, with their deadlines."""
    # As Ray Train asks; Ray has no public call for it.
    return ray._private.state.state.get_draining_nodes()


def nodes_of(ray: Any, group: Any) -> list[str]:
    """The node of each bundle of a placement group, once it is reserved."""
    return list(ray.util.placement_group_table(group)["bundles_to_node_id"].values())


class DrainWatch:
    """Asks Ray whether a node of a placement group is draining, until it is closed.

    Attributes:
        draining: whether one is.
    """

    def __init__(self, ray: Any, group: Any) -> None:
        self.draining = False
        self._ray = ray
        self._group = group
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="footplate-draining", daemon=True).start()

    def close(self) -> None:
        """Stop asking. A question that is on its way may still be answered."""
        self._closed.set()

    def _watch(self) -> None:
        while not self.draining and not self._closed.wait(LOOK_S):
            if ray_session.wait_for_head(self._ray, 0):
                continue
            # The group may be gone, or the head since a moment ago: the next question tells.
            with contextlib.suppress(Exception):
                draining = self._draining_nodes()
                if draining and not self._closed.is_set():
                    log.warning("Ray drains node %s, which has some of the ranks", ", ".join(draining))
                    self.draining = True

    def _draining_nodes(self) -> list[str]:
        """The addresses of the group's nodes that are draining."""
        draining = set(nodes_of(self._ray, self._group)) & nodes(self._ray).keys()
        if not draining:
            return []
        return [node["NodeManagerAddress"] for node in self._ray.nodes() if node["NodeID"] in draining]
