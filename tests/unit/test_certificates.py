"""Certificates whose files change while they are looked at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.service import tls as certificates
from pipelinerl.service.tls import RenewedCertificates
from tests.support.certificates import Authority


@pytest.mark.parametrize("look", ["check_pair", "check_ca", "_shake_hands"])
def test_a_file_that_goes_while_it_is_looked_at_leaves_the_last_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    authority = Authority()
    files = RenewedCertificates(authority.issue(tmp_path, "a"), "client")
    before = files.certificates
    authority.issue(tmp_path, "a")
    with monkeypatch.context() as patch:
        patch.setattr(certificates, look, _without_files(tmp_path, getattr(certificates, look)))
        assert not files.renew()
    assert files.certificates == before
    authority.issue(tmp_path, "a")
    assert files.renew()


def _without_files(folder: Path, check: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*args: Any) -> Any:
        for file in folder.iterdir():
            file.unlink()
        return check(*args)

    return checked
