"""Certificates of one test cluster: an authority, and who it vouches for."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_LIFE = datetime.timedelta(days=7)


@dataclass(frozen=True)
class Identity:
    """Paths of a certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """A certificate authority in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "disagg-test-ca")])
        certificate = (
            _builder(self._name, self._key.public_key())
            .issuer_name(self._name)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        folder.mkdir(parents=True, exist_ok=True)
        self.certificate = folder / "ca.crt"
        self.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        self.key = folder / "ca.key"
        _write_key(self.key, self._key)

    def issue(self, name: str, common_name: str, group: str = "", hosts: Sequence[str] = ()) -> Identity:
        """A certificate for a client, or for a server at `hosts` (names and addresses)."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
        if group:
            subject.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, group))
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        builder = _builder(x509.Name(subject), key.public_key()).issuer_name(self._name)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        if hosts:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False
            )
        identity = Identity(self.folder / f"{name}.crt", self.folder / f"{name}.key")
        signed = builder.sign(self._key, hashes.SHA256())
        identity.certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        _write_key(identity.key, key)
        return identity

    def service_account_key(self) -> tuple[Path, Path]:
        """Private and public key that sign ServiceAccount tokens."""
        key = ec.generate_private_key(ec.SECP256R1())
        private, public = self.folder / "sa.key", self.folder / "sa.pub"
        _write_key(private, key)
        encoded = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        public.write_bytes(encoded)
        return private, public

    def kubeconfig(self, path: Path, server: str, identity: Identity) -> Path:
        """Write a kubeconfig for an identity."""
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "rig", "cluster": {"server": server, "certificate-authority": str(self.certificate)}}
            ],
            "users": [
                {
                    "name": "user",
                    "user": {"client-certificate": str(identity.certificate), "client-key": str(identity.key)},
                }
            ],
            "contexts": [{"name": "rig", "context": {"cluster": "rig", "user": "user"}}],
            "current-context": "rig",
        }
        path.write_text(yaml.safe_dump(document))
        return path


def _builder(subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    # Written in the past: clocks of a machine and of its namespaces are the same, but second fractions are cut.
    start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=1)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + _LIFE)
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
