"""`python -m services.verifier`: serve rewards over gRPC until SIGTERM, configured by `PIPELINERL_*` variables."""

from __future__ import annotations

import argparse
import sys


def main() -> int:
    argparse.ArgumentParser(prog="python -m services.verifier", description=__doc__).parse_args()

    from pipelinerl.service.lifecycle import run_service
    from pipelinerl.service.settings import VerifierSettings
    from services.verifier.server import serve

    return run_service(VerifierSettings, "verifier", serve, stop_within_s=10.0)


if __name__ == "__main__":
    sys.exit(main())
