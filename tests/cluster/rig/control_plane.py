"""A control plane without nodes, on loopback: API server, etcd, and the controllers where a test needs them."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

from rig.binaries import find
from rig.pki import Authority
from rig.programs import Program, free_ports, until

_START_SECONDS = 60.0


class ControlPlane:
    """Starts on entering, ends on leaving; everything is in `folder`.

    Args:
        folder: state and logs.
        controllers: run kube-controller-manager too (garbage collection, ReplicaSets, namespaces).
    """

    def __init__(self, folder: Path, controllers: bool = True) -> None:
        self.folder = folder
        self.kubeconfig = folder / "admin.conf"
        self._controllers = controllers
        self._programs: dict[str, Program] = {}
        self._commands: dict[str, list[str]] = {}
        self.server = ""

    def __enter__(self) -> Self:
        names = ["etcd", "kube-apiserver", *(["kube-controller-manager"] if self._controllers else [])]
        paths = find(*names)
        self.folder.mkdir(parents=True, exist_ok=True)
        client, peer, secure = free_ports(3)
        self.server = f"https://127.0.0.1:{secure}"
        self._authority = Authority(self.folder / "pki")
        self._commands["etcd"] = self._etcd(str(paths["etcd"]), client, peer)
        self._commands["kube-apiserver"] = self._api_server(str(paths["kube-apiserver"]), client, secure)
        if self._controllers:
            self._commands["kube-controller-manager"] = self._controller_manager(str(paths["kube-controller-manager"]))
        self._admin = self._authority.issue("admin", "admin", "system:masters")
        self._authority.kubeconfig(self.kubeconfig, self.server, self._admin)
        try:
            for name in self._commands:
                self.start(name)
                if name == "kube-apiserver":
                    self.wait_ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for program in reversed(self._programs.values()):
            program.kill()
        self._programs.clear()

    def start(self, name: str) -> None:
        """Start a program, also again after it was killed."""
        self._programs[name] = Program(name, self._commands[name], self.folder / f"{name}.log")

    def kill(self, name: str) -> None:
        """End a program at once."""
        self._programs[name].kill()

    def wait_ready(self) -> None:
        """Wait until the API server answers that it is ready."""
        programs = [self._programs[name] for name in ("etcd", "kube-apiserver")]
        until(self._ready, "the API server", _START_SECONDS, programs)

    def user(self, name: str, group: str = "") -> Path:
        """Kubeconfig of a user who has no rights until some are bound."""
        identity = self._authority.issue(name.replace(":", "-"), name, group)
        return self._authority.kubeconfig(self.folder / f"{name.replace(':', '-')}.conf", self.server, identity)

    def client_context(self, anonymous: bool = False) -> ssl.SSLContext:
        """TLS of the administrator, or of somebody who shows no certificate."""
        context = ssl.create_default_context(cafile=str(self._authority.certificate))
        if anonymous:
            return context
        context.load_cert_chain(self._admin.certificate, self._admin.key)
        return context

    def _ready(self) -> bool:
        context = ssl.create_default_context(cafile=str(self._authority.certificate))
        try:
            with urllib.request.urlopen(f"{self.server}/readyz", timeout=2, context=context) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _etcd(self, program: str, client: int, peer: int) -> list[str]:
        urls = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
        return [
            program,
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={urls[0]}",
            f"--advertise-client-urls={urls[0]}",
            f"--listen-peer-urls={urls[1]}",
            f"--initial-advertise-peer-urls={urls[1]}",
            f"--initial-cluster=default={urls[1]}",
            "--unsafe-no-fsync",
        ]

    def _api_server(self, program: str, etcd: int, secure: int) -> list[str]:
        hosts = ["127.0.0.1", "10.96.0.1", "localhost", "kubernetes.default.svc"]
        identity = self._authority.issue("apiserver", "kube-apiserver", hosts=hosts)
        self._sa_key, sa_public = self._authority.service_account_key()
        return [
            program,
            f"--etcd-servers=http://127.0.0.1:{etcd}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            "--endpoint-reconciler-type=none",
            f"--secure-port={secure}",
            f"--tls-cert-file={identity.certificate}",
            f"--tls-private-key-file={identity.key}",
            f"--client-ca-file={self._authority.certificate}",
            "--service-cluster-ip-range=10.96.0.0/16",
            f"--service-account-key-file={sa_public}",
            f"--service-account-signing-key-file={self._sa_key}",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--authorization-mode=RBAC",
            # Some distributions check who may name an owner that waits for its children.
            "--enable-admission-plugins=OwnerReferencesPermissionEnforcement",
        ]

    def _controller_manager(self, program: str) -> list[str]:
        identity = self._authority.issue("controller-manager", "system:kube-controller-manager")
        config = self._authority.kubeconfig(self.folder / "controller-manager.conf", self.server, identity)
        return [
            program,
            f"--kubeconfig={config}",
            f"--service-account-private-key-file={self._sa_key}",
            f"--root-ca-file={self._authority.certificate}",
            "--use-service-account-credentials",
            "--leader-elect=false",
            "--secure-port=0",
        ]
