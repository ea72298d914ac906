"""Amazon's EC2.

Two minutes before a spot machine is stopped, terminated or hibernated, `spot/instance-action` appears on its metadata
server (https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html). Before that the server
answers 404. Amazon says to ask every five seconds.

A request carries a token that the server gives for six hours (IMDSv2). A server that has no tokens is asked without one.
The recommendation to rebalance, which is only a risk, doesn't end a run.
"""

from __future__ import annotations

import json
import os

from footplate.training.preemption.notices import MetadataServer, PolledNotices, dmi

POLL_S = 5.0
ANSWER_S = 5.0
TOKEN_S = 21_600
ACTIONS = {"stop": "stopped", "terminate": "terminated", "hibernate": "hibernated"}
# Answers to the request for a token by servers that have none.
NO_TOKENS = (403, 404, 405)
TOKEN_EXPIRED = 401


class EC2(PolledNotices):
    """Amazon's notices. `AWS_EC2_METADATA_SERVICE_ENDPOINT` and `AWS_EC2_METADATA_DISABLED` work as in Amazon's SDKs."""

    def __init__(self) -> None:
        endpoint = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT")
        super().__init__(MetadataServer(endpoint or "http://169.254.169.254", ANSWER_S), POLL_S)
        self._named = bool(endpoint)
        self._token: str | None = None

    def is_present(self) -> bool:
        if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
            return False
        return self._named or dmi("sys_vendor") == "Amazon EC2" or dmi("product_uuid").lower().startswith("ec2")

    def ask(self) -> str | None:
        """What is going to happen to the machine; None if nothing is."""
        if self._token is None:
            self._token = self._new_token()
        headers = {"X-aws-ec2-metadata-token": self._token} if self._token else {}
        status, text, _ = self._server.ask("/latest/meta-data/spot/instance-action", headers)
        if status == 404:
            return None
        if status == TOKEN_EXPIRED:
            self._token = None
        if status != 200:
            raise self._server.refused(status)
        try:
            action = json.loads(text)["action"]
        except (ValueError, KeyError, TypeError):
            action = ""
        return f"this spot machine will be {ACTIONS.get(action, 'interrupted')}"

    def _new_token(self) -> str:
        """A token for requests; empty if the server has none."""
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
        status, text, _ = self._server.ask("/latest/api/token", headers, method="PUT")
        if status in NO_TOKENS:
            return ""
        if status != 200:
            raise self._server.refused(status)
        return text
