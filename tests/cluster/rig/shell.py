"""`make cluster`: a shell with a control plane behind KUBECONFIG, ended with the shell."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rig.binaries import RigError, find
from rig.control_plane import ControlPlane
from rig.kubectl import Kubectl
from rig.programs import Program

ROOT = Path(__file__).parents[3]


def main() -> int:
    """Start everything, run `$SHELL` (or the arguments), end everything."""
    command = sys.argv[1:] or [os.environ.get("SHELL", "bash")]
    try:
        folder = find("kubectl")["kubectl"].parent
        with tempfile.TemporaryDirectory(prefix="disagg-cluster-") as state, ControlPlane(Path(state)) as plane:
            Kubectl(plane.kubeconfig).run("apply", "-f", str(ROOT / "crds"))
            environment = {"KUBECONFIG": str(plane.kubeconfig), "PATH": f"{folder}:{os.environ.get('PATH', '')}"}
            log = Path(state) / "operator.log"
            operator = Program("operator", [sys.executable, "-m", "disagg_operator"], log, environment)
            print(f"KUBECONFIG={plane.kubeconfig}\noperator's log: {log}\nThere is no node: pods stay pending.")
            try:
                return subprocess.call(command, env={**os.environ, **environment})
            finally:
                operator.stop()
    except RigError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
