"""The one error of the Kubernetes boundary: what was asked, what came back, what to do about it."""

from __future__ import annotations

from pipelinerl.errors import PipelineRLError
from pipelinerl.kube.permissions import Permission


class KubeError(PipelineRLError):
    """The API refused, or gave no answer.

    Attributes: `permission` (what was asked for), `status` (of HTTP; 0 = no answer), `detail` (the server's words or the
    connection's error).
    """

    def __init__(self, permission: Permission, status: int, detail: str) -> None:
        self.permission, self.status, self.detail = permission, status, detail
        answer = f"status {status}" if status else "no answer"
        super().__init__(f"cannot {permission}: {answer}: {detail}{self._fix}")

    @property
    def denied(self) -> bool:
        """It will be refused again, until somebody changes a Role or a token."""
        return self.status in (401, 403)

    @property
    def expired(self) -> bool:
        """The place in the watch that was asked for is no longer kept: list again."""
        return self.status == 410

    @property
    def _fix(self) -> str:
        group = self.permission.api_group or '""'
        if self.status == 403:
            return (
                f". Bind the pod's ServiceAccount to a Role with apiGroups [{group}], resources "
                f"[{self.permission.resource}], verbs [{self.permission.verb}]"
            )
        return ". The API does not accept the ServiceAccount's token" if self.status == 401 else ""
